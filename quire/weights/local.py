"""Models on this machine: what QUIRE_HOME and the hub's cache hold, how large, when last used, and removing them."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quire.weights.aliases import ALIASES, HUB_ALIASES, quire_home

_WEIGHTS = ("*.safetensors", "*.gguf")


@dataclass(slots=True, frozen=True)
class LocalModel:
    """A model whose weights are here."""

    name: str  # what it can be asked for by
    path: Path
    num_bytes: int
    used_s: float  # seconds since 1970
    licence: str | None  # None: see the model's page
    files: tuple[Path, ...]  # links in the hub's cache, each of which leads to its content
    folder: Path  # the model's own, which goes when nothing is left in it


def note_use(path: Path) -> None:
    """Set the access time of a model's weights, which many systems do not keep by themselves. The hub's own tools show
    it too."""
    files = [path] if path.is_file() else [file for pattern in _WEIGHTS for file in path.glob(pattern)]
    for file in files:
        with contextlib.suppress(OSError):  # somebody else's file, or a disk that cannot be written
            os.utime(file, (time.time(), file.stat().st_mtime))


def local_models() -> list[LocalModel]:
    """All of them, by name. Looks at directory entries only."""
    from huggingface_hub.constants import HF_HUB_CACHE

    found = [*_in_home(quire_home() / "models")]
    for folder in sorted(Path(HF_HUB_CACHE).glob("models--*")):
        found += _in_cache(folder)
    return found


def remove(model: LocalModel) -> None:
    """Remove a model's files, and its folder unless another model's weights are in it."""
    for file in model.files:
        content = file.resolve()
        file.unlink(missing_ok=True)
        content.unlink(missing_ok=True)
    if not any(file for pattern in _WEIGHTS for file in model.folder.rglob(pattern)):
        shutil.rmtree(model.folder)


def _in_home(models: Path) -> Iterable[LocalModel]:
    by_path = {alias.path(): alias for alias in ALIASES.values()}
    for file in sorted(models.glob("*/*.gguf")):
        alias = by_path.get(file)
        if alias is None:
            yield _model(str(file), file, [file], None, file.parent)
        elif alias.is_cached():
            yield _model(alias.name, file, [file], alias.licence, file.parent)


def _in_cache(folder: Path) -> Iterable[LocalModel]:
    repo = folder.name.removeprefix("models--").replace("--", "/")
    alias = next((alias for alias in HUB_ALIASES.values() if alias.repo == repo), None)
    licence = None if alias is None else alias.licence
    snapshots = sorted(folder.glob("snapshots/*"), key=lambda snapshot: snapshot.stat().st_mtime)
    whole = [snapshot for snapshot in snapshots if any(snapshot.glob("*.safetensors"))]
    if whole:
        files = [file for snapshot in whole for file in snapshot.iterdir() if file.is_file() and file.suffix != ".gguf"]
        yield _model(repo if alias is None else alias.name, whole[-1], files, licence, folder)
    by_name: dict[str, list[Path]] = {}
    for snapshot in snapshots:
        for file in sorted(snapshot.rglob("*.gguf")):
            if file.is_file():
                by_name.setdefault(str(file.relative_to(snapshot)), []).append(file)
    for name, files in by_name.items():
        yield _model(f"{repo}:{name}", files[-1], files, licence, folder)


def _model(name: str, path: Path, files: list[Path], licence: str | None, folder: Path) -> LocalModel:
    contents = {file.resolve(): file.stat() for file in files}  # snapshots share what did not change
    num_bytes = sum(stat.st_size for stat in contents.values())
    used_s = max(stat.st_atime for stat in contents.values())
    return LocalModel(name, path, num_bytes, used_s, licence, tuple(files), folder)
