"""Writes down what users of version 1 rely on: ``python tests/public.py`` writes
public.txt and the JSON Schemas.

``tests/contract/test_public.py`` compares both with the package. docs/reference/stability.md says
what each change of them means for the version.
"""

import ast
import dataclasses
import inspect
import json
import tomllib
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import schemas
import yaml

import det_callbacks
from det_callbacks.checkpoint.files import SCHEMA as CHECKPOINT_SCHEMA
from det_callbacks.cli.parser import SCRIPT_OPTIONS, _parser
from det_callbacks.digest.host import DIGEST_VERSION
from det_callbacks.integrations.pytest_plugin import pytest_addoption
from det_callbacks.runs.files import FORMAT_VERSION
from det_callbacks.tensors.files import TENSORS_FORMAT_VERSION
from det_callbacks.training.following import FollowedRun
from det_callbacks.verdict import EXIT_CODES, VERDICT_SCHEMA

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "public.txt"
HEAD = """\
# What users of version 1 rely on; docs/reference/stability.md says what a change of each line means for the version.
# make public writes this file, tests/contract/test_public.py compares it.
"""  # noqa: E501  # a text

PUBLIC = {
    name: getattr(det_callbacks, name) for name in sorted(det_callbacks.__all__)
}  # Lightning leaves filters behind

MEMBERS = {
    "BitwiseEquivalenceMode": "get_mismatches",
    "DeterminismCallback": "audit_report replica_report verdict",
    "HashMode": "digest_state is_off is_open optimizers trace",
    "ObserverContext": "mismatches next_step verdict",
    "ReplicaAuditCallback": "",
    "TrainingRun": "audit_report batches log replica_report resume_from step verdict",
}
MAKERS = {"choose", "of", "refused"}


def text() -> str:
    parts = {
        "Python: import each from det_callbacks": names(),
        "Hugging Face: import it from det_callbacks.huggingface": huggingface(),
        "**arguments of TrainingRun and of Hugging Face's callback": [_call(FollowedRun)],
        "Command line: det-callbacks": commands(),
        "Exit statuses": (
            f"{name}: {code}" for name, code in [*EXIT_CODES.items(), ("anything else", 2)]
        ),
        "pyproject.toml: keys of [tool.det_callbacks]": (
            name.removeprefix("--").replace("-", "_")
            for name in [*SCRIPT_OPTIONS, "--ignore_findings"]
        ),
        "Hydra: pkg://det_callbacks.conf": hydra(),
        "pytest": pytest_options(),
        "Formats": formats(),
        "Entry points": entry_points(),
    }
    return HEAD + "".join(
        f"\n== {title}\n" + "".join(f"{one}\n" for one in lines) for title, lines in parts.items()
    )


def names() -> Iterator[str]:
    """Yield a line for each public name, and below it one for each public attribute of a class."""
    for name, public in PUBLIC.items():
        if not isinstance(public, type):
            yield f"{name}{_call(public)}"
            continue
        if issubclass(public, Exception):
            status = f", exit status {public.exit_code}" if hasattr(public, "exit_code") else ""
            caught_as = [
                base.__name__ for base in public.__mro__[1:-2] if not base.__name__.startswith("_")
            ]
            yield f"{name}({', '.join(caught_as)}){status}"
        else:
            yield f"{name}{_call(public)}"
        yield from (f"    .{_member(public, one)}" for one in sorted(_members(public)))


def _members(public: type) -> Iterator[str]:
    """Yield the members that a user reads or calls; what makes a result, or drives a step,
    is for the integrations.
    """
    if public.__name__ in MEMBERS:
        yield from MEMBERS[public.__name__].split()
        return
    fields = (
        {one.name for one in dataclasses.fields(public)}
        if dataclasses.is_dataclass(public)
        else set()
    )
    of_package = [base for base in public.__mro__ if base.__module__.startswith("det_callbacks.")]
    for name in (
        {name for base in of_package for name in vars(base)} - fields - {"exit_code"} - MAKERS
    ):
        if not name.startswith("_"):
            yield name


