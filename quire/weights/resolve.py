"""From what a user calls a model to a path on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from quire.errors import ConfigError, WeightsError
from quire.weights.aliases import ALIASES
from quire.weights.checkpoint import ProgressFn
from quire.weights.hub import fetch_from_hub
from quire.weights.open import check_load_format
from quire.weights.progress import ProgressBar
from quire.weights.pull import pull_alias

DEFAULT_MODEL = "smollm2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
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

    A path that exists wins over a hub id of the same spelling, an alias over both. What is fetched is kept under
    `download_dir`; without it, in the hub's own cache and in QUIRE_HOME. Without `on_progress` a terminal shows a
    progress bar.
    """
    check_load_format(load_format)
    if not model:
        raise ConfigError(f"model is empty: give an alias ({', '.join(ALIASES)}), a path or a hub id")
    alias = ALIASES.get(model)
    path = Path(model).expanduser()
    kept_in = None if download_dir is None else Path(download_dir).expanduser()
    if alias is None and not path.exists():
        if _looks_like_path(model):
            raise WeightsError(f"{model}: no such file or directory (hub ids have the form owner/name)")
        return fetch_from_hub(model, revision=revision, config_only=load_format == "dummy", cache_dir=kept_in)
    if revision is not None:
        raise ConfigError(f"revision={revision!r} is for hub ids, and {model!r} is none: leave it out")
    if alias is None:
        return path
    with ProgressBar(f"pulling {model}") as bar:
        return pull_alias(alias, home=kept_in, on_progress=on_progress or bar)


def _looks_like_path(model: str) -> bool:
    return model.endswith(_FILE_SUFFIXES) or _HUB_ID.fullmatch(model) is None
