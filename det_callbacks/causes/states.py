"""State that differs: what a fit starts with, what a resume restores,
and writes that no recorded op made.
"""

from collections.abc import Iterable, Iterator
from math import prod

from det_callbacks.causes.generators import checkpoint, reseeded, show_start, users_of, what_ran
from det_callbacks.causes.graph import Explanation, Graph, Node, Walk
from det_callbacks.causes.sentences import (
    SUBJECT,
    also_differ,
    how_it_entered,
    place,
    site_text,
)
from det_callbacks.causes.settings import (
    begun_before,
    dtype_setting,
    explaining_setting,
    setting_node,
)
from det_callbacks.compare.differences import RowDifference
from det_callbacks.compare.resume import lost_gradients
from det_callbacks.runs.evidence import AFTER, BATCH_END, BATCH_START, BEFORE, DRAWING, LOADER
from det_callbacks.runs.manifest import earlier_choice
from det_callbacks.runs.program import (
    GRAPH,
    UNWRITTEN,
    Site,
    StepView,
    TensorLayout,
    describe_tensor,
)
from det_callbacks.text import capitalised, listed

# the buffers of torch's normalization that a forward pass in train mode updates
_RUNNING = frozenset({"running_mean", "running_var", "num_batches_tracked"})

# the names of nodes that nothing recorded explains
UNRECORDED_STEPS = "steps that were not recorded"
UNSEEN_WRITE = "a write that was not recorded"

_NUMBERS = ("int", "float", "bool")
_OPAQUE_ROLES = ("graph", "region_input", "graph_output")
_OF_DATA = (LOADER, DRAWING)  # writes no weights
_UNSEEN = "something that the recorder does not see (NumPy, a raw kernel"


# what state read


def state_reads(graph: Graph, node: Node) -> Iterator[Node]:
    """Yield what the state at the start of a step came from:
    the state at the end of the previous step.
    """
    of_dtype = dtype_setting(graph)
    if of_dtype is not None:
        yield from setting_node(of_dtype, node.step)
    elif graph.is_resumed:
        yield checkpoint(graph)
    elif graph.is_after_gap:
        yield Node(kind="outside", name=UNRECORDED_STEPS, step=node.step)
    elif not (graph.num_initial or graph.is_first_seen):
        yield Node(kind="outside", name=UNSEEN_WRITE, step=node.step, moment="between the steps")
    elif _is_further_alone(graph) and explaining_setting(graph) is not None:
        yield from setting_node(explaining_setting(graph), node.step)
    else:
        yield from reseeded(graph)


def has_lost_state(graph: Graph) -> bool:
    """Return whether a resume left state that differs from the reference's,
    or lost accumulated gradients.
    """
    return graph.is_resumed and bool(
        _restored(graph) or graph.unrestored or lost_gradients(graph.difference)
    )


def _restored(graph: Graph) -> list[RowDifference]:
    """Return the parameters, buffers and optimizer state that differ when the step starts."""
    return [
        graph.difference.row_difference(row)
        for row in graph.difference.starts
        if graph.is_state(row)
    ]


def _is_further_alone(graph: Graph) -> bool:
    return {*initial_sources(graph)} <= {*graph.further}


def initial_sources(graph: Graph) -> list[str]:
    """Return the names, or modules, of the tensors of the initial state that differ."""
    divergences = (
        source.divergence for source in graph.sources if source.divergence.phase == "state"
    )
    return list(dict.fromkeys(one.name or one.module for one in divergences))


def random_initial(graph: Graph) -> set[str]:
    """Return the initial tensors that may depend on the seed: those that are not constant."""
    return {*graph.initial_names} - graph.evidence.constants


def _exchanged(graph: Graph) -> dict[str, str]:
    """Return the differing tensors of the state that have the reference's bits of
    another one, with its name.

    Constant tensors say nothing.
    """
    difference = graph.difference
    rows = [
        row
        for row, (position, _) in enumerate(difference.pairs)
        if position >= 0 and graph.is_state(row)
    ]
    of_bits = {
        bits_at(difference.reference, difference.pairs[row][0]): difference.site(row).name
        for row in rows
    }
    partners: dict[str, str] = {}
    differing = {difference.site(row).name for row in rows if row in difference.kinds}
    for row in rows:
        name, position = difference.site(row).name, difference.pairs[row][1]
        if (
            difference.kinds.get(row) != "content"
            or name is None
            or name in graph.evidence.constants
        ):
            continue
        bits = bits_at(difference.current, position)
        other, entry = of_bits.get(bits), bits[1]
        if other in differing - {name, None} and entry is not None and prod(entry.shape) > 1:
            partners[name] = other or ""
    return partners if {*partners} == {*partners.values()} else {}