def _member(public: type, name: str) -> str:
    member = inspect.getattr_static(public, name, None)  # None for one that __init__ sets
    return f"{name}{_call(getattr(public, name))}" if inspect.isroutine(member) else name


def _call(public: Any) -> str:
    """Return the arguments with their defaults; mypy looks after the types,
    whose text depends on Python's version.
    """
    signature = inspect.signature(public)
    arguments = [
        one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()
    ]
    return str(signature.replace(parameters=arguments, return_annotation=inspect.Signature.empty))


def huggingface() -> Iterator[str]:
    """Yield its callback, read from the source, as transformers may be missing."""
    source = (ROOT / "det_callbacks" / "integrations" / "huggingface.py").read_text()
    (callback,) = (
        node
        for node in ast.parse(source).body
        if getattr(node, "name", "") == "DeterminismCallback"
    )
    for node in ast.walk(callback):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield f"DeterminismCallback({ast.unparse(node.args)})"


def commands() -> Iterator[str]:
    parser = _parser("")
    (subparsers,) = (action for action in parser._actions if isinstance(action, _SubParsersAction))
    yield from _arguments(parser, "")
    for name, command in subparsers.choices.items():
        yield name
        yield from _arguments(command, "    ")


def _arguments(parser: ArgumentParser, indent: str) -> Iterator[str]:
    for action in parser._actions:
        if not isinstance(action, _SubParsersAction):
            told = {"takes": action.nargs, "choices": action.choices, "default": action.default}
            told = {
                name: value
                for name, value in told.items()
                if value not in (None, False, "==SUPPRESS==")
            }
            facts = [f"{name} {value!r}" for name, value in told.items()] + [
                "required"
            ] * action.required
            yield (
                f"{indent}{'/'.join(action.option_strings) or action.dest.upper()}"
                + f" ({', '.join(facts)})" * bool(facts)
            )


def hydra() -> Iterator[str]:
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        yield path.relative_to(ROOT / "conf").as_posix()
        content = yaml.safe_load(path.read_text())
        content.pop("defaults", None)
        yield from (f"    {key}: {json.dumps(value)}" for key, value in _flat(content))


def _flat(content: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{start}{key}.")
        else:
            yield f"{start}{key}", value


class _Parser:
    """Notes what the plugin adds to pytest's own parser."""

    def __init__(self) -> None:
        self.lines = ["fixture training_snapshot"]

    def getgroup(self, *names: str) -> "_Parser":
        return self

    def addoption(self, name: str, *, default: Any = None, **options: Any) -> None:
        choices = (
            f" (choices {', '.join(options['choices'])}; default {default})"
            if "choices" in options
            else ""
        )
        self.lines.append(f"option {name}{choices}")

    def addini(self, name: str, text: str, *, default: Any) -> None:
        self.lines.append(f"ini {name} (default {default})")


def pytest_options() -> list[str]:
    from det_callbacks.integrations.pytest_runs import TrainingRuns

    parser: Any = _Parser()
    options: pytest.Parser = parser
    pytest_addoption(options)
    return [f"training_snapshot{_call(TrainingRuns.__call__)}", *parser.lines]


def formats() -> Iterator[str]:
    yield f"run folder: format_version {FORMAT_VERSION}, digest_version {DIGEST_VERSION}"
    yield f"saved tensors in it: format_version {TENSORS_FORMAT_VERSION}"
    yield f"digests beside a checkpoint: schema {CHECKPOINT_SCHEMA}"
    yield f"JSON of verdict, findings and doctor: schema {VERDICT_SCHEMA}, in det_callbacks/schemas"


def entry_points() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for group, entries in {"scripts": project["scripts"], **project["entry-points"]}.items():
        yield from (f"{group}: {name} = {target}" for name, target in entries.items())


def main() -> None:
    FILE.write_text(text())
    schemas.FOLDER.mkdir(exist_ok=True)
    for name, schema in schemas.made().items():
        (schemas.FOLDER / f"{name}.json").write_text(json.dumps(schema, indent=1) + "\n")


if __name__ == "__main__":
    main()
