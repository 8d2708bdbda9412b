"""Attributes ops to phases, modules and source lines, and names tensors."""
