"""From a local path to a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, WeightsError
from quire.weights.checkpoint import Checkpoint
from quire.weights.dummy import DummyCheckpoint
from quire.weights.gguf_checkpoint import GGUFCheckpoint
from quire.weights.json_files import read_json_object
from quire.weights.safetensors_checkpoint import SafetensorsCheckpoint

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


def check_load_format(load_format: str) -> None:
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}")


def open_checkpoint(
    path: Path, *, load_format: str = "auto", hf_overrides: Mapping[str, Any] | None = None
) -> Checkpoint:
    """The checkpoint at `path`. Reads config and headers, no tensors.

    `hf_overrides` replaces entries of the config, each one whole.
    """
    check_load_format(load_format)
    if load_format == "dummy":
        return _open_dummy(path, hf_overrides)
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        has_safetensors = any(path.glob("*.safetensors*"))
        if load_format == "safetensors" or (load_format == "auto" and (has_safetensors or not files)):
            return SafetensorsCheckpoint(path, hf_overrides=hf_overrides)
        if len(files) != 1:
            held = ", ".join(f.name for f in files) or "none"
            raise WeightsError(
                f"{path}: expected one .gguf file, there are {len(files)} ({held}): give the file's path"
            )
        path = files[0]
    elif not path.exists():
        raise WeightsError(f"{path}: no such file or directory")
    elif load_format == "safetensors" or path.suffix in (".safetensors", ".json"):
        raise WeightsError(f"{path}: a file; for safetensors give the directory that holds config.json beside it")
    return GGUFCheckpoint(path, hf_overrides=hf_overrides)


def _open_dummy(path: Path, hf_overrides: Mapping[str, Any] | None) -> DummyCheckpoint:
    """Dummy weights for a directory's config.json, for that file itself, or for a GGUF file's metadata."""
    config_path = path / "config.json" if path.is_dir() else path
    if config_path.suffix == ".json":
        config = read_json_object(config_path) | dict(hf_overrides or {})
        return DummyCheckpoint(path if path.is_dir() else path.parent, config)
    real = GGUFCheckpoint(path, hf_overrides=hf_overrides)
    return DummyCheckpoint(
        path, real.config, generation_config=real.generation_config, gguf_metadata=real.gguf_metadata
    )