def bits_at(view: StepView, position: int) -> tuple[int, TensorLayout | None]:
    return int(view.record.digests[position]), view.layout.entries[position]


# what to say


def initial_state(graph: Graph, walk: Walk) -> Explanation | None:
    """A parameter, a buffer or a scheduler differs when the training starts: the seed, the weights
    or the model differ.

    Causes: initial_weights, settings

    Example:
        Step 0: the initial state differs (net.0.weight, net.0.bias, net.5.weight and 1 more: 4 of 9
        tensors), and the generator state also differs; the step started with this difference, so no
        op caused it. Set the same seed before you build the model: the generator torch.cpu was
        seeded with 0 in the reference and 77 in the current run. Settings differ: settings.seed (0
        in the reference, 77 in the current run).
    """
    if "state" not in graph.source_phases:
        return None
    # a Python number, such as T_max of a scheduler, is an argument
    is_setting = _is_further_alone(graph) and graph.first.divergence.dtype in _NUMBERS
    return Explanation(
        cause="settings" if is_setting else "initial_weights",
        advice=_advise_on_initial_state(graph),
    )


def _advise_on_initial_state(graph: Graph) -> str:
    names = [name for name in initial_sources(graph) if name not in graph.further]
    if not names:
        return (
            f"{graph.further[0]} differs before the first step, so give both runs the same "
            "schedulers, gradient scaler and averaged weights, with the same arguments"
        )
    state = [source.divergence for source in graph.sources if source.divergence.phase == "state"]
    if any(one.kind != "content" for one in state):
        return (
            "Some tensors have a different name, shape or dtype, or exist in one run only, so "
            "build the same model, and give the optimizer the same parameters"
        )
    of_several = [
        name for name in names if name in {one.name for one in state if prod(one.shape or ()) != 1}
    ]
    # one element is always equal to itself, so it says nothing beside others
    random = (
        [name for name in of_several if name not in graph.evidence.constants]
        if of_several
        else names
    )
    if not random:
        return (
            f"All elements of {names[0]} are equal when the fit starts, so check what changes it "
            "before the first step: a sanity check or a forward pass in training mode changes the "
            "statistics of a BatchNorm"
        )
    num_random, exchanged = len(random_initial(graph)), _exchanged(graph)
    if not exchanged and (num_random < 2 or 2 * len(random) <= num_random):
        return (
            "The code, the loaded weights or the random numbers drawn earlier differ, so set the "
            f"seed first, and check how {random[0]} is initialised or loaded"
        )
    if exchanged:
        return (
            f"{_show_exchanged(exchanged)}: they were initialised, or loaded, in a different order"
        )
    change = next((change for change in graph.evidence.other_starts if change.is_reseeded), None)
    if change is None:
        drawn = next((one for one in graph.evidence.other_starts if one.seeds is not None), None)
        if drawn is not None:
            return (
                f"{capitalised(show_start(drawn))}. Compare what draws before the fit: the modules "
                "that the script builds, and their order"
            )
        return "Set the same seed before you build the model, or load the same weights"
    return f"Set the same seed before you build the model: {show_start(change)}"


def _show_exchanged(exchanged: dict[str, str]) -> str:
    return listed(
        f"{name} has the reference's bits of {other}" for name, other in exchanged.items()
    )


def restored_state(graph: Graph, walk: Walk) -> Explanation | None:
    """In the first step after a resume, state that the checkpoint should have restored differs.

    Causes: checkpoint

    Example:
        Step 7, the first after resuming: the restored state differs (net.weight); no op caused it.
        Compare what was loaded with what was saved (det-callbacks check-checkpoint compares two
        checkpoints), and check what changes this state before the step.
    """
    restored = _restored(graph)
    if not (restored or graph.unrestored):
        return _lost_gradients(graph)
    if restored:
        what = how_it_entered("restored", restored, graph)
    else:
        before = graph.difference.step - 1
        names = listed(graph.unrestored)
        what = (
            f"{SUBJECT['restored']} differs from the reference's state at the end of step {before} "
            f"({names})"
        )
    exchanged = _exchanged(graph)
    if exchanged:
        advice = (
            f"{_show_exchanged(exchanged)}: state was restored by its place in a list, and the "
            "order of the list differs. Give the optimizer its parameters in the reference's order"
        )
    else:
        advice = _restore(
            graph, [str(one.divergence.name) for one in restored] or list(graph.unrestored)
        )
    others = [phase for phase in graph.source_phases if phase not in ("state", "input")]
    return Explanation(
        cause="checkpoint",
        text=f"{place(graph)}: {what}{also_differ(others)}; no op caused it",
        advice=advice,
    )


