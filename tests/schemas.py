"""The JSON Schemas that the package ships, made from its dataclasses;
tests/conftest.py checks every verdict.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import Any

import msgspec
from jsonschema import Draft202012Validator

import det_callbacks
from det_callbacks.verdict import VERDICT_SCHEMA, Finding, Verdict

FOLDER = Path(det_callbacks.__file__).parent / "schemas"


@cache
def validator(name: str) -> Draft202012Validator:
    """Return what checks JSON with a schema of the package: verdict, findings or doctor."""
    return Draft202012Validator(json.loads((FOLDER / f"{name}.json").read_text()))


def require_schema(content: Any, name: str) -> None:
    problems = [f"{one.json_path}: {one.message}" for one in validator(name).iter_errors(content)]
    assert not problems, f"not the JSON that {name}.json describes: {'; '.join(problems)}"


def checked(to_dict: Callable[[Any], dict[str, Any]], name: str) -> Callable[[Any], dict[str, Any]]:
    def to_dict_of_schema(self: Any) -> dict[str, Any]:
        content = to_dict(self)
        require_schema(content, name)
        return content

    return to_dict_of_schema


def made() -> dict[str, dict[str, Any]]:
    from det_callbacks.environment.doctor import Diagnosis  # loads torch

    verdict = _definitions(Verdict)
    root = verdict.pop("Verdict")
    differences = {
        "properties": {"differences": root["properties"]["environment"]},
        "required": ["differences"],
    }
    root["properties"] |= {"environment": {"type": "object"} | differences}
    root["required"].remove("numerics")

    finding = _definitions(Finding)
    found = {
        "run": {"type": "string"},
        "findings": {"type": "array", "items": {"$ref": "#/$defs/Finding"}},
    }

    doctor = _definitions(Diagnosis)
    diagnosis = doctor.pop("Diagnosis")
    to_do = {"properties": {"to_do": {"type": "string"}}, "required": ["to_do"]}
    difference = {"allOf": [{"$ref": "#/$defs/EnvironmentDifference"}, to_do]}
    diagnosis["properties"] |= {"differences": {"type": "array", "items": difference}}
    diagnosis["properties"] = {"is_well": {"type": "boolean"}} | diagnosis["properties"]
    diagnosis["required"] = ["is_well", "installation"]  # a broken installation has no more
    return {
        "verdict": _document("verdict", root, verdict),
        "findings": _document("findings", {"properties": found, "required": [*found]}, finding),
        "doctor": _document("doctor", diagnosis, doctor),
    }


def _document(name: str, root: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    return {
        "$schema": Draft202012Validator.META_SCHEMA["$id"],
        "$id": f"urn:det_callbacks:{name}:{VERDICT_SCHEMA}",
        "description": root.get("description", f"What det-callbacks {name} --json prints."),
        "type": "object",
        "properties": {"schema": {"const": VERDICT_SCHEMA}} | root["properties"],
        "required": ["schema", *root["required"]],
        "$defs": definitions,
    }


def _definitions(data: type) -> dict[str, Any]:
    """Return the schemas of a dataclass and of those in it; all fields are written,
    so all are required.
    """
    definitions: dict[str, Any] = msgspec.json.schema(data)["$defs"]
    for one in definitions.values():
        text, _, attributes = cleandoc(one.get("description", "")).partition("\n\nAttributes:\n")
        one.pop("title")
        one.pop("description", None)
        if text:
            one["description"] = _line(text)
        for name, says in re.findall(r"^    (\w+): ((?:.|\n     )*)", attributes, re.MULTILINE):
            one["properties"][name]["description"] = _line(says)
        for field in one["properties"].values():
            field.pop("default", None)
        one["required"] = [*one["properties"]]
    return definitions


def _line(text: str) -> str:
    """Return a docstring's text as one line, in the words of JSON."""
    words = {"None": "null", "True": "true", "False": "false", "``": "`"}
    return re.sub(
        r"\b(None|True|False)\b|``", lambda found: words[found.group()], " ".join(text.split())
    )
