"""Weights: from a model's name to tensors in the decoder's slots.

    name ──resolve_model──▶ local path ──open_checkpoint──▶ Checkpoint ──load_into──▶ slots

A checkpoint is a directory of safetensors, a GGUF file, or random weights for a config. This package imports neither
torch nor numpy until tensors are read, so that `quire models` answers at once.
"""

from __future__ import annotations

from quire.weights.aliases import quire_home
from quire.weights.checkpoint import Checkpoint, ProgressFn
from quire.weights.open import DEFAULT_MODEL, open_checkpoint, resolve_model
from quire.weights.progress import ProgressBar

__all__ = [
    "DEFAULT_MODEL",
    "Checkpoint",
    "ProgressBar",
    "ProgressFn",
    "open_checkpoint",
    "quire_home",
    "resolve_model",
]
