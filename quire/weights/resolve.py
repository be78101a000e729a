"""From what a user calls a model to a path on this machine."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from quire.errors import ConfigError, WeightsError
from quire.weights.aliases import ALIASES, HUB_ALIASES
from quire.weights.checkpoint import ProgressFn
from quire.weights.hub import fetch_from_hub, fetch_gguf
from quire.weights.local import note_use
from quire.weights.open import check_load_format
from quire.weights.progress import ProgressBar
from quire.weights.pull import pull_alias

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILE = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):(?P<wanted>[\w.+-]+(/[\w.+-]+)*)")
_FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")


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
