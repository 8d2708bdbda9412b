"""Settings and options that differ: which rows they affect, and what to say."""

from collections.abc import Callable, Iterator, Sequence

from det_callbacks.causes.graph import Explanation, Graph, Node, Walk
from det_callbacks.causes.sentences import both_values, explain_first, explained_by, values_text
from det_callbacks.compare.evidence import OptionChange
from det_callbacks.runs.manifest import (
    CONFIGURATION,
    DTYPES,
    OPTION,
    VALIDATION,
    VARIABLE,
    earlier_choice,
    item_of,
)
from det_callbacks.text import capitalised, listed
from det_callbacks.verdict import EnvironmentDifference

_OF_MODEL = ("hparams.", CONFIGURATION)

Affects = Callable[[Graph, EnvironmentDifference], bool]


def setting(graph: Graph, walk: Walk) -> Explanation:
    """A setting differs, and the first difference is of a kind that it affects.

    Causes: settings

    Example:
        optimizer.AdamW.lr is 0.1 in the reference and 0.2 in the current run, which explains the
        first difference. Step 7, optimizer: aten.addcdiv_.default in net was called with different
        arguments (value: -0.1 -> -0.2); its inputs match, so the difference starts here. Use the
        reference's value, or record the reference again.
    """
    return Explanation(
        cause="settings",
        setting=walk.root.name,
        text=explained_by(walk.root.name, walk.root.values, explain_first(graph)),
        advice="Use the reference's value, or record the reference again",
    )


def optimizer_option(graph: Graph, walk: Walk) -> Explanation:
    """An option of the optimizer differs: it was built so on this rank, or something changed the
    option during the fit.

    Causes: optimizer, settings, checkpoint

    Example:
        From step 4 on, lr of group 0 is 0.01 in the reference and 0.011 in the current run. Step 4,
        state: net.0.weight has different bits; the op that wrote it was not recorded, so the
        verdict cannot say where the difference starts. Check what sets lr of group 0 during the
        fit: a learning rate scheduler, a callback, or a hook of the module.
    """
    options = graph.evidence.options
    names = listed(option.name for option in options)
    if _is_built_so(graph):
        changes = [f"{both} from the first update on" for both in map(_both_values, options)]
        on_rank = f" on rank {graph.difference.rank}" if graph.shows_rank else ""
        return Explanation(
            cause="settings",
            text=f"{listed(changes, '; ')}. {explain_first(graph)}",
            advice=(
                f"Check how the script builds the optimizer and its schedulers{on_rank}, and what "
                f"else sets {names} before the first update"
            ),
        )
    changes = [f"from step {option.since} on, {_both_values(option)}" for option in options]
    if walk.root.kind == "checkpoint":
        return Explanation(
            cause="checkpoint",
            text=f"{capitalised(listed(changes, '; '))}. {explain_first(graph)}",
            advice=(
                f"The resume did not restore {names}: load the states of the optimizer and of its "
                "schedulers"
            ),
        )
    advice = (
        f"Check what sets {names} during the fit: a learning rate scheduler, a callback, or a hook "
        "of the module"
    )
    return Explanation(
        cause="optimizer",
        text=f"{capitalised(listed(changes, '; '))}. {explain_first(graph)}",
        advice=advice,
    )


def _both_values(option: OptionChange) -> str:
    return values_text(option.name, option.reference, option.current)


def _is_built_so(graph: Graph) -> bool:
    """Return whether the options had these values in the first update;
    a resume sets them from the checkpoint.
    """
    is_start_known = not (graph.is_resumed or graph.is_after_unrecorded)
    return is_start_known and all(option.is_first_value for option in graph.evidence.options)


# which settings may be read by what differs


def options_of_update(graph: Graph, row: int) -> Iterator[Node]:
    """Yield the options of the optimizer that differ, if a row is of its update."""
    if graph.is_of_update(row) and not graph.sources:
        for option in graph.evidence.options:
            values = option.reference, option.current
            yield Node(
                kind="option", name=option.name, step=option.since, values=values, is_proven=False
            )


def setting_node(choice: EnvironmentDifference | None, step: int) -> Iterator[Node]:
    """Yield a setting that may affect what differs; which rows a setting
    affects was not recorded.
    """
    if choice is not None:
        values = str(choice.reference), str(choice.current)
        yield Node(kind="setting", name=choice.name, step=step, values=values, is_proven=False)


def dtype_setting(graph: Graph) -> EnvironmentDifference | None:
    """Return the setting that gave the first difference a different dtype."""
    reference, current = graph.first.layouts or (None, None)
    if graph.first.start != "outside" or reference is None or current is None:
        return None
    if reference.shape != current.shape or reference.dtype == current.dtype:
        return None
    return next((one for name in DTYPES for one in graph.choices if one.name == name), None)


