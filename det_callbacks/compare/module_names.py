"""Modules that were renamed, fused or split between the reference and the current run."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from det_callbacks.errors import SelectionError
from det_callbacks.runs.program import Program, Site, StepView
from det_callbacks.text import listed

Group = tuple[list[int], list[int]]
"""Positions, in the reference and in the current step,
of outputs whose concatenations correspond.
"""


@dataclass(frozen=True, slots=True)
class _Rule:
    """Patterns of modules in the reference and in the current run;
    one of the sides has one pattern.
    """

    reference: tuple[str, ...]
    current: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Maps modules of the reference to modules of the current run, by rules in a file.

    A rule is a line ``reference -> current``: patterns of module names, in which ``*`` matches the
    same text on both sides. The first matching rule applies. Patterns separated by commas are
    modules that the other run has fused; their outputs are concatenated in this order::

        encoder.layer.* -> blocks.*
        *.to_q, *.to_k, *.to_v -> *.qkv_proj        # a comment
    """

    path: Path
    rules: tuple[_Rule, ...]

    @classmethod
    def read(cls, path: str | Path) -> "ModuleNames":
        """Return the rules in a file; raise ``SelectionError``, which names the line,
        if it cannot be read.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SelectionError(
                f"The file of module names {path} cannot be read: {error}"
            ) from error
        rules = []
        for number, line in enumerate(lines, start=1):
            text = line.partition("#")[0].strip()
            if not text:
                continue
            reference, arrow, current = text.partition("->")
            sides = [
                tuple(part.strip() for part in side.split(",")) for side in (reference, current)
            ]
            stars = {pattern.count("*") for side in sides for pattern in side}
            if not arrow or not all(map(all, sides)) or min(map(len, sides)) > 1 or len(stars) > 1:
                raise SelectionError(
                    f'{path}:{number}: {line.strip()!r} maps no modules. Write "reference -> '
                    'current", patterns with as many "*" each; of modules that were fused, '
                    '"*.to_q, *.to_k, *.to_v -> *.qkv_proj".'
                )
            rules.append(_Rule(*sides))
        if not rules:
            raise SelectionError(
                f'{path} maps no modules. Write a line "reference -> current" for each that was '
                "renamed."
            )
        return cls(Path(path), tuple(rules))

    def renamed(self, view: StepView) -> StepView:
        """Return a step of the reference with the module names of the current run."""
        sites = [
            structs.replace(site, module=self._rename(site.module), of=self._renamed_tensor(site))
            for site in view.program.sites
        ]
        counts = {**view.program.counts, "text": view.program.text}
        return replace(view, program=Program.of(sites, **counts))

    def check(self, reference: set[str], current: set[str]) -> None:
        """Raise ``SelectionError`` if a pattern matches none of the modules of its run."""
        for rule in self.rules:
            for side, patterns, modules in (
                ("the reference", rule.reference, reference),
                ("the current run", rule.current, current),
            ):
                for pattern in patterns:
                    if all(_matched(pattern, module) is None for module in modules):
                        raise SelectionError(
                            f"{self.path}: {pattern!r} matches no module of {side}, which has "
                            f"{listed(sorted(modules - {''}))}. Correct the rule, or delete it."
                        )

    def _renamed_tensor(self, site: Site) -> str:
        """Return what a site is of, with the new name of the module."""
        return f"{self._rename(site.owner)}{site.of[len(site.owner) :]}" if site.owner else site.of

    def _rename(self, module: str) -> str:
        for rule in self.rules:
            if len(rule.reference) == len(rule.current) == 1:
                texts = _matched(rule.reference[0], module)
                if texts is not None:
                    return _filled(rule.current[0], texts)
        return module

    def fused(self, reference: StepView, current: StepView) -> list[Group]:
        """Return the outputs of fused modules that call the same op equally often."""
        return [
            group
            for rule in self.rules
            if len(rule.reference) != len(rule.current)
            for group in _groups(rule, reference.program.sites, current.program.sites)
        ]


def modules_of(view: StepView) -> set[str]:
    """Return the modules that a step has sites or named tensors of."""
    sites = view.program.sites
    named = (site.owner for site in sites if site.owner)
    return {*named, *(site.module for site in sites)}


def _groups(rule: _Rule, reference: Sequence[Site], current: Sequence[Site]) -> Iterator[Group]:
    patterns = rule.reference, rule.current
    several = int(len(rule.current) > 1)
    sides = reference, current
    places: list[dict[tuple[object, ...], int]] = [
        {
            (number, tuple(found), site.phase, site.op, site.occurrence, site.output): position
            for position, site in enumerate(sites)
            if site.role == "output"
            for number, pattern in enumerate(of_side)
            if (found := _matched(pattern, site.module)) is not None
        }
        for sites, of_side in zip(sides, patterns, strict=True)
    ]
    for (_, *key), whole in places[1 - several].items():
        parts = [places[several].get((number, *key)) for number in range(len(patterns[several]))]
        positions = [part for part in parts if part is not None]
        if len(positions) == len(parts):
            yield ([whole], positions) if several else (positions, [whole])


def _matched(pattern: str, module: str) -> list[str] | None:
    """Return the texts that the stars of a pattern match in a module's name,
    or None if it does not match.
    """
    match = re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), module)
    return None if match is None else list(match.groups())


def _filled(pattern: str, texts: Sequence[str]) -> str:
    """Return a pattern with its stars replaced by texts."""
    first, *rest = pattern.split("*")
    return first + "".join(text + part for text, part in zip(texts, rest, strict=True))
