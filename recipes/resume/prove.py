"""Is a resumed training the training that was interrupted?

Three trainings, compared bit for bit, say so.
"""

import logging
import sys
import warnings

import hydra
import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from omegaconf import DictConfig
from trainings import make_data, make_model

from det_callbacks import DetCallbacksError, prove_resume


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", PossibleUserWarning)  # advice on workers and logging
    pl.seed_everything(config.seed, workers=True)
    try:
        verdict = prove_resume(
            lambda: hydra.utils.instantiate(config.trainer),
            lambda: make_model(config.model),
            lambda: make_data(config.model, **config.data),
            stop_at=config.stop_at,
            steps=config.steps,
            resume=config.resume,
            folder=config.folder,
        )
    except DetCallbacksError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if rank_zero_only.rank > 0:  # of several processes each has the verdict
        raise SystemExit(verdict.exit_code)
    print(f"{verdict.verdict}: {verdict.explanation}")
    if verdict.first_divergence is not None:
        print(
            f"cause: {verdict.cause}; first: "
            f"{verdict.first_divergence.name or verdict.first_divergence.op}"
        )
    raise SystemExit(verdict.exit_code)


if __name__ == "__main__":
    main()