def _restore(graph: Graph, names: list[str]) -> str:
    """Return what to do about state that was not restored."""
    programs = graph.difference.reference.program, graph.difference.current.program
    sites = [site for program in programs for site in program.sites]
    subjects = {site.name: site.subject for site in sites}
    trained = {site.of for site in sites if site.subject == "gradient"}
    if {subjects.get(name) for name in names} == {"state"}:
        return "Save the optimizer's state (optimizer.state_dict) with the checkpoint, and load it"
    buffers = [name for name in names if subjects.get(name) == "tensor" and name not in trained]
    advice = (
        "Compare what was loaded with what was saved (det-callbacks check-checkpoint compares two "
        "checkpoints), and check what changes this state before the step"
    )
    if len(buffers) < len(names):
        return advice
    return f"{advice}. A checkpoint has no buffers with persistent=False: save them separately"


def _lost_gradients(graph: Graph) -> Explanation | None:
    names = lost_gradients(graph.difference)
    if not names:
        return None
    return Explanation(
        cause="checkpoint",
        text=(
            f"{place(graph)}: the reference adds to {listed(names)} from before this step, and the "
            "resumed run does not: gradients accumulated before the checkpoint were not restored"
        ),
        advice=(
            "Save checkpoints after an update, when no gradients are accumulated, or save and "
            "restore them"
        ),
    )


def unrecorded_steps(graph: Graph, walk: Walk) -> Explanation | None:
    """State differs, and an earlier step that was not recorded may have changed it.

    Causes: unknown, settings

    Example:
        Step 7: net.weight differs; no recorded op produced it. This state first differed before
        step 7, in steps that were not recorded. Record those steps to find where the difference
        starts.
    """
    if walk.root.name != UNRECORDED_STEPS:
        return None
    what = "This state first differed" if graph.sources else "The difference may have started"
    return Explanation(
        cause="unknown" if earlier_choice(graph.choices) is None else "settings",
        advice=begun_before(what, graph.difference.step, graph.choices),
    )


def uninitialised_memory(graph: Graph, walk: Walk) -> Explanation | None:
    """The first op that differs read memory that was allocated in the step and
    that no recorded op wrote.

    Causes: uninitialised_memory

    Example:
        Step 0, forward: aten.clone.default in net (train.py:9, forward) produced different bits; it
        reads a tensor (float32 [8]) that was only partly written after its allocation. Write all of
        the tensor, or allocate it with torch.zeros. If NumPy or a raw kernel writes it, the
        recorder cannot see that write.
    """
    first = graph.first
    view, position = graph.difference.view_of(first.row)
    program = view.program
    unwritten = (
        at for at in program.sites[position].inputs if _is_unwritten(view.layout.entries[at])
    )
    read = next(unwritten, None)
    if read is None:
        return None
    tensor = describe_tensor(view.layout.entries[read]).removesuffix(f" {UNWRITTEN}")
    if program.sites[read].inputs:
        filled = "that was only partly written after its allocation"
    else:
        filled = "that was allocated in the step and that no recorded op wrote"
    what = (
        f"{site_text(first.divergence)} produced different bits; it reads a tensor ({tensor}) "
        f"{filled}"
    )
    return Explanation(
        cause="uninitialised_memory",
        text=f"{place(graph)}, {first.divergence.phase}: {what}",
        advice=(
            "Write all of the tensor, or allocate it with torch.zeros. If NumPy or a raw kernel "
            "writes it, the recorder cannot see that write"
        ),
    )


def _is_unwritten(entry: TensorLayout | None) -> bool:
    return entry is not None and entry.detail == UNWRITTEN


