"""Requests as the simulator takes them: when they come, how long they are, and what their prompts have in common.

A trace is a file with one JSON object a line:

    {"arrival": 0.25, "prompt_len": 812, "output_len": 120, "prefix_id": "agent", "prefix_len": 512}

`prompt_token_ids` may stand for `prompt_len`. Mooncake's names are understood too: `timestamp` in milliseconds,
`input_length`, `output_length`, and `hash_ids`, each of which names 512 tokens.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.report import read_text
from quire.bench.workloads import Workload
from quire.errors import ConfigError
from quire.params import SamplingSpec
from quire.request import Request

_HASHED_TOKENS = 512  # that one of Mooncake's hash_ids names
_GREEDY = SamplingSpec(temperature=0.0)
_SHARED = 1 << 30  # token ids from here on belong to prefixes, those below to single requests


@dataclass(slots=True, frozen=True)
class SimRequest:
    """A request that generates exactly `output_len` tokens. `prompt`: its token ids where they are known; else it
    begins with `prefixes`, (name, tokens) each, and has nothing else in common with any other."""

    arrival_s: float
    prompt_len: int
    output_len: int
    prefixes: tuple[tuple[str, int], ...] = ()
    prompt: list[int] | None = None

    def token_ids(self, index: int) -> list[int]:
        if self.prompt is not None:
            return self.prompt
        tokens: list[int] = []
        for name, count in self.prefixes:
            tokens += [_SHARED + (zlib.crc32(name.encode()) & (_SHARED - 1))] * count
        return tokens[: self.prompt_len] + [index % _SHARED] * (self.prompt_len - len(tokens))

    def at(self, arrival_s: float) -> SimRequest:
        return SimRequest(arrival_s, self.prompt_len, self.output_len, self.prefixes, self.prompt)

    def for_engine(self, index: int) -> Request:
        """The request as an engine takes it, under its index as its id."""
        return Request(
            request_id=str(index),
            prompt_token_ids=self.token_ids(index),
            max_tokens=self.output_len,
            end_token_ids=frozenset(),
            spec=_GREEDY,
            arrival_s=self.arrival_s,
        )


def from_workload(workload: Workload, arrivals: Sequence[float] | None) -> list[SimRequest]:
    """`arrivals` in seconds; None: all at once."""
    times = arrivals if arrivals is not None else [0.0] * len(workload)
    return [
        SimRequest(at, len(prompt), num_out, prompt=prompt)
        for at, (prompt, num_out) in zip(times, workload, strict=True)
    ]


def read_trace(path: str | Path) -> list[SimRequest]:
    """The requests of a trace in the order of their arrivals. ConfigError names the line that is wrong."""
    lines = read_text(path, "the trace").splitlines()
    found = [_request(f"line {number} of the trace {path}", line) for number, line in enumerate(lines, 1) if line]
    if not found:
        raise ConfigError(f"the trace {path} has no requests")
    return sorted(found, key=lambda request: request.arrival_s)


def _request(where: str, line: str) -> SimRequest:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be an object with arrival, prompt_len and output_len")
    prompt = entry.get("prompt_token_ids")
    if prompt is not None and not (isinstance(prompt, list) and all(_is_token(token) for token in prompt)):
        raise ConfigError(f"{where}: prompt_token_ids must be a list of whole numbers from 0 to {_SHARED - 1}")
    arrival = _number(where, entry, "arrival", 0.0)
    if "timestamp" in entry:
        arrival = _number(where, entry, "timestamp", 0.0) / 1e3
    prompt_len = len(prompt) if prompt is not None else _count(where, entry, ("prompt_len", "input_length"))
    output_len = _count(where, entry, ("output_len", "output_length"))
    if not prompt_len:
        raise ConfigError(f"{where}: the prompt is empty")
    prefixes: list[tuple[str, int]] = []
    if isinstance(hashes := entry.get("hash_ids"), list):
        # The last one may name fewer tokens, which nobody else can share.
        prefixes = [(f"hash {one}", _HASHED_TOKENS) for one in hashes[: prompt_len // _HASHED_TOKENS]]
    elif entry.get("prefix_id") is not None:
        length = _count(where, entry, ("prefix_len",))
        if length > prompt_len:
            raise ConfigError(f"{where}: prefix_len is {length} and the prompt has {prompt_len} tokens")
        prefixes = [(str(entry["prefix_id"]), length)]
    return SimRequest(arrival, prompt_len, output_len, tuple(prefixes), prompt)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _SHARED


def _number(where: str, entry: dict[str, Any], name: str, default: float) -> float:
    value = entry.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value < math.inf):
        raise ConfigError(f"{where}: {name} must be a number of 0 or more, got {value!r}")
    return float(value)


def _count(where: str, entry: dict[str, Any], names: tuple[str, ...]) -> int:
    name = next((name for name in names if name in entry), None)
    if name is None:
        raise ConfigError(f"{where} has no {names[0]}")
    value = entry[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {name} must be a whole number of 1 or more, got {value!r}")
    return value
