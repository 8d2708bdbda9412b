"""Two steps that are not the same program: ops in one run only, in a different order or again,
modules in another mode, and compiled, scripted or collective code in one run.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from det_callbacks.causes.generators import draws_in_one_run
from det_callbacks.causes.graph import Explanation, Graph, Node, Walk
from det_callbacks.causes.ops import cause_of_first
from det_callbacks.causes.sentences import place, side_of, site_text
from det_callbacks.compare.differences import RowDifference, recomputed_differently
from det_callbacks.compare.evidence import mode_of
from det_callbacks.runs.program import Program, StepView
from det_callbacks.text import listed

Side = Literal["reference", "current run"]

_MODES = ("eval", "train")

_Key = tuple[object, ...]


def another_length(graph: Graph, walk: Walk) -> Explanation | None:
    """After the last update of one run, only the other run goes on: a loop without a loader draws
    its next batch there.

    Causes: structure

    Example:
        Step 7: only the current run has ops after the optimizer's update: aten.randn.default in net
        (train.py:7, <module>); everything before them matches. The reference has no further step,
        so give both runs the same number of steps.
    """
    difference = graph.difference
    ends_early, (reference_ends, current_ends) = difference.ends_early, graph.is_last
    if ends_early == "reference" and reference_ends:
        side = "current run"
        advice = "The reference has no further step, so give both runs the same number of steps"
    elif ends_early == "current" and current_ends:
        side = "reference"
        # a verification stops at the first difference, so whether the script would go on is unknown
        advice = (
            "If the current run ends there, give both runs the same number of steps; otherwise "
            "check why it does not run these lines"
        )
    else:
        return None
    ops = dict.fromkeys(
        site_text(difference.describe(row))
        for row in difference.rows_after_update
        if difference.site(row).op and not difference.site(row).output
    )
    return Explanation(
        cause="structure",
        text=(
            f"{place(graph)}: only the {side} has ops after the optimizer's update: {listed(ops)}; "
            "everything before them matches"
        ),
        advice=advice,
    )


def modes_read(graph: Graph, row: int | None) -> Iterator[Node]:
    """Yield the modules that are in train mode in one run only, if a row may depend on that: an
    op of such a module, or a row whose ops were not recorded.
    """
    if row is None:
        return
    site = graph.difference.site(row)
    is_unrecorded = graph.difference.start(row) == "not recorded"
    if site.phase in ("forward", "other") and site.module != "?" and (site.op or site.module):
        may_depend = graph.evidence.has_other_mode(site.module)
    else:
        may_depend = is_unrecorded and site.phase != "optimizer"
    for name in graph.evidence.modules_in_other_mode if may_depend else ():
        modes = [mode_of(one, name) for one in graph.evidence.modes]
        reference, current = (_MODES[bool(mode)] for mode in modes)
        yield Node(
            kind="option",
            name=f"the mode of {name or 'the model'}",
            step=graph.difference.step,
            values=(reference, current),
            is_proven=False,
        )


def module_mode(graph: Graph, walk: Walk) -> Explanation:
    """A module is in train mode in one run and in eval mode in the other, and the first difference
    is in such a module.

    Causes: forward, rng, structure, backward, unknown

    Example:
        Step 2, forward: aten.bernoulli_.float in net.4 (train.py:9, training_step) ran only in the
        reference; its inputs match, so the difference starts here. Check where the script calls
        train() and eval(): net.4 is in eval mode in the current run, and in train mode in the
        reference.
    """
    by_mode: dict[bool | None, list[str]] = {}
    for name in graph.evidence.modules_in_other_mode:
        by_mode.setdefault(mode_of(graph.evidence.modes[0], name), []).append(name or "the model")
    modes = [
        f"{listed(names)} {'is' if len(names) == 1 else 'are'} in {_MODES[not mode]} mode in the "
        f"current run, and in {_MODES[bool(mode)]} mode in the reference"
        for mode, names in by_mode.items()
    ]
    return Explanation(
        cause="rng" if draws_in_one_run(graph) else cause_of_first(graph),
        advice=f"Check where the script calls train() and eval(): {listed(modes, '; ')}",
    )


def recomputation(graph: Graph, walk: Walk) -> Explanation | None:
    """Activation checkpointing ran an op again in one run only,
    or with other bits than in its forward pass.

    Causes: rng, backward, structure

    Example:
        Step 7, backward: activation checkpointing ran aten.bernoulli_.float in net.dropout
        (train.py:9, forward) again in the current run, and it gave other bits than in the forward
        pass. Do not pass preserve_rng_state=False to torch.utils.checkpoint.
    """
    first = graph.first.divergence
    if not _starts_recomputed(graph) or (first.op and first.kind not in ("missing", "extra")):
        return None
    other_bits = _recomputed_differently(graph)
    if len(other_bits) == 1:
        ((row, side),) = other_bits
        op, draws = graph.difference.describe(row), graph.draws(row)
        return Explanation(
            cause="rng" if draws else "backward",
            text=(
                f"{place(graph)}, {op.phase}: activation checkpointing ran {site_text(op)} again "
                f"in the {side}, and it gave other bits than in the forward pass"
            ),
            advice=advise_on_recomputation(draws=draws),
        )
    if not _has_only_recomputation(graph) or other_bits:
        return None
    return Explanation(
        cause="structure",
        text=(
            f"{place(graph)}, {first.phase}: only the {side_of(first)} recomputes activations, "
            f"from {site_text(first)} on, with the bits of the forward pass; everything that both "
            "runs have matches"
        ),
        advice="Use activation checkpointing in both runs, or in neither",
    )


def advise_on_recomputation(*, draws: bool) -> str:
    """Return what to do if an op gave other bits when activation checkpointing ran it again."""
    if draws:
        return "Do not pass preserve_rng_state=False to torch.utils.checkpoint"
    return (
        "Check what the checkpointed function reads that changed since its forward pass: a cache, "
        "a buffer, or a tensor that was changed in place"
    )


def _recomputed_differently(graph: Graph) -> list[tuple[int, Side]]:
    """Return the row of each run that activation checkpointing first computed again
    with other bits, and the run.
    """
    difference = graph.difference
    first_rows: list[tuple[int, Side]] = []
    sides: tuple[tuple[Side, StepView], ...] = (
        ("reference", difference.reference),
        ("current run", difference.current),
    )
    for number, (side, view) in enumerate(sides):
        position = recomputed_differently(view)
        row = next(
            (row for row, pair in enumerate(difference.pairs) if pair[number] == position), None
        )
        if position is not None and row is not None:
            first_rows.append((row, side))
    return first_rows


def _starts_recomputed(graph: Graph) -> bool:
    """Return whether the first difference is an op that activation checkpointing ran again,
    or what it drew from.
    """
    program, position = graph.difference.side(graph.first.row)
    readers, read = program.edges
    readers_of_first = [at for at in readers[read == position].tolist() if program.sites[at].op]
    is_state = graph.first.site.role == "generator" and bool(readers_of_first)
    return program.sites[readers_of_first[0] if is_state else position].recomputed


def _has_only_recomputation(graph: Graph) -> bool:
    """Return whether all that differs are ops that activation checkpointing ran
    again in one run.
    """
    rows = [row for row in graph.difference.kinds if row not in graph.difference.rows_after_step]
    return bool(rows) and all(graph.difference.site(row).recomputed for row in rows)


def compiled_in_one_run(graph: Graph, walk: Walk) -> Explanation | None:
    """Only one run has compiled code in this step; the other run has eager ops instead.

    Causes: structure

    Example:
        Step 0, forward: only the reference runs compiled code (compiled.Net_forward); the current
        run has eager ops instead, with different kernels. Compile both runs, or neither.
        compare_compiled measures how far a compiled module is from the module itself.
    """
    difference, leading = graph.difference, graph.leading.divergence
    reference, current = (
        _regions(difference.reference.program),
        _regions(difference.current.program),
    )
    if bool(reference) == bool(current) or leading.kind not in ("missing", "extra"):
        return None
    # without eager ops or module outputs instead, the other run may have compiled before its
    # recording: it has no sites
    eager = "extra" if reference else "missing"
    instead = [row for row, kind in difference.kinds.items() if kind == eager]
    if not any(difference.site(row).phase == "forward" for row in instead):
        return None
    sides = ("reference", "current run") if reference else ("current run", "reference")
    where, regions = f"{place(graph)}, {leading.phase}", listed(reference or current)
    return Explanation(
        cause="structure",
        text=(
            f"{where}: only the {sides[0]} runs compiled code ({regions}); the {sides[1]} has "
            "eager ops instead, with different kernels"
        ),
        advice=(
            "Compile both runs, or neither. compare_compiled measures how far a compiled module is "
            "from the module itself"
        ),
    )


def _regions(program: Program) -> list[str]:
    """Return the compiled regions of a step, whose graph it holds."""
    names = (site.op.removesuffix(".graph") for site in program.sites if site.role == "graph")
    return list(dict.fromkeys(names))


def collective_in_one_run(graph: Graph, walk: Walk) -> Explanation | None:
    """Only one run has a collective in this step, so the ranks of the other exchange nothing there.

    Causes: collective

    Example:
        Step 7, backward: c10d.allreduce_.default in no submodule (train.py:9, <module>) ran only in
        the reference. Check what skips it in the current run: a call of model.module instead of the
        wrapper (DistributedDataParallel), no_sync(), or a condition.
    """
    difference, leading = graph.difference, graph.leading.divergence
    if leading.kind not in ("missing", "extra"):
        return None
    programs = difference.reference.program, difference.current.program
    ops = [{row.site.op for row in program.rows} for program in programs]
    in_one_run = (row for row, kind in difference.kinds.items() if kind in ("missing", "extra"))
    collectives = (row for row in in_one_run if difference.site(row).is_collective)
    row = next((row for row in collectives if difference.site(row).op not in ops[0] & ops[1]), None)
    if row is None:
        return None
    collective = difference.describe(row)
    other = "current run" if collective.kind == "missing" else "reference"
    return Explanation(
        cause="collective",
        text=(
            f"{place(graph)}, {collective.phase}: {site_text(collective)} ran only in the "
            f"{side_of(collective)}"
        ),
        advice=f"Check what skips it in the {other}: a call of model.module instead of the wrapper "
        "(DistributedDataParallel), no_sync(), or a condition",
    )


def compiled_graph(graph: Graph, walk: Walk) -> Explanation | None:
    """torch.compile compiled a different graph.

    Causes: structure

    Example:
        Step 12, forward: compiled.Net_forward.graph in net differs, because of a recompilation, a
        graph break or different code; the inputs of the compiled region match, so the difference
        starts inside it. Run both in fresh processes, because earlier compilations affect the
        graph; drop_last or dynamic=True avoids recompilation. TORCH_LOGS=recompiles,graph_breaks
        shows the reason. To find the op, record step 12 of both runs with compiled="eager" and
        only_steps=[12] (on the command line: --compiled=eager --only-steps=12).
    """
    text, compiled = "", graph.origin
    if compiled is None or compiled.site.role != "graph":
        compiled = _graph_that_reads(graph)
        if compiled is None:
            return None
        text = (
            f"{place(graph)}: {site_text(compiled.divergence)} differs, because of a "
            "recompilation, a graph break or different code: only the graph of the "
            f"{side_of(graph.first.divergence)} has one of its inputs"
        )
    step = graph.difference.step
    return Explanation(
        cause="structure",
        text=text,
        advice=(
            "Run both in fresh processes, because earlier compilations affect the graph; drop_last "
            "or dynamic=True avoids recompilation. TORCH_LOGS=recompiles,graph_breaks shows the "
            f'reason. To find the op, record step {step} of both runs with compiled="eager" and '
            f"only_steps=[{step}] (on the command line: --compiled=eager --only-steps={step})"
        ),
    )


def _graph_that_reads(graph: Graph) -> RowDifference | None:
    """Return the compiled graph that differs and reads the first difference, a tensor that only one
    run has.
    """
    first, difference = graph.first, graph.difference
    if first.site.role != "input" or first.divergence.kind not in ("missing", "extra"):
        return None
    graphs = (row for row in difference.kinds if difference.site(row).role == "graph")
    row = next((row for row in graphs if first.row in difference.rows_read(row)), None)
    return None if row is None else difference.row_difference(row)


def scripted_module(graph: Graph, walk: Walk) -> Explanation | None:
    """Only one run has an op of a TorchScript module, whose executor chooses the ops that it runs.

    Causes: structure

    Example:
        Step 0, backward: aten.tanh_backward.default in net (train.py:12, training_step) ran only in
        the reference; its inputs match, so the difference starts here. TorchScript runs net, and
        its executor chooses ops depending on what the process ran before. Run both in fresh
        processes, with the same calls before the fit.
    """
    leading, scripted = graph.leading.divergence, graph.evidence.scripted
    if not leading.op or leading.kind not in ("missing", "extra"):
        return None
    inside = tuple(f"{name}." for name in scripted)
    # the backward pass of a scripted module has an unknown module
    is_scripted = leading.module in scripted or leading.module.startswith(inside)
    if not is_scripted and not (leading.module == "?" and scripted):
        return None
    names = listed(name or "the LightningModule" for name in scripted)
    return Explanation(
        cause="structure",
        advice=(
            f"TorchScript runs {names}, and its executor chooses ops depending on what the process "
            "ran before. Run both in fresh processes, with the same calls before the fit"
        ),
    )


def another_order(graph: Graph, walk: Walk) -> Explanation | None:
    """Ops ran in a different order with the same bits: independent lines were swapped,
    or a set was iterated.

    Causes: structure, forward, backward, optimizer, collective, unknown

    Example:
        Step 7, forward: aten.cos.default in net (train.py:4, forward) ran in a different order from
        the reference, and no bit differs. Restore the original order of the code, or record the
        reference again.
    """
    kinds = graph.difference.kinds
    missing = Counter(_key(graph, row) for row, kind in kinds.items() if kind == "missing")
    extra = {row: _key(graph, row) for row, kind in kinds.items() if kind == "extra"}
    moved = [graph.difference.describe(row) for row, key in extra.items() if key in missing]
    if _key(graph, graph.first.row) not in missing.keys() & {*extra.values()}:
        return _with_other_bits(graph)
    ops = listed(site_text(one) for one in moved)
    what = f"{place(graph)}, {moved[0].phase}: {ops} ran in a different order from the reference"
    if {*kinds.values()} == {"missing", "extra"} and missing == Counter(extra.values()):
        return Explanation(
            cause="structure",
            text=f"{what}, and no bit differs",
            advice="Restore the original order of the code, or record the reference again",
        )
    return Explanation(
        cause=cause_of_first(graph),
        text=f"{what}, with the same bits; later ops that depend on the order differ",
        advice=(
            "Restore the original order of the code; sort a set, or the files of a folder, before "
            "you iterate over it"
        ),
    )


def _with_other_bits(graph: Graph) -> Explanation | None:
    """Return the answer if the op ran before another one in one run and after it in the other,
    so with other inputs.
    """
    difference, first = graph.difference, graph.first
    side = {"missing": 0, "extra": 1}.get(first.divergence.kind)
    partner = None if side is None else _partner(graph, first.row)
    if side is None or partner is None:
        return None
    between = [
        row
        for row in range(first.row, partner)
        if min(difference.pairs[row]) >= 0 and difference.site(row).op
    ]
    if not between:
        return None
    needed = {*difference.rows_read(partner)}
    passed = difference.describe(next((row for row in between if row in needed), between[0]))
    early, late = ("reference", "current run")[:: 1 if side == 0 else -1]
    return Explanation(
        cause=cause_of_first(graph),
        text=f"{place(graph)}, {first.divergence.phase}: {site_text(first.divergence)} ran before "
        f"{site_text(passed)} in the {early}, and after it in the {late}",
        advice="Restore the original order of the code, or record the reference again",
    )


def _partner(graph: Graph, row: int) -> int | None:
    """Return the row of the other run with the only such call there,
    if this run has it once too.
    """
    difference = graph.difference
    key, kind = _call(graph, row), difference.kinds[row]
    calls = [at for at in range(len(difference.pairs)) if _call(graph, at) == key]
    others = [
        at
        for at in calls
        if at != row and difference.kinds.get(at) == ("missing" if kind == "extra" else "extra")
    ]
    return (
        others[0]
        if calls == sorted([row, *others]) and len(others) == 1 and others[0] > row
        else None
    )


def _call(graph: Graph, row: int) -> _Key:
    site = graph.difference.site(row)
    return site.phase, site.module, site.op, site.output, site.role, site.name, site.arguments


def _key(graph: Graph, row: int) -> _Key:
    return *_call(graph, row), graph.difference.digest(row)
