"""From a config to a model whose tensors can be read: what an engine and each of its ranks begin with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from quire.config import EngineConfig
from quire.errors import ConfigError, UnsupportedModelError, WeightsError
from quire.models.architectures import spec_from_config
from quire.models.poolers import choose_pooler
from quire.models.spec import ModelSpec
from quire.pooling import PoolingKind
from quire.weights.checkpoint import Checkpoint
from quire.weights.files import read_json, read_json_object
from quire.weights.open import open_checkpoint, resolve_model


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


_MODES = {
    "pooling_mode_cls_token": PoolingKind.CLS,
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_lasttoken": PoolingKind.LAST,
}
_NAMES = {"cls": PoolingKind.CLS, "mean": PoolingKind.MEAN, "lasttoken": PoolingKind.LAST}


@dataclass(slots=True, frozen=True)
class SentenceFiles:
    """modules.json and what it names."""

    kind: PoolingKind
    normalizes: bool
    max_tokens: int | None


def read_sentence_files(path: Path) -> SentenceFiles | None:
    """What a model's directory says of pooling; None where it says nothing. Refuses what Quire does not compute."""
    listed = path / "modules.json"
    if not path.is_dir() or not listed.is_file():
        return None
    modules = read_json(listed)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise WeightsError(f"{listed}: expected a list of modules: fetch it again")
    kind, normalizes = None, False
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling":
            kind = _kind(path / str(module.get("path", "1_Pooling")) / "config.json")
        elif name == "Normalize":
            normalizes = True
        elif name != "Transformer":
            raise UnsupportedModelError(
                f"{listed}: the module {name} is not served (there are Transformer, Pooling and Normalize): use "
                "another model"
            )
    if kind is None:
        return None
    lengths = (
        read_json_object(path / "sentence_bert_config.json") if (path / "sentence_bert_config.json").is_file() else {}
    )
    longest = lengths.get("max_seq_length")
    return SentenceFiles(kind, normalizes, longest if type(longest) is int and longest > 0 else None)


def _kind(file: Path) -> PoolingKind:
    config = read_json_object(file)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if isinstance(named := config.get("pooling_mode"), str):
        modes = [named]
    known = _MODES | _NAMES
    if len(modes) != 1 or modes[0] not in known:
        raise UnsupportedModelError(
            f"{file}: pooling by {' and '.join(modes) or 'nothing'} is not served (there are cls, mean and last "
            "token): use another model, or set pooler_config"
        )
    return known[modes[0]]
