"""Runs a few lines under HashMode, and says in words what each op read."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from msgspec import structs
from torch import nn

from det_callbacks.runs.program import Site
from det_callbacks.runs.steps import Expectation, StepTrace
from det_callbacks.trace.hash_mode import HashMode


def traced(body: Callable[[], Any], model: nn.Module | None = None, **selection: Any) -> StepTrace:
    return step_of(HashMode(model, **selection), body)


def step_of(mode: HashMode, body: Callable[[], Any], **beginning: Any) -> StepTrace:
    mode.begin(**beginning)
    with ExitStack() as step:
        step.push(mode)
        body()
    assert len(mode.trace.program) == len(mode.trace.digests) == len(mode.trace.layout)
    return mode.trace


def verified(body: Callable[[bool], Any]) -> StepTrace:
    expected = Expectation.of(traced(lambda: body(False)).digests)
    return step_of(HashMode(), lambda: body(True), expected=expected)


def label(site: Site) -> str:
    return site.name or site.op.removeprefix("aten.") or site.role


def position_of(trace: StepTrace, op: str, number: int = 0) -> int:
    found = [
        position
        for position, site in enumerate(trace.program.sites)
        if site.op == f"aten.{op}" and site.role in ("output", "value")
    ]
    return found[number]


def site_of(trace: StepTrace, op: str, number: int = 0) -> Site:
    return trace.program.sites[position_of(trace, op, number)]


def reads_of(trace: StepTrace, op: str, number: int = 0) -> list[str]:
    return [label(trace.program.sites[position]) for position in site_of(trace, op, number).inputs]


def with_role(trace: StepTrace, role: str) -> list[Site]:
    return [site for site in trace.program.sites if site.role == role]


def digests_by_name(trace: StepTrace, phase: str) -> dict[str, int]:
    return {
        str(site.name): int(digest)
        for site, digest in zip(trace.program.sites, trace.digests, strict=True)
        if site.phase == phase and site.role == "named"
    }


def assert_same(first: StepTrace, second: StepTrace) -> None:
    sites, others = (
        [structs.replace(site, source=()) for site in trace.program.sites]
        for trace in (first, second)
    )
    assert sites == others
    assert first.program.id == second.program.id
    assert first.layout_id == second.layout_id
    np.testing.assert_array_equal(first.digests, second.digests)