def external_write(graph: Graph, walk: Walk) -> Explanation | None:
    """A weight, buffer, gradient or optimizer state differs,
    and no recorded op wrote the difference.

    Causes: external_write

    Example:
        Step 4: something that the recorder does not see (NumPy, a raw kernel, a callback between
        steps) changed net.5.bias between the end of step 3 and the first read in step 4;
        WritesAfterBatch.on_train_batch_end ran in between. Check the code that runs at that point.
        If the write is intended, do it inside a step with torch ops, which the recorder sees.
    """
    if walk.root.name != UNSEEN_WRITE:
        return None
    if (numbers := _further_numbers(graph)) is not None:
        of, what = numbers
        return Explanation(
            cause="external_write",
            text=f"{place(graph)}: {what}",
            advice=f"Check where and how often the script updates {listed(of)}",
        )
    what = _between_steps(graph) or _in_step(graph) or _before_an_op(graph)
    if not what:
        return None
    return Explanation(
        cause="external_write",
        text=f"{place(graph)}{what}",
        advice=_check_modes(graph)
        or (
            "Check the code that runs at that point. If the write is intended, do it inside a step "
            "with torch ops, which the recorder sees"
        ),
    )


def _check_modes(graph: Graph) -> str:
    """Return what to check if what changed between two steps is all that a forward pass in train
    mode changes; "" otherwise.
    """
    names = _changed_between_steps(graph)
    if not names or not _RUNNING.issuperset(name.rpartition(".")[2] for name in names):
        return ""
    return (
        "A forward pass in train mode changes them: check train() and eval() around what runs "
        "between the steps, such as a validation"
    )


def _further_numbers(graph: Graph) -> tuple[list[str], str] | None:
    """Return the schedulers whose numbers differ although they matched at the end of the previous
    step, and what to say; None if anything but numbers of schedulers differs so.
    """
    sources = [one for one in graph.sources if one.site.subject == "further"]
    is_of_numbers = all(one.divergence.dtype in _NUMBERS for one in sources)
    if not sources or not is_of_numbers or not _changed_between_steps(graph):
        return None
    step = graph.difference.step
    others = [phase for phase in graph.source_phases if phase not in ("input", "state")]
    return (
        list(dict.fromkeys(one.site.of for one in sources)),
        f"between the beginnings of step {step - 1} and step {step}, the script changed "
        f"{listed(graph.further)} in one run only, or differently{_ran_between_steps(graph)}"
        f"{also_differ(others)}",
    )


def _between_steps(graph: Graph) -> str:
    names, step = _changed_between_steps(graph), graph.difference.step
    if not names:
        return ""
    until = f"step {step}" if graph.further else f"the first read in step {step}"
    when = f"between the end of step {step - 1} and {until}" if step else f"before {until}"
    others = [phase for phase in graph.source_phases if phase not in ("input", "state")]
    return (
        f": {_UNSEEN}, a callback between steps) changed {listed(names)} {when}"
        f"{_ran_between_steps(graph)}{also_differ(others)}"
    )


def _changed_between_steps(graph: Graph) -> list[str]:
    """Return the names of tensors whose bits at the start of a step differ from those
    that the previous step left.

    The list is empty if a checkpoint, an unrecorded step or an op without a
    digest may have written them.
    """
    if graph.is_first_seen or graph.is_after_gap or graph.is_resumed:
        return []
    read = [source for source in graph.sources if source.site.role == "input"]
    if not read or not _sees_all_ops(graph, before=read[0].row):
        return graph.further
    is_first = graph.sources[0] is read[0] and read[0].divergence.name is not None
    if not (is_first or graph.further):
        return []
    names = (source.divergence.name for source in read)
    return list(dict.fromkeys([*graph.further, *(name for name in names if name is not None)]))


def _in_step(graph: Graph) -> str:
    first = graph.first.divergence
    if not is_changed_in_step(graph):
        return ""
    return f": {_UNSEEN}) changed {first.name} during the step{_ran_in_step(first.phase, graph)}"


def is_changed_in_step(graph: Graph) -> bool:
    """Return whether the first difference is a named tensor that changed after
    its last recorded writer.

    If no recorded op wrote it in this step, it matched when the step began.
    """
    first = graph.first
    if first.start == "written since":
        return first.divergence.phase in ("state", "gradient")
    if (
        first.start != "not recorded"
        or first.site.role != "named"
        or first.divergence.kind != "content"
    ):
        return False
    is_tensor = first.divergence.phase == "state" and first.divergence.dtype not in _NUMBERS
    read = graph.difference.sites_read(first.row)
    return (
        is_tensor
        and bool(read)
        and _sees_all_ops(graph, before=first.row)
        and all(map(_is_initial, read))
    )


