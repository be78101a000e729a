"""From a config to a model whose tensors can be read: what an engine and each of its ranks begin with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.models.architectures import spec_from_config
from quire.models.poolers import choose_pooler
from quire.models.spec import ModelSpec
from quire.weights.checkpoint import Checkpoint
from quire.weights.open import open_checkpoint
from quire.weights.resolve import resolve_model
from quire.weights.sentence_files import read_sentence_files


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
    if config.quantization == "gguf" and checkpoint.gguf_metadata is None:
        raise ConfigError(f"quantization='gguf' keeps a GGUF file's weights packed, and {path} is none: leave it out")
    spec = spec_from_config(checkpoint.config, source=str(path))
    files = None if config.runner == "generate" else read_sentence_files(path)
    pooler = choose_pooler(
        spec,
        checkpoint.config,
        source=str(path),
        runner=config.runner,
        convert=config.convert,
        given=config.pooler_config,
        told=None if files is None else (files.kind, files.normalizes),
    )
    if pooler is not None:
        _check_config(config)
        longest = spec.max_position
        if files is not None and files.max_tokens is not None and config.max_model_len is None:
            longest = min(longest, files.max_tokens)  # what it was trained on; max_model_len may ask for more
        spec = replace(spec, pooler=pooler, max_position=longest)
    checkpoint.check(spec)
    return OpenedModel(checkpoint, spec)


def _check_config(config: EngineConfig) -> None:
    """Refuse what a model that pools has no use for."""
    if config.num_ranks > 1:
        raise ConfigError(
            "a model that pools runs on one device so far: leave tensor_parallel_size and pipeline_parallel_size out, "
            "or use data_parallel_size"
        )
    for name in ("speculative_config", "logits_processors", "tool_call_parser", "reasoning_parser", "enable_lora"):
        if getattr(config, name):
            raise ConfigError(f"{name} is for models that generate, and this one pools: leave it out")
