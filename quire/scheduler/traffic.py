"""Blocks between engines: those of running requests go out while they run, and others' are fetched before they come.

A prompt's blocks go out in the very step that fills them, a few layers at a time; what decodes fill goes after it.

Neither stops a step, and nothing depends on either: a request whose blocks did not arrive is computed where it goes on,
and one that does not go stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field

from quire.kv import KVManager
from quire.kv.hashing import BlockHash
from quire.plan import StepPlan
from quire.request import Request, SequenceState
from quire.scheduler.lifecycle import Lifecycle
from quire.scheduler.step import StepBuilder


@dataclass(slots=True, frozen=True)
class SendReport:
    """How far a request's blocks have arrived at the other engine."""

    request_id: str
    num_tokens: int  # of each of its sequences, at least
    has_failed: bool = False  # nothing more is sent


@dataclass(slots=True, frozen=True)
class FetchReport:
    """How many leading tokens of a prefix are in the device's cache now."""

    fetch_id: int
    num_tokens: int


@dataclass(slots=True)
class _Sending:
    request: Request
    to: str
    num_known: int  # leading blocks that the other has already
    num_sent: dict[int, int] = field(default_factory=dict)  # by seq_id: leading blocks
    keys: set[BlockHash] = field(default_factory=set)  # what was sent: sequences of one request share blocks
    tickets: set[int] = field(default_factory=set)  # of blocks that earlier steps had filled
    filling: set[int] = field(default_factory=set)  # of blocks that went out with their own step
    num_told: int | None = None  # tokens, in the last report


@dataclass(slots=True)
class _Fetch:
    fetch_id: int
    token_ids: list[int]
    salt: str | None
    adapter: str | None
    tickets: set[int] | None = None  # None: it has not begun


class BlockTraffic:
    """What leaves and what is about to come. Belongs to the scheduler, which plans its moves first in each step."""

    def __init__(self, life: Lifecycle, kv: KVManager) -> None:
        self._life = life
        self._kv = kv
        self._sending: dict[str, _Sending] = {}  # by request_id
        self._fetches: list[_Fetch] = []
        self._reports: list[SendReport | FetchReport] = []

    @property
    def has_work(self) -> bool:
        return bool(self._fetches)

    def take_reports(self) -> list[SendReport | FetchReport]:
        reports, self._reports = self._reports, []
        return reports

    def send(self, request: Request, to: str, num_known: int = 0) -> None:
        """Send every full block of a request to another engine, until the request ends or `stop` is called. Asked for
        again, it is told again how far they have come."""
        known = self._sending.get(request.request_id)
        if known is not None and known.request is request and known.to == to:
            known.num_told = None
        elif self._kv.tiers is None or self._kv.tiers.peers is None or request.beams is not None:
            self._reports.append(SendReport(request.request_id, 0, has_failed=True))
        else:
            self._sending[request.request_id] = _Sending(request, to, num_known)

    def stop(self, request_id: str) -> None:
        self._sending.pop(request_id, None)

    def fetch(self, fetch_id: int, token_ids: TokenIds[int], salt: str | None, adapter: str | None) -> None:
        """Load into the cache what levels below the device have of a prefix; a report tells when that is over."""
        self._fetches.append(_Fetch(fetch_id, list(token_ids), salt, adapter))

    def plan(self, plan: StepPlan) -> None:
        """Plan the moves before anything else of a step: what is sent must have been computed by earlier steps."""
        for fetch in self._fetches:
            if fetch.tickets is None:
                self._begin(fetch, plan)
        for sending in list(self._sending.values()):
            if sending.request.is_finished:
                del self._sending[sending.request.request_id]
            elif not sending.tickets:
                self._send_more(sending, plan)
        self._tell_fetches()

    def _begin(self, fetch: _Fetch, plan: StepPlan) -> None:
        moves, fetch.tickets = self._kv.start_fetch(
            fetch.token_ids, salt=fetch.salt, adapter=fetch.adapter, take_ticket=self._life.take_ticket
        )
        self._life.enter_moves(plan, moves)

    def _send_more(self, sending: _Sending, plan: StepPlan) -> None:
        for seq in sending.request.sequences:
            if seq.state is not SequenceState.RUNNING:
                continue
            first = sending.num_sent.get(seq.seq_id, sending.num_known)
            end, moves = self._kv.start_send(
                seq.seq_id, first, sending.keys, to=sending.to, take_ticket=self._life.take_ticket
            )
            sending.num_sent[seq.seq_id] = end
            for move in moves:
                sending.keys.update(key for _, key in move.pairs)
                sending.tickets.add(move.ticket)
            self._life.enter_moves(plan, moves)
        self._tell(sending)

    def plan_filled(self, step: StepBuilder) -> None:
        """Plan, when the rest of a step is planned, what its chunks fill of blocks that are sent anyway."""
        for seq, start in zip(step.chunks, step.chunk_starts, strict=True) if self._sending else ():
            sending = self._sending.get(seq.request.request_id)
            if sending is None:
                continue
            num_before = start // self._kv.block_size
            end, moves = self._kv.start_send_filled(
                seq.seq_id,
                max(num_before, sending.num_known),
                sending.keys,
                to=sending.to,
                take_ticket=self._life.take_ticket,
            )
            # Blocks before these may still wait for their turn. `_send_more` then comes to these, too, and skips them.
            num_sent = sending.num_sent.get(seq.seq_id, sending.num_known)
            if num_sent >= num_before:
                sending.num_sent[seq.seq_id] = max(num_sent, end)
            for move in moves:
                sending.keys.update(key for _, key in move.pairs)
                sending.filling.add(move.ticket)
            self._life.enter_moves(step.plan, moves)

    def _tell(self, sending: _Sending) -> None:
        """How far blocks have come, when nothing more is on its way and it is not what was told before."""
        if sending.tickets or sending.filling or not sending.num_sent:
            return
        running = {seq.seq_id for seq in sending.request.sequences if seq.state is SequenceState.RUNNING}
        blocks = [count for seq_id, count in sending.num_sent.items() if seq_id in running]
        num_tokens = min(blocks, default=0) * self._kv.block_size
        if num_tokens == sending.num_told:
            return
        sending.num_told = num_tokens
        self._reports.append(SendReport(sending.request.request_id, num_tokens))

    def on_moved(self, ticket: int, is_complete: bool) -> None:
        for fetch in self._fetches:
            if fetch.tickets:
                fetch.tickets.discard(ticket)
        self._tell_fetches()
        for request_id, sending in list(self._sending.items()):
            if ticket not in sending.tickets and ticket not in sending.filling:
                continue
            sending.tickets.discard(ticket)
            sending.filling.discard(ticket)
            if not is_complete:
                del self._sending[request_id]
                self._reports.append(SendReport(request_id, 0, has_failed=True))
            else:
                self._tell(sending)

    def _tell_fetches(self) -> None:
        over = [fetch for fetch in self._fetches if fetch.tickets is not None and not fetch.tickets]
        if not over:
            return
        self._fetches = [fetch for fetch in self._fetches if fetch not in over]
        for fetch in over:
            match = self._kv.match(fetch.token_ids, salt=fetch.salt, adapter=fetch.adapter)
            self._reports.append(FetchReport(fetch.fetch_id, match.num_tokens))
