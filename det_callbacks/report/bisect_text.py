"""Where two runs part, in words, and what to type next."""

from rich.console import Console
from rich.text import Text

from det_callbacks.bisect import Bisection, Rerun
from det_callbacks.report.closing import count
from det_callbacks.trace.compiled import REGION
from det_callbacks.trace.left import GRAPH
from det_callbacks.verdict import Verdict

MAX_RANKS = 8


def render_bisection(bisection: Bisection, console: Console) -> None:
    """Print which step differs first, what of it, and the commands that record it in full."""
    found = bisection.found
    verdict = found.verdict
    if verdict is None:
        _line(console, "NO STEP DIFFERS" if found.longer is None else "NO STEP THAT BOTH HAVE DIFFERS", "bold green")
        _line(console, _agreement(bisection))
    elif not found.ranks:
        _line(console, "NOT COMPARABLE", "bold yellow")
        _line(console, verdict.explanation)
    else:
        _render_first(bisection, verdict, console)


def _agreement(bisection: Bisection) -> str:
    found = bisection.found
    agreed = (
        f"{bisection.reference} and {bisection.current} agree at {count(found.num_equal, 'step')} of all ranks, by "
        "their chains"
    )
    if found.longer is None:
        return f"{agreed}."
    return (
        f"{agreed}, up to step {found.last_equal}, where the shorter one ends. What {found.longer} did after that, the "
        "other does not tell."
    )


def _render_first(bisection: Bisection, verdict: Verdict, console: Console) -> None:
    found = bisection.found
    first = found.ranks[0]
    is_alone = len(found.ranks) == 1 and first.rank == 0
    where = "" if is_alone else f" (rank {first.rank})"
    fit = f" of fit {first.segment}" if first.segment else ""
    before = (
        "It is the first one that was recorded."
        if first.last_equal is None
        else f"All up to step {first.last_equal} agree, by their chains."
    )
    _line(console, f"STEP {first.step}{fit} IS THE FIRST THAT DIFFERS{where}", "bold red")
    _line(console, before)
    if not is_alone:
        shown = ", ".join(f"{one.rank} from step {one.step} on" for one in found.ranks[:MAX_RANKS])
        more = f", and {len(found.ranks) - MAX_RANKS} more" if len(found.ranks) > MAX_RANKS else ""
        _line(console, f"Ranks that differ: {shown}{more}.")
    _line(console, verdict.explanation)
    if verdict.verdict == "not_comparable":
        machine = ", ".join(one.name for one in verdict.environment if one.is_machine and one.changes_bits)
        _line(console, f"The machine differs, and can have changed the bits: {machine}.")
    _line(console, "")
    if bisection.reruns:
        _render_reruns(bisection, console)
    else:
        regions = [name for name in verdict.coverage.opaque_regions if name.startswith(REGION)]
        graphs = [name for name in verdict.coverage.opaque_regions if name.startswith(GRAPH)]
        but = f" but those inside {', '.join((*regions, *graphs))}" if regions or graphs else ""
        _line(console, f"The runs hold every op of this step{but}:")
        _line(console, f"  {bisection.then}")
        if regions:
            step = found.ranks[0].step
            _line(
                console, f'To see these, record it again on both sides with compiled="interpret", only_steps=[{step}].'
            )
        if graphs:
            _line(console, "To see what CUDA graphs do, record it again on both sides without them.")


def _render_reruns(bisection: Bisection, console: Console) -> None:
    steps = bisection.steps
    if bisection.level == "state":
        what = f"The difference begins in one of steps {steps[0]} to {steps[-1]}. Record all of them at level state"
    elif len(steps) == 1:
        what = f"Record step {steps[0]} at level op"
        if kept := bisection.reruns[0].arguments.get("keep_tensors"):
            _line(console, "The runs hold the op that differs:")
            _line(console, f"  det-callbacks diff {bisection.reference} {bisection.current}")
            _line(console, "")
            what = f"To see by how much {kept[0]} differs, record step {steps[0]} with its tensors"
    else:
        what = f"The difference begins in one of steps {steps[0]} to {steps[-1]}. Record these at level op"
    _line(console, f"{what}, on both sides:", "bold")
    for label, rerun in zip(("reference", "current"), bisection.reruns, strict=True):
        _render_rerun(label, rerun, console)
    _line(console, f"  {'then':<10} {bisection.then}")
    if bisection.level == "op":
        text = f"Nothing after step {steps[-1]} is needed: where a training is ended there by hand, add --steps common."
        _line(console, text)


def _render_rerun(label: str, rerun: Rerun, console: Console) -> None:
    if rerun.command is None:
        _line(console, f"  {label:<10} as {rerun.run} was recorded, with")
        _line(console, f"  {'':<10} {rerun.callback}")
    else:
        _line(console, f"  {label:<10} {rerun.command}")
    if rerun.has_gaps:
        _line(console, f"  {'':<10} (<place> and <withheld> stand for what no run keeps: put it in again)")
    if rerun.checkpoint is not None:
        _line(
            console,
            f"  {'':<10} resumed from {rerun.checkpoint.path}, of step {rerun.checkpoint.step}: "
            "trainer.fit(ckpt_path=...)",
        )


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
