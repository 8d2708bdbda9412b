"""Reads configuration and overrides of a Hydra job from Hydra's state."""

import re
from collections.abc import Mapping
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from det_callbacks.environment.capture import command_choice

_OF_ONE_RUN = re.compile(
    r"\$\{(now:|hydra:(run|sweep|runtime\.output_dir|runtime\.cwd|job\.num|job\.id))[^}]*\}"
)


def job_choices() -> dict[str, Any]:
    """Return configuration and overrides of the running job as choices;
    {} outside ``hydra.main``.
    """
    if not HydraConfig.initialized():
        return {}
    own: Any = HydraConfig.get()
    config: Any = OmegaConf.select(own, "..")  # the whole configuration
    return {
        "config": configuration_of(config),
        **command_choice(own.overrides.task, start=own.runtime.cwd),
    }


def configuration_of(config: DictConfig) -> Mapping[str, Any]:
    """Return the resolved configuration, without Hydra's and our nodes, times and folders.

    If an interpolation does not resolve, all values stay unresolved.
    """
    text = _OF_ONE_RUN.sub("<run>", OmegaConf.to_yaml(config))
    written: Any = OmegaConf.to_container(OmegaConf.create(text))
    for place in (written, written.get("callbacks")):
        if isinstance(place, dict):
            place.pop("determinism", None)
    written.pop("hydra", None)
    written = OmegaConf.create(written)
    try:
        found: Any = OmegaConf.to_container(written, resolve=True)
    except OmegaConfBaseException:
        found = OmegaConf.to_container(written, resolve=False)
    return dict(found)
