"""What the installed torch says of its ops: which of them need not give the same bits twice, and which draw."""

from det_callbacks.nondeterminism.applicability import may_apply
from det_callbacks.nondeterminism.op_facts import BEHAVIOURS, Behaviour, Device, OpFact, parse_docstring, read_op_facts

__all__ = ["BEHAVIOURS", "Behaviour", "Device", "OpFact", "may_apply", "parse_docstring", "read_op_facts"]
