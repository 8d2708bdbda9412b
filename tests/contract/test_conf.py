import dataclasses
import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from det_callbacks import conf
from det_callbacks.integrations.lightning import DeterminismCallback, ReplicaAuditCallback
from det_callbacks.settings import DeterminismSettings

CONF = Path(conf.__file__).parent
PRESETS = ("record", "verify", "audit", "replicas", "disabled")
PARAMETERS = {
    name: parameter
    for name, parameter in inspect.signature(DeterminismCallback).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD  # takes what there is not, to refuse it
}


def load(name: str) -> DictConfig:
    return OmegaConf.load(CONF / name)


@pytest.fixture
def user_conf(tmp_path: Path) -> Path:
    """The configuration of somebody who has callbacks, a Hydra callback and a seed of their own."""
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "default.yaml").write_text("stopping:\n  _target_: mine.Stopping\n")
    (tmp_path / "config.yaml").write_text(
        "defaults:\n"
        "  - callbacks: default\n"
        "  - _self_\n"
        "seed: 1\n"
        "hydra:\n"
        "  searchpath: ['pkg://det_callbacks.conf']\n"
        "  callbacks:\n"
        "    mine:\n"
        "      _target_: mine.JobCallback\n"
    )
    return tmp_path


def compose_with(folder: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(folder)):
        return compose("config", overrides=list(overrides), return_hydra_config=True)


def test_the_callback_file_is_the_signature():
    node = load("callbacks/determinism.yaml").determinism
    assert [name for name in node if not name.startswith("_")] == list(PARAMETERS)
    assert OmegaConf.is_missing(node, "reference")
    lines = (CONF / "callbacks" / "determinism.yaml").read_text().splitlines()
    for name, parameter in PARAMETERS.items():
        if parameter.default is not inspect.Parameter.empty:
            assert node[name] == parameter.default, name
        (line,) = [line for line in lines if line.strip().startswith(f"{name}:")]
        # Literal[...], or Literal[...] | None
        for kind in (parameter.annotation, *get_args(parameter.annotation)):
            for choice in get_args(kind) if get_origin(kind) is Literal else ():
                assert choice in line, f"{name} allows {choice}"


def test_the_options_are_the_signature_and_flow_into_the_callback():
    options = load("determinism/disabled.yaml").determinism
    assert set(options) == set(PARAMETERS)
    wired: Any = OmegaConf.to_container(
        load("determinism/record.yaml").callbacks.determinism, resolve=False
    )
    del wired["_target_"]
    assert wired == {name: f"${{determinism.{name}}}" for name in PARAMETERS}
    for name, parameter in PARAMETERS.items():
        if name not in ("reference", "mode", "settings"):
            assert options[name] == parameter.default, name
    assert list(options.settings) == [
        field.name for field in dataclasses.fields(DeterminismSettings)
    ]
    assert DeterminismSettings.from_mapping(options.settings) == DeterminismSettings()


def test_nothing_shipped_hides_a_users_file():
    shipped = sorted(str(path.relative_to(CONF)) for path in CONF.rglob("*.yaml"))
    assert shipped == [
        "callbacks/determinism.yaml",
        *(f"determinism/{name}.yaml" for name in sorted(PRESETS)),
    ]
    yaml_booleans = re.compile(r":\s*(off|on|yes|no)\s*(#|$)", re.IGNORECASE | re.MULTILINE)
    assert not any(yaml_booleans.search((CONF / name).read_text()) for name in shipped)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_command_in_the_first_comment_works_and_takes_nothing_away(preset, user_conf):
    lines = (CONF / "determinism" / f"{preset}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    words = shlex.split(lines[1].removeprefix("# "))
    assert words[:3] == ["python", "train.py", f"+determinism={preset}"]
    config = compose_with(user_conf, *words[2:], "determinism.settings.seed=7")
    assert (config.determinism.mode, config.seed) == (preset, 1)
    assert config.hydra.callbacks.mine._target_ == "mine.JobCallback"
    is_ours = preset != "disabled"
    assert list(config.callbacks) == ["stopping", "determinism"][: 1 + is_ours]
    job = config.hydra.callbacks.get("determinism")
    assert (job and job._target_) == (
        "det_callbacks.integrations.hydra.DeterminismJobCallback" if is_ours else None
    )


def test_the_audit_of_replicas_is_its_own_callback(user_conf):
    config = compose_with(user_conf, "+determinism=replicas", "determinism.on_divergence=warn")
    node: Any = OmegaConf.to_container(config.callbacks.determinism, resolve=True)
    assert (node.pop("_target_"), node.pop("_convert_")) == (
        "det_callbacks.ReplicaAuditCallback",
        "all",
    )
    assert node == {"every_n_steps": 100, "on_divergence": "warn", "ignore": []}
    parameters = inspect.signature(ReplicaAuditCallback).parameters
    assert (list(parameters), parameters["every_n_steps"].default) == (list(node), 100)


def test_callbacks_that_are_a_list_or_null(user_conf):
    (user_conf / "callbacks" / "mine.yaml").write_text("defaults:\n  - default\n  - determinism\n")
    config = compose_with(user_conf, "callbacks=mine", "callbacks.determinism.reference=refs/run1")
    assert list(config.callbacks) == ["stopping", "determinism"]
    assert config.callbacks.determinism._target_ == "det_callbacks.DeterminismCallback"
    (user_conf / "config.yaml").write_text(
        "callbacks: null\nhydra:\n  searchpath: ['pkg://det_callbacks.conf']\n"
    )
    config = compose_with(user_conf, "+determinism=record", "determinism.reference=refs/run1")
    assert list(config.callbacks) == ["determinism"]


def test_the_documented_table_is_made_of_the_list():
    rows = (Path(__file__).parents[2] / "docs/reference/settings.md").read_text().splitlines()
    for field in dataclasses.fields(DeterminismSettings):
        default = json.dumps(field.default) if isinstance(field.default, str) else field.default
        assert any(row.startswith(f"| `{field.name}` | `{default}` | ") for row in rows), field.name
