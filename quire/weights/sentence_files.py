"""What sentence-transformers writes beside a model: how hidden states become an embedding, and how long texts are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import UnsupportedModelError, WeightsError
from quire.pooling import PoolingKind

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
    """None where a model's directory has none of them. Refuses what Quire does not compute."""
    listed = path / "modules.json"
    if not path.is_dir() or not listed.is_file():
        return None
    modules = _json(listed)
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
    lengths = _object(path / "sentence_bert_config.json") if (path / "sentence_bert_config.json").is_file() else {}
    longest = lengths.get("max_seq_length")
    return SentenceFiles(kind, normalizes, longest if type(longest) is int and longest > 0 else None)


def _kind(file: Path) -> PoolingKind:
    config = _object(file)
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


def _object(file: Path) -> dict[str, Any]:
    value = _json(file)
    if not isinstance(value, dict):
        raise WeightsError(f"{file}: holds a {type(value).__name__}, expected an object: fetch it again")
    return value


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{file}: not readable as JSON ({error}): fetch it again") from error
