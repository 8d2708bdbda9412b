"""What to do in each framework, where that depends on the framework."""

from collections.abc import Mapping

_EXACTLY = 'fit(ckpt_path=...) with resume="exact"'
_BY_BOTH_FILES = (
    "resume_from_checkpoint, if the folder has optimizer.pt and scheduler.pt (not "
    "save_only_model=True)"
)
RESTORED_BY: Mapping[str, Mapping[str, str]] = {
    "parameters": {"torch": "model.load_state_dict"},
    "buffers": {
        "torch": "model.load_state_dict; a buffer with persistent=False is in no checkpoint"
    },
    "optimizer": {
        "torch": "optimizer.load_state_dict, after the model is on its device",
        "lightning": "fit(ckpt_path=...), not with save_weights_only=True",
        "transformers": _BY_BOTH_FILES,
        "accelerate": "accelerator.load_state, after accelerator.prepare(optimizer)",
    },
    "options": {
        "torch": "optimizer.load_state_dict, and after it scheduler.load_state_dict",
        "lightning": "fit(ckpt_path=...)",
        "transformers": _BY_BOTH_FILES,
        "accelerate": "accelerator.load_state, after accelerator.prepare(scheduler)",
    },
    "further": {"torch": "its load_state_dict", "lightning": "fit(ckpt_path=...)"},
    "generators": {
        "torch": "its state as saved, set after the trained batches are skipped",
        "lightning": _EXACTLY,
        "transformers": (
            "rng_state.pth, which the Trainer loads after the first batch: the data set may not "
            "draw"
        ),
        "accelerate": "accelerator.load_state, called once the first batch is loaded",
    },
    "gradients": {
        "torch": "save after an update, when no gradients are accumulated",
        "lightning": _EXACTLY,
    },
    "data": {
        "torch": (
            "its generators as the epoch began, and skip the trained batches; or a loader with a "
            "state_dict"
        ),
        "lightning": _EXACTLY,
        "transformers": "resume_from_checkpoint without ignore_data_skip=True",
        "accelerate": "skip_first_batches, with use_seedable_sampler=True and set_epoch",
    },
}
"""What restores each part of the state that a ``resume`` table names."""

SAVE_VALUE: Mapping[str, str] = {
    "lightning": "save that value with on_save_checkpoint and on_load_checkpoint, or in a buffer",
    "transformers": (
        "the Trainer's sum of the losses since it last logged is one. Let logging_steps divide "
        "save_steps, or add det_callbacks.huggingface.DeterminismCallback, which leaves that sum "
        "out"
    ),
    "torch": "save that value with the checkpoint, or keep it in a buffer",
}
"""How a Python value that a checkpoint lacks gets into it."""


def of_framework(texts: Mapping[str, str], framework: str) -> str:
    """Return the text for a framework; that of plain torch if it needs no other."""
    return texts.get(framework, texts["torch"])
