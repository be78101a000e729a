"""From a config to a model whose tensors can be read: what an engine and each of its ranks begin with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from quire.config import EngineConfig
from quire.models.architectures import spec_from_config
from quire.models.spec import ModelSpec
from quire.weights.checkpoint import Checkpoint
from quire.weights.open import open_checkpoint
from quire.weights.resolve import resolve_model


@dataclass(slots=True, frozen=True)
class OpenedModel:
    """A model's config and headers; no tensor has been read."""

    checkpoint: Checkpoint
    spec: ModelSpec

    def fingerprint(self) -> str:
        """Differs where the config or a tensor's name, shape, dtype or size does: for ranks that read another copy."""
        tensors = sorted((t.name, t.shape, t.dtype, t.num_bytes) for t in self.checkpoint.tensors() or ())
        return hashlib.sha256(repr((self.spec, tensors)).encode()).hexdigest()[:16]


def open_model(config: EngineConfig) -> OpenedModel:
    """Find the model, fetching it where it has to be, and read what it says of itself."""
    path = resolve_model(
        config.model, revision=config.revision, load_format=config.load_format, download_dir=config.download_dir
    )
    checkpoint = open_checkpoint(path, load_format=config.load_format, hf_overrides=config.hf_overrides)
    spec = spec_from_config(checkpoint.config, source=str(path))
    checkpoint.check(spec)
    return OpenedModel(checkpoint, spec)
