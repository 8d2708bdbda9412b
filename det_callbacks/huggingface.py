"""DeterminismCallback for the Trainer of Hugging Face transformers; needs ``pip install
'det_callbacks[hf]'``.
"""

from det_callbacks.integrations.huggingface import DeterminismCallback

__all__ = ["DeterminismCallback"]
