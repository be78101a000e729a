"""Conversations from a ShareGPT-style JSON file: real prompts, and how long their answers were.

    [{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}, …]

`messages` with `role` and `content` is understood too, and one object a line (.jsonl).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.report import read_json, read_text
from quire.bench.workloads import Workload
from quire.errors import ConfigError

_ASKING = {"human", "user"}
_ANSWERING = {"gpt", "assistant", "chatgpt", "bing", "bard"}


@dataclass(slots=True, frozen=True)
class Exchange:
    """The first question of a conversation, and its answer."""

    prompt: str
    answer: str


def read_exchanges(path: str | Path) -> list[Exchange]:
    """Conversations that do not start with a question and an answer are passed over, as such files have many."""
    source = Path(path)
    entries = _lines(source) if source.suffix == ".jsonl" else read_json(source, "the dataset")
    if not isinstance(entries, list):
        raise ConfigError(f"the dataset {source} must be a list of conversations, not {_kind(entries)}")
    exchanges = [found for i, entry in enumerate(entries) if (found := _exchange(source, i, entry)) is not None]
    if not exchanges:
        raise ConfigError(
            f"the dataset {source} has {len(entries)} entries and none of them starts with a question and an answer"
        )
    return exchanges


def dataset_workload(
    exchanges: Sequence[Exchange],
    encode: Callable[[str], list[int]],
    *,
    num: int,
    max_len: int,
    seed: int = 0,
    num_out: int | None = None,
    skip: int = 0,
) -> Workload:
    """`num` exchanges in a seeded order, after the first `skip` that fit; the answer's length is the output's.

    Exchanges with fewer than 4 tokens on a side or more than `max_len` in all are left out. A file with fewer than
    asked for is gone through again.
    """
    order = list(exchanges)
    random.Random(seed).shuffle(order)
    usable: Workload = []
    for exchange in order:
        prompt = encode(exchange.prompt)
        length = num_out or len(encode(exchange.answer))
        if len(prompt) >= 4 and length >= (1 if num_out else 4) and len(prompt) + length <= max_len:
            usable.append((prompt, length))
        if len(usable) == skip + num:
            break
    if not usable:
        raise ConfigError(f"no exchange of the dataset has 4 tokens or more on each side and at most {max_len} in all")
    return [usable[(skip + i) % len(usable)] for i in range(num)]


def _lines(source: Path) -> list[Any]:
    entries = []
    for number, line in enumerate(read_text(source, "the dataset").splitlines(), start=1):
        if line.strip():
            try:
                entries.append(json.loads(line))
            except ValueError as error:
                raise ConfigError(f"line {number} of the dataset {source} is not JSON: {error}") from None
    return entries


def _exchange(source: Path, index: int, entry: Any) -> Exchange | None:
    where = f"entry {index} of the dataset {source}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be an object with conversations, not {_kind(entry)}")
    turns = entry.get("conversations", entry.get("messages", entry.get("conversation")))
    if not isinstance(turns, list):
        raise ConfigError(f"{where} has no list of conversations (or messages)")
    said = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise ConfigError(f"{where} holds a turn that is {_kind(turn)}: an object with from and value is needed")
        who, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(who, str) or not isinstance(text, str):
            raise ConfigError(f"{where} holds a turn without from and value (or role and content) as texts")
        if who != "system":
            said.append((who, text))
    if len(said) < 2 or said[0][0] not in _ASKING or said[1][0] not in _ANSWERING:
        return None
    return Exchange(said[0][1], said[1][1])


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", type(None): "null", bool: "true or false"}
    return names.get(type(value), "a number")
