"""Prefill and decode apart, in virtual time: blocks travel over a link, and requests follow them, as between engines.

A request's blocks go out as its chunks finish. When the last have arrived they are fetched into the other replica's
cache, and then the request is handed over after its next token; until then it decodes where it was.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from quire.request import Request
from quire.scheduler.traffic import FetchReport
from quire.sim.devices import LINK_PIECES
from quire.sim.replica import Replica

SHORT_PROMPT = 256  # uncached tokens that a decoding replica computes itself, as router/replicas.py has it


@dataclass(slots=True, kw_only=True)
class Link:
    """A link from one machine's memory to another's, or to the device beside it."""

    bytes_per_s: float
    latency_s: float = 1e-3
    num_pieces: int = LINK_PIECES


@dataclass(slots=True)
class Handovers:
    """What is on its way between the replicas of a fleet. `touched` names those whose next event may have changed."""

    replicas: Sequence[Replica]
    roles: Sequence[str]
    link: Link
    block_bytes: int
    touched: set[int] = field(default_factory=set)
    num_moved: int = 0
    on_leave: Callable[[Request], None] = lambda request: None
    timers: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _free_s: dict[int, float] = field(default_factory=dict)  # by replica: until when its link sends
    _fetching: dict[int, tuple[int, int, Request]] = field(default_factory=dict)
    _num_coming: dict[int, int] = field(default_factory=dict)

    @property
    def prefilling(self) -> list[int]:
        return [index for index, role in enumerate(self.roles) if role != "decode"]

    def least_loaded(self) -> int:
        """The index of the replica with the fewest requests, of those that decode."""
        decoding = [index for index, role in enumerate(self.roles) if role == "decode"]
        return min(decoding, key=lambda index: self.replicas[index].num_requests + self._num_coming.get(index, 0))

    def direct(self, request: Request) -> int | None:
        """The replica that computes a prompt of which little is new to it, and goes on with it."""
        index = self.least_loaded()
        if request.num_prompt_tokens <= SHORT_PROMPT:
            return index
        match = self.replicas[index].kv.match(request.prompt_token_ids)
        return index if request.num_prompt_tokens - match.num_tokens <= SHORT_PROMPT else None

    def on_first_token(self, source: int, request: Request, now_s: float, begun_s: float) -> None:
        """The request's prompt is computed: all but the last piece of the last chunk may have left by now, if the link
        was free."""
        [seq] = request.sequences
        target, kv = self.least_loaded(), self.replicas[source].kv
        num_bytes = len(kv.tables[seq.seq_id].hashes) * self.block_bytes
        chunk = min(
            kv.num_pages(self.replicas[source].config.scheduler.max_num_batched_tokens) * self.block_bytes, num_bytes
        )
        rate = self.link.bytes_per_s
        sent_s = max(self._free_s.get(source, 0.0), begun_s) + num_bytes / rate
        sent_s = self._free_s[source] = max(sent_s, now_s + chunk / self.link.num_pieces / rate)
        self._num_coming[target] = self._num_coming.get(target, 0) + 1
        arrive = lambda then_s: self._arrived(source, target, request, then_s)  # noqa: E731
        heapq.heappush(self.timers, (sent_s + self.link.latency_s, next(self._numbers), arrive))

    def _arrived(self, source: int, target: int, request: Request, now_s: float) -> None:
        if request.is_finished:
            self._num_coming[target] -= 1
            return
        [seq] = request.sequences
        table = self.replicas[source].kv.tables.get(seq.seq_id)
        keys = list(table.hashes) if table is not None else []
        number = next(self._numbers)
        self._fetching[number] = (source, target, request)
        self.replicas[target].fetch(number, list(seq.token_ids), keys, now_s)
        self.touched.add(target)

    def on_fetched(self, report: FetchReport, now_s: float) -> None:
        source, target, request = self._fetching.pop(report.fetch_id)

        def leave(tokens: list[int], last_token_s: float) -> None:
            following = replace(request, sequences=[], is_finished=False, continued={0: tokens})
            self._num_coming[target] -= 1
            self.num_moved += 1
            self.on_leave(request)
            self.replicas[target].add(following, last_token_s + self.link.latency_s, last_token_s=last_token_s)
            self.touched.add(target)

        def stay() -> None:
            self._num_coming[target] -= 1

        self.replicas[source].release(request, leave, stay, now_s)
        self.touched.add(source)
