"""The live feed: one reader of the engine for however many pages are open.

It asks the engine what changed, at most five times a second, keeps a copy of the block map, and hands the same lines to
every viewer, except that a viewer sees its own tenant's requests only, and an admin sees all. A viewer that comes later
gets the copy first; one that reads too slowly gets it again instead of every line it missed. Without viewers, the
engine is not asked.

Any client may read it: curl -N -H "Authorization: Bearer KEY" "http://127.0.0.1:8000/live?model=NAME&engine=0"

Lines are JSON objects; columns of numbers in them are base64 of little-endian integers:
    hello    what is served, and the names of a row's fields
    status   the engine's state, when it changes
    blocks   blocks [first, first + n), and then `block_ids`, as they are now
    levels   the device and the levels below it, where there are any: blocks, what was found and what moved
    tick     rows of requests, block tables that changed, numbers for the charts; `ended`: requests that ended since the
             last one, with the tokens that each of their sequences made in the end
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

import quire
from quire.engine.api import EngineState, ServingEngine
from quire.engine.calls import ROW_FIELDS
from quire.errors import EngineDeadError
from quire.params import for_chat
from quire.server.errors import RETRY_SOON, ApiError, bad_request
from quire.server.histogram import Rolling
from quire.server.life import LifeState, ServerLife
from quire.server.metrics import RequestSummary, ServerMetrics

if TYPE_CHECKING:
    from quire.server.context import ServerContext

TICK_S = 0.2
IDLE_TICK_S = 0.5  # while nothing changes
CHART_S = 0.5  # between two numbers of the charts
LEVELS_S = 2.0  # between two looks at the levels below the device
CHART_POINTS = 180  # kept for viewers that come later
PIECE_BLOCKS = 2_048  # blocks that one question to the engine covers
PIECE_GAP_S = 0.01  # between two such questions, in which the engine can step
COPY_BLOCKS = 16_384  # blocks in one line of the copy
MAX_ROWS = 200
MAX_VIEWERS = 64
MAX_LINES_BEHIND = 32
ANSWER_S = 2.0  # an engine that takes longer to answer has its state shown meanwhile
MEDIA_TYPE = "application/x-ndjson"


_Status = tuple[str, str, list[str], dict[str, str]]  # the engine's state and why, the replicas, the models


@dataclass(slots=True, eq=False)
class _Viewer:
    sees: str | None  # the tenant whose requests it is shown; None: every tenant
    tenant: str = ""  # its own
    lines: deque[bytes] = field(default_factory=deque)
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    is_behind: bool = True  # the next thing it needs is the copy
    is_over: bool = False


class LiveFeed:
    """Belongs to the event loop. `view()` is what one page reads."""

    def __init__(
        self,
        engine: ServingEngine,
        metrics: ServerMetrics,
        life: ServerLife,
        *,
        hello: Callable[[], dict[str, Any]],
        engine_names: Callable[[], list[str]] = lambda: ["0"],
        models: Callable[[], dict[str, str]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._engine_names = engine_names  # all engines of this model, for a page to choose from
        self._models = models  # all models of the server, with their states
        self._life = life
        self._hello = hello
        self._clock = clock
        self._metrics = metrics
        self._rolling = Rolling(metrics.first_token, metrics.inter_token)
        self._last_ended: RequestSummary | None = None  # the last one that the viewers were told of
        self._viewers: set[_Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._watch: int | None = None
        self._tenants: list[str] | None = None  # tenants that the engine was asked about last; None: all
        self._codes = bytearray()
        self._ref_counts = bytearray()
        self._seq_ids = array("I")
        self._tables: dict[int, list[int]] = {}
        self._last: dict[str, Any] | None = None  # what the engine told of its requests
        self._chart: deque[dict[str, Any]] = deque(maxlen=CHART_POINTS)
        self._charted_s = 0.0
        self._levels: dict[str, Any] | None = None
        self._levels_s = 0.0
        self._status: _Status = ("", "", [], {})

    async def view(self, sees: str | None = None, tenant: str = "") -> AsyncIterator[bytes]:
        """Lines for one viewer, until it leaves or the engine ends."""
        viewer = _Viewer(sees, tenant)
        self._viewers.add(viewer)
        try:
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._run())
            yield _line({"type": "hello", "row_fields": ROW_FIELDS, **self._hello()})
            while True:
                if viewer.is_behind:
                    for line in self._copy(viewer):
                        yield line
                while viewer.lines:
                    yield viewer.lines.popleft()
                if viewer.is_over:
                    return
                viewer.filled.clear()
                await viewer.filled.wait()
        finally:
            self._viewers.discard(viewer)
            if not self._viewers and self._task is not None:
                self._task.cancel()
                self._task = None

    def check_room(self, tenant: str = "") -> None:
        """Refuse one viewer too many. A tenant with less than an equal share may exceed the limit, up to twice that."""
        viewing = [viewer.tenant for viewer in self._viewers]
        share = MAX_VIEWERS / len({*viewing, tenant})
        if len(viewing) >= 2 * MAX_VIEWERS or (len(viewing) >= MAX_VIEWERS and viewing.count(tenant) >= share):
            raise ApiError(429, f"{MAX_VIEWERS} pages are open already", code="too_many_viewers", headers=RETRY_SOON)

    # -- what the viewers are told

    def _copy(self, viewer: _Viewer) -> list[bytes]:
        """All that is known now. Lines that the viewer did not read yet are part of it."""
        viewer.lines.clear()
        viewer.is_behind = False
        lines = [self._status_line()] if self._status[0] else []
        for first in range(0, len(self._codes), COPY_BLOCKS):
            end = first + COPY_BLOCKS
            lines.append(
                _line(
                    {
                        "type": "blocks",
                        "first": first,
                        "num_scanned": len(self._codes[first:end]),
                        "block_ids": b"",
                        "codes": bytes(self._codes[first:end]),
                        "ref_counts": bytes(self._ref_counts[first:end]),
                        "seq_ids": _pack(self._seq_ids[first:end]),
                    }
                )
            )
        if self._last is not None:
            seen = _seen(self._last | {"tables": list(self._tables.items())}, viewer.sees)
            lines.append(_line({"type": "tables", "tables": seen["tables"], "chart": list(self._chart)}))
            lines.append(_line(seen | {"type": "tick", "tables": [], "gauges": None, "ended": []}))
        if self._levels is not None:
            lines.append(_line({"type": "levels", **self._levels}))
        return lines

    def _tell(self, line: bytes, viewers: Iterable[_Viewer] | None = None) -> None:
        for viewer in self._viewers if viewers is None else viewers:
            if len(viewer.lines) >= MAX_LINES_BEHIND:
                viewer.is_behind = True
                viewer.lines.clear()
            if not viewer.is_behind:  # else the copy will hold it
                viewer.lines.append(line)
            viewer.filled.set()

    def _status_line(self) -> bytes:
        state, reason, engines, models = self._status
        return _line({"type": "status", "state": state, "reason": reason, "engines": engines, "models": models})

    # -- what is asked of the engine

    async def _run(self) -> None:
        self._forget()
        try:
            while self._tell_status():
                try:
                    changed = await self._look()
                except EngineDeadError:
                    if self.engine.health().state is not EngineState.SLEEPING:
                        raise
                    changed, self._watch = False, None  # its process has ended, until a request starts it again
                await asyncio.sleep(TICK_S if changed else IDLE_TICK_S)
        except EngineDeadError:
            self._tell_status()
        finally:
            for viewer in self._viewers:
                viewer.is_over = True
                viewer.filled.set()

    def _forget(self) -> None:
        """Drop what was known when the last viewer left: it is out of date."""
        self._watch = None
        self._codes.clear()
        self._ref_counts.clear()
        del self._seq_ids[:]
        self._tables.clear()
        self._chart.clear()
        self._last = self._levels = None
        self._levels_s = 0.0
        self._last_ended = self._metrics.recent[-1] if self._metrics.recent else None
        self._status = ("", "", [], {})

    def _tell_status(self) -> bool:
        """The engine's state, where it changed. False: it is dead, and nothing will follow."""
        health = self.engine.health()
        state, reason = health.state.value, health.reason
        if health.state is EngineState.READY and self._life.state is LifeState.DRAINING:
            state = LifeState.DRAINING.value
        if health.state is EngineState.DEAD:
            reason = ""  # its text may name files; the log has it
        if (status := (state, reason, self._engine_names(), self._models())) != self._status:
            self._status = status
            self._tell(self._status_line())
        return health.state is not EngineState.DEAD

    async def _look(self) -> bool:
        """Ask the engine once. True where something is going on."""
        now_s = self._clock()
        with_gauges = now_s - self._charted_s >= CHART_S
        with_levels = now_s - self._levels_s >= LEVELS_S
        found = await self._ask(max_rows=MAX_ROWS, with_gauges=with_gauges, with_levels=with_levels)
        if (levels := found.get("levels")) is not None and levels != self._levels:
            self._levels = levels
            self._tell(_line({"type": "levels", **levels}))
        if with_levels:
            self._levels_s = now_s
        num_changed = self._take_blocks(found["blocks"])
        num_left = found["blocks"]["num_left"]
        self._take_tick(found, now_s)
        while num_left:
            await asyncio.sleep(PIECE_GAP_S)
            more = await self._ask(max_rows=0, with_gauges=False)
            num_changed += self._take_blocks(more["blocks"])
            # Where blocks change faster than they are read, the rest waits for the next round.
            if more["blocks"]["num_left"] >= num_left:
                break
            num_left = more["blocks"]["num_left"]
        return bool(num_changed or found["rows"])

    async def _ask(self, **arguments: Any) -> dict[str, Any]:
        # The engine reports a limited number of requests: asked by tenant, it reports those that the viewers may see.
        seen = {viewer.sees for viewer in self._viewers}
        tenants = None if None in seen else sorted(filter(None, seen))
        if tenants != self._tenants:  # tables of new tenants were not kept: a new watch brings all of them
            self._tenants, self._watch = tenants, None
        call = asyncio.ensure_future(
            self.engine.call("kv_changes", watch=self._watch, limit=PIECE_BLOCKS, tenants=tenants, **arguments)
        )
        try:
            while not (await asyncio.wait({call}, timeout=ANSWER_S))[0]:
                self._tell_status()  # a step takes long, or hangs: the page should say so
        finally:
            call.cancel()
        found: dict[str, Any] = call.result()
        self._watch = found["watch"]
        return found

    def _take_blocks(self, blocks: dict[str, Any]) -> int:
        """Write changed blocks into the copy, and pass them on to the viewers."""
        first, num_scanned = blocks["first"], blocks["num_scanned"]
        codes, ref_counts = blocks["codes"], blocks["ref_counts"]
        seq_ids = array("I", struct.unpack(f"<{len(codes)}I", blocks["seq_ids"]))
        if not codes:
            return 0
        end = first + num_scanned
        changed = struct.unpack(f"<{len(blocks['block_ids']) // 4}I", blocks["block_ids"])
        copies: tuple[Any, ...] = (self._codes, self._ref_counts, self._seq_ids)
        for known, new in zip(copies, (codes, ref_counts, seq_ids), strict=True):
            known.extend([0] * (end - len(known)))
            known[first:end] = new[:num_scanned]
            for i, block_id in enumerate(changed, start=num_scanned):
                known[block_id] = new[i]
        self._tell(_line({"type": "blocks", **blocks}))
        return len(codes)

    def _take_tick(self, found: dict[str, Any], now_s: float) -> None:
        rows = found["rows"]
        here = {row[0] for row in rows}
        self._tables = {seq_id: runs for seq_id, runs in self._tables.items() if seq_id in here}
        self._tables.update((seq_id, runs) for seq_id, runs in found["tables"])
        gauges = found["gauges"]
        if gauges is not None:
            self._charted_s = now_s
            load = self.engine.load()
            gauges |= self._rolling.read(now_s, gauges) | {"brownout_level": load.brownout_level}
            self._chart.append(gauges)
        self._last = found
        all_ended = self._take_ended()
        for sees in {viewer.sees for viewer in self._viewers}:
            ended = [(e.request_id, e.output_tokens_by_index) for e in all_ended if sees is None or e.tenant == sees]
            line = _line(_seen(found, sees) | {"type": "tick", "gauges": gauges, "ended": ended})
            self._tell(line, [viewer for viewer in self._viewers if viewer.sees == sees])

    def _take_ended(self) -> list[RequestSummary]:
        """The engine's rows say how far a request was at the last look, and not where it ended."""
        recent = self._metrics.recent
        ended = [*itertools.takewhile(lambda one: one is not self._last_ended, reversed(recent))]
        if ended:
            self._last_ended = ended[0]
        return ended


