"""From a model's name to a local path, and from there to a checkpoint."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config import LOAD_FORMATS
from quire.errors import ConfigError, WeightsError
from quire.weights.aliases import ALIASES, HUB_ALIASES
from quire.weights.checkpoint import Checkpoint, ProgressFn
from quire.weights.files import read_json_object
from quire.weights.gguf_checkpoint import GGUFCheckpoint
from quire.weights.hub import fetch_from_hub, fetch_gguf
from quire.weights.local import note_use
from quire.weights.progress import ProgressBar
from quire.weights.pull import pull_alias
from quire.weights.safetensors_checkpoint import SafetensorsCheckpoint

if TYPE_CHECKING:
    from quire.models.slots import WeightSlot

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILE = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):(?P<wanted>[\w.+-]+(/[\w.+-]+)*)")
_FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")
_STD = 0.02  # what most models are initialized with


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
        if not files and not has_safetensors and not (path / "config.json").exists():
            raise WeightsError(
                f"{path / 'config.json'}: missing, and no .gguf file is there: give a directory that holds a model"
            )
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


class DummyCheckpoint(Checkpoint):
    """A config alone. The same seed gives the same weights, whatever order the slots come in."""

    __slots__ = ()

    def tensors(self) -> None:
        return None

    def load_into(
        self,
        slots: Mapping[str, WeightSlot],
        is_ignored: Callable[[str], bool],
        *,
        progress: ProgressFn | None = None,
        seed: int = 0,
    ) -> None:
        for done, (name, slot) in enumerate(slots.items(), 1):
            slot.randomize(_STD, zlib.crc32(f"{seed}:{name}".encode()))
            if progress is not None:
                progress(done, len(slots))


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    load_format: str = "auto",
    download_dir: str | None = None,
    on_progress: ProgressFn | None = None,
) -> Path:
    """The local path of an alias, a directory, a file or a hub id; the first and the last are fetched if need be.

    A hub id may name a GGUF file or its quantization: owner/name:Q4_K_M. A path that exists wins over a hub id of the
    same spelling, an alias over both. What is fetched is kept under `download_dir`; without it, in the hub's own cache
    and in QUIRE_HOME. Without `on_progress` a terminal shows a progress bar.
    """
    check_load_format(load_format)
    if not model:
        raise ConfigError("model is empty: give an alias (`quire models` lists them), a path or a hub id")
    alias = ALIASES.get(model)
    kept_in = None if download_dir is None else Path(download_dir).expanduser()
    if alias is None and model not in HUB_ALIASES and Path(model).expanduser().exists():
        _refuse_revision(revision, model)
        return Path(model).expanduser()
    if alias is not None:
        _refuse_revision(revision, model)
        with ProgressBar(f"pulling {model}") as bar:
            path = pull_alias(alias, home=kept_in, on_progress=on_progress or bar)
    else:
        repo, wanted = _hub_name(model)
        if wanted is None:
            path = fetch_from_hub(repo, revision=revision, config_only=load_format == "dummy", cache_dir=kept_in)
        else:
            path = fetch_gguf(repo, wanted, revision=revision, cache_dir=kept_in)
    if load_format != "dummy":
        note_use(path)
    return path


def is_hub_id(name: str) -> bool:
    return "/" in name and _HUB_ID.fullmatch(name) is not None


def _hub_name(model: str) -> tuple[str, str | None]:
    """A repository of the hub, and which of its GGUF files."""
    if model in HUB_ALIASES:
        alias = HUB_ALIASES[model]
        logger.info("%s is %s on the hub (licence: %s)", model, alias.repo, alias.licence)
        return alias.repo, None
    if (file := _HUB_FILE.fullmatch(model)) is not None:
        return file["repo"], file["wanted"]
    if model.endswith(_FILE_SUFFIXES) or _HUB_ID.fullmatch(model) is None:
        raise WeightsError(f"{model}: no such file or directory (hub ids have the form owner/name)")
    return model, None


def _refuse_revision(revision: str | None, model: str) -> None:
    if revision is not None:
        raise ConfigError(f"revision={revision!r} is for hub ids, and {model!r} is none: leave it out")