def validation_setting(graph: Graph) -> EnvironmentDifference | None:
    """Return the setting of the validation that differs."""
    return next((one for one in graph.choices if one.name in VALIDATION), None)


def explaining_setting(graph: Graph) -> EnvironmentDifference | None:
    """Return the first setting that affects rows such as the leading difference."""
    explaining = (one for one in graph.choices if _affects(graph, one))
    return next(explaining, None) or model_setting(graph)


def model_setting(graph: Graph) -> EnvironmentDifference | None:
    """Return the hyperparameter or configuration key that made the leading
    difference a different call.

    A key with the values of another setting, such as a learning rate,
    explains no call of the model.
    """
    if graph.leading.divergence.phase not in ("forward", "backward"):
        return None
    if not (graph.is_other_call or graph.draws_in_step):
        return None
    options = [(one.reference, one.current) for one in graph.choices if not _is_of_model(one)]
    of_model = filter(_is_of_model, graph.choices)
    return next((one for one in of_model if (one.reference, one.current) not in options), None)


def _is_of_model(choice: EnvironmentDifference) -> bool:
    return any(item_of(choice.name, group) is not None for group in _OF_MODEL)


def begun_before(what: str, step: int, choices: Sequence[EnvironmentDifference]) -> str:
    """Say that a difference may have started in steps that were not recorded;
    ``what`` starts the sentence.
    """
    choice = earlier_choice(choices)
    text = f"{what} before step {step}, in steps that were not recorded"
    if choice is None:
        return f"{text}. Record those steps to find where the difference starts"
    return f"{text}. A setting that differs explains it: {both_values([choice])}"


def _affects(graph: Graph, choice: EnvironmentDifference) -> bool:
    """Return whether a setting affects rows such as the leading difference."""
    affects = (known for group, known in _AFFECTS if item_of(choice.name, group) is not None)
    return next(affects, _runs_between)(graph, choice)


def _clips(graph: Graph, choice: EnvironmentDifference) -> bool:
    phase = graph.leading.divergence.phase
    return phase == "gradient" or (phase == "other" and graph.is_other_call)


def _casts(graph: Graph, choice: EnvironmentDifference) -> bool:
    return graph.is_other_call or not graph.leading.divergence.op


def _divides_loss(graph: Graph, choice: EnvironmentDifference) -> bool:
    # only level op records the op that divides it
    return graph.leading.divergence.name == "loss" or _runs_between(graph, choice)


def _updates(graph: Graph, choice: EnvironmentDifference) -> bool:
    leading = graph.leading.divergence
    if graph.first.site.subject == "further":
        return choice.name == "optimizer.lr_scheduler" or _is_copied_from(graph, choice.name)
    if leading.phase in ("optimizer", "state"):
        return _casts(graph, choice)
    if leading.phase == "forward" and leading.kind in ("missing", "extra"):
        # an optimizer such as LBFGS decides how often the passes run
        rows = range(graph.leading.row)
        return any(graph.difference.site(row).phase == "gradient" for row in rows)
    return _runs_between(graph, choice)


def _updates_by_closure(graph: Graph, choice: EnvironmentDifference) -> bool:
    # in a loop of the user's own, such an update counts as gradient
    if graph.leading.divergence.phase == "gradient":
        return _casts(graph, choice)
    return _updates(graph, choice)


def _is_copied_from(graph: Graph, option: str) -> bool:
    """Return whether the first difference is a value that a scheduler copied from an
    option: base_lrs from lr.
    """
    first = graph.first
    return first.divergence.kind == "content" and option.rpartition(".")[2] in first.site.part


def _splits_sums(graph: Graph, choice: EnvironmentDifference) -> bool:
    leading = graph.leading.divergence
    return bool(leading.op) and leading.kind == "content"


def _is_enforced(graph: Graph, choice: EnvironmentDifference) -> bool:
    if choice.name == "settings.seed" and None in (choice.reference, choice.current):
        return bool(graph.evidence.other_starts)  # the process may have set the same seed
    return not graph.leading.divergence.is_origin


def _runs_between(graph: Graph, choice: EnvironmentDifference) -> bool:
    return graph.leading.divergence.phase == "other" and not graph.starts_backward


def _affects_no_step(graph: Graph, choice: EnvironmentDifference) -> bool:
    return False


_AFFECTS: Sequence[tuple[str, Affects]] = (
    ("trainer.gradient_clip", _clips),
    ("trainer.precision", _casts),
    ("trainer.accumulate_grad_batches", _divides_loss),
    ("optimizer.LBFGS.", _updates_by_closure),
    ("optimizer", _updates),
    ("torch.num_threads", _splits_sums),
    ("torch.backends.", _splits_sums),
    ("settings.", _is_enforced),
    (VARIABLE, _affects_no_step),
    (OPTION, _affects_no_step),
)
"""By the beginning of a setting's name: the first that fits counts, so longer ones come first.

All other settings affect what runs between the forward and the backward pass.
"""