def _before_an_op(graph: Graph) -> str:
    names, first = _changed_inputs(graph), graph.first.divergence
    if not names:
        return ""
    return (
        f", {first.phase}: {site_text(first)} produced different bits; {_UNSEEN}) changed "
        f"{listed(names, ' or ')}, which it reads, earlier in the step"
    )


def _changed_inputs(graph: Graph) -> list[str]:
    """Return the tensors that an op read, one of which an unseen write
    changed after its last writer.

    The list is empty if none of them is a weight, a gradient or other state.
    """
    row, difference = graph.first.row, graph.difference
    _, position = difference.pairs[row]
    is_known = position in difference.current.unseen_writes and not graph.evidence.unread
    if graph.first.start != "unseen writer" or not is_known:
        return []
    normed = _normed_gradient(graph)
    if normed is not None:
        return [normed]
    read = difference.sites_read(row)
    if not any(site.name is not None and _is_initial(site) for site in read):
        return []
    return list(dict.fromkeys(name for name in map(_shown_input, read) if name))


def _shown_input(site: Site) -> str:
    """Return the name of a tensor that an op read, or of the op that made it.

    It is "" for a number, a generator, and what the backward pass made:
    no code of the user runs before it is read.
    """
    is_tensor = site.role in ("input", "named", "output", "delivered", "graph_output")
    if not is_tensor or (site.op and site.phase == "backward"):
        return ""
    return site.name or (f"the output of {site.op}" if site.op else "a tensor without a name")


def _is_initial(site: Site) -> bool:
    """Return whether a site is a tensor of the state as the step found it."""
    return not site.op and (
        site.role == "input" or (site.role == "named" and site.phase == "state")
    )


def _sees_all_ops(graph: Graph, *, before: int) -> bool:
    """Return whether the step digests the outputs of all ops, and no op before a row was opaque."""
    program, position = graph.difference.side(before)
    programs = graph.difference.reference.program, graph.difference.current.program
    if any(one.leaves_out_ops or GRAPH in one.ops_skipped for one in programs):
        return False
    has_ops = any(site.role == "output" for one in programs for site in one.sites)
    return has_ops and not any(_is_opaque(site) for site in program.sites[:position])


def _is_opaque(site: Site) -> bool:
    return site.role in _OPAQUE_ROLES or site.is_region


def _ran_between_steps(graph: Graph) -> str:
    evidence, step = graph.evidence, graph.difference.step
    moments = [(step - 1, BATCH_END), (step, BATCH_START)]
    if any(moment not in evidence.moments for moment in moments):
        return ""
    begin, end = map(evidence.moments.index, moments)
    points = [point for _, point in evidence.moments[begin : end + 1] if point not in _OF_DATA]
    return _ran_there(
        [*what_ran(points, evidence), *users_of("on_train_batch_start", evidence, AFTER)],
        "in between",
    )


def _ran_in_step(phase: str, graph: Graph) -> str:
    def hooks() -> Iterator[str]:
        yield from users_of("on_after_backward", graph.evidence, BEFORE, AFTER)
        yield from users_of("on_before_optimizer_step", graph.evidence, BEFORE, AFTER)
        if phase == "state":
            yield from users_of("on_train_batch_end", graph.evidence, BEFORE)

    return _ran_there(hooks(), "after the recorded ops that wrote it")


def _ran_there(ran: Iterable[str], when: str) -> str:
    names = list(dict.fromkeys(ran))
    return f"; {listed(names, limit=len(names))} ran {when}" if names else ""


def _normed_gradient(graph: Graph) -> str | None:
    """Return the gradient whose norm differs first: clipping takes the norms of all, in order."""
    first = graph.first.divergence
    if first.phase != "gradient" or not first.op.startswith("aten._foreach_norm."):
        return None
    program, position = graph.difference.side(graph.first.row)
    site = program.sites[position]
    call = (site.phase, site.module, site.op, site.occurrence, "output")
    num_outputs = sum(
        (one.phase, one.module, one.op, one.occurrence, one.role) == call for one in program.sites
    )
    names = graph.gradients[-1]
    return names[site.output] if num_outputs == len(names) else None