def _seen(told: dict[str, Any], sees: str | None) -> dict[str, Any]:
    """The requests that a viewer is shown, with their tables: some of those that the engine reports."""
    rows = told["rows"]
    if sees is not None:
        rows = [row for row, tenant in zip(rows, told["row_tenants"], strict=True) if tenant == sees]
    seq_ids = {row[0] for row in rows}
    tables = {name: [one for one in told[name] if one[0] in seq_ids] for name in ("tables", "host_tables")}
    return {"rows": rows, **tables}


_encoder = msgspec.json.Encoder()


def _line(message: dict[str, Any]) -> bytes:
    return _encoder.encode(message) + b"\n"


def _pack(numbers: array[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def describe(name: str, engine: ServingEngine) -> dict[str, Any]:
    """Facts that a page needs before the first line of the feed."""
    info = engine.info
    sampling = for_chat(engine.default_sampling)
    told = (
        *("device", "dtype", "block_size", "num_blocks", "num_host_blocks", "block_bytes", "max_model_len"),
        *("max_num_seqs", "enable_prefix_caching"),
    )
    return {
        "version": quire.__version__,
        "model": name,
        **{field: getattr(info, field) for field in told},
        "chat": {"temperature": sampling.temperature, "top_p": sampling.top_p},
    }


async def show_live(context: ServerContext, request: HttpRequest) -> Response:
    """What the page at `/` draws from: one JSON object a line, without end."""
    for name in request.query_params:
        if name not in ("engine", "model"):
            raise bad_request(f"/live has no parameter {name}: it has model and engine", param=name)
    feed = context.choose(request).feed_of(request.query_params.get("engine"), context.states)
    if request.method == "HEAD":
        return Response(media_type=MEDIA_TYPE)
    state = request.scope["state"]
    feed.check_room(state["tenant"])
    return StreamingResponse(
        feed.view(state["sees"], state["tenant"]),
        media_type=MEDIA_TYPE,
        # A proxy that collects the stream before passing it on would show the past.
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )
