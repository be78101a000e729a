"""ReplicaSet: several engines of one model behind the interface of one, and requests that outlive them.

Every request's text, and with it the tokens that its reader has, is kept on this side of the engines. When a replica
dies, hangs or is drained, its requests go on at another one from exactly there, and sampling goes on at the same
position with the same seed. One that lives sends their blocks ahead (`carry.py`); what a dead one had is computed
again, as the tokens of a preempted sequence are. A replica that died is started again, after a while that grows with
every failure.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from quire.config import EngineConfig
from quire.engine.api import EngineHealth, EngineInfo, EngineLoad, EngineState, PreparedRequest
from quire.engine.client import EngineClient
from quire.engine.launch import EngineProcessOptions
from quire.engine.messages import CacheReport, LoadReport
from quire.engine.stats import Metric
from quire.engine.streams import Stream
from quire.engine.text_front import TextFront
from quire.errors import BadRequestError, EngineDeadError, QuireError
from quire.kv.hashing import BlockHash
from quire.log import get_logger
from quire.outputs import RequestOutput
from quire.router.hashes import prompt_hashes
from quire.router.members import Flight, Member, device_environment
from quire.router.moves import Moves
from quire.router.policy import CacheChanges, Prompt, ReplicaLoad, Router, Ticket
from quire.socket_folder import SocketFolder

_SHUT_DOWN = "the engine was shut down"
_LOOK_S = 1.0  # between two looks at whether a replica hangs
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_WELL_AFTER_S = 60.0  # a replica that has served so long had no fault of its own before
_MAX_DEATHS = 3  # of replicas under one request: it may be what kills them
_MAX_FAILURES = 5  # in a row, of the last replica that was left
_NONE_TAKEN = 3  # EngineLoad.brownout_level
_SHORT_PROMPT = 256  # uncached tokens that a replica computes itself though its role is to decode
_EVERYWHERE = ("reset_prefix_cache", "pin_prefix", "unpin_prefix")  # calls that are for all replicas


class ReplicaSet(TextFront):
    """Implements `quire.engine.api.ServingEngine`. Belongs to one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        num_replicas: int,
        options: EngineProcessOptions | None = None,
        *,
        make_client: Callable[..., EngineClient] = EngineClient,
    ) -> None:
        options = replace(options or EngineProcessOptions(), publishes_cache=config.enable_prefix_caching)
        super().__init__(config, options, None)
        self.router = Router(config.block_size)
        self._num_first = num_replicas
        self._make_client = make_client
        self._members: dict[str, Member] = {}
        self._names = itertools.count()
        self._listeners = itertools.count()
        self._flights: dict[Stream, Flight] = {}
        self._homeless: dict[Stream, list[int]] = {}  # no replica takes requests: by stream, the sequences that go on
        self._waiters: set[asyncio.Future[None]] = set()
        self._on_death: list[Callable[[str], None]] = []
        self._death_reason = ""
        self._is_closing = False
        self._info: EngineInfo | None = None
        self.num_moved = 0  # requests that went on at another replica
        self.moves = Moves(self._members, self._flights, self.router, prompt_of=self._prompt_of, adopt=self._adopt)
        can_send = config.enable_prefix_caching and not config.is_split and config.kv_listen is None
        self._sockets = SocketFolder() if can_send else None
        self._balancer: asyncio.Task[None] | None = None
        device_environment(config, num_replicas - 1)  # what does not fit is refused before anything starts

    # -- life

    async def start(self) -> None:
        for _ in range(self._num_first):
            self._add_member()
        self._balancer = asyncio.create_task(self.moves.balance())
        self._balancer.add_done_callback(_tell_of_bug)

    async def ready(self) -> None:
        """Wait until every replica can serve. Raises what keeps one from it."""
        await asyncio.gather(*(asyncio.shield(member.started) for member in list(self._members.values())))

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Called once, with the reason, when no replica is left and none could be started again."""
        self._on_death.append(callback)

    async def close(self, grace_s: float = 10.0) -> None:
        self._is_closing = True
        if self._balancer is not None:
            self._balancer.cancel()
        members = list(self._members.values())
        for member in members:
            if member.keeper is not None:
                member.keeper.cancel()
        await asyncio.gather(*(m.keeper for m in members if m.keeper is not None), return_exceptions=True)
        await asyncio.gather(*(member.client.close(grace_s) for member in members))
        self._fail_waiting(EngineDeadError(_SHUT_DOWN))
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None

    def _add_member(self) -> Member:
        index = next(i for i in itertools.count() if all(m.index != i for m in self._members.values()))
        name = str(next(self._names))
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        started.add_done_callback(lambda done: done.cancelled() or done.exception())
        member = Member(name, index, self._client_of(name, index), started, started)
        if index < len(self.config.roles):
            member.role = self.config.roles[index]
        self._members[name] = member
        member.keeper = asyncio.create_task(self._keep(member))
        member.keeper.add_done_callback(_tell_of_bug)
        return member

    def _client_of(self, name: str, index: int) -> EngineClient:
        config = self.config
        if self._info is not None:  # clients were told this length, and there is one block size for all hashes
            config = config.replace(max_model_len=self._info.max_model_len)
        if self._sockets is not None:
            config = config.replace(kv_listen=f"{self._sockets.path}/kv-{name}-{next(self._listeners)}")
        return self._make_client(
            config,
            replace(self.options, environment={**self.options.environment, **device_environment(config, index)}),
            text=self._text,
            on_report=lambda report: self._on_report(name, report),
            on_lost=lambda lost: self._on_lost(name, lost),
        )

    async def _keep(self, member: Member) -> None:
        """Start a replica, again and again where it dies, until somebody removes it."""
        while not self._is_closing and member.name in self._members:  # a cancellation may be lost in a wait_for
            try:
                await member.client.start()
                await member.client.ready()
            except QuireError as error:
                if not member.started.done():
                    member.started.set_exception(error)
                    return
                get_logger().error("replica %s could not be started: %s", member.name, error)
            else:
                self._on_ready(member)
                await self._watch(member)
            member.is_ready = False
            await member.client.close(0.0)
            member.num_failures += 1
            if member.num_failures >= _MAX_FAILURES and not any(m.is_ready for m in self._members.values()):
                self._give_up(member.client.health().reason)
                return
            backoff_s = min(_FIRST_BACKOFF_S * 2 ** (member.num_failures - 1), _MAX_BACKOFF_S)
            get_logger().warning("replica %s is started again in %g s", member.name, backoff_s)
            await asyncio.sleep(backoff_s)
            member.num_restarts += 1
            member.client = self._client_of(member.name, member.index)

    def _on_ready(self, member: Member) -> None:
        info = member.client.info
        if self._info is None or info.max_model_len < self._info.max_model_len:
            self._info = replace(self._info or info, max_model_len=info.max_model_len)
            self._take_limits(info)
        member.is_ready = True
        member.death = death = asyncio.get_running_loop().create_future()
        member.client.on_death(lambda _: death.set_result(None))
        self.router.add(member.name, max_num_seqs=info.max_num_seqs, is_exact=self.config.enable_prefix_caching)
        self.router.set_open(member.name, not member.is_draining)
        if not member.started.done():
            member.started.set_result(None)
        else:
            get_logger().warning("replica %s serves again", member.name)
        self._place_waiting()

    async def _watch(self, member: Member) -> None:
        """Wait until a replica dies. One that hangs is ended, so that its requests go on elsewhere."""
        ready_s = time.monotonic()
        death = member.death
        while not death.done():
            if member.client.health().state is EngineState.STUCK:
                get_logger().error("replica %s hangs and is ended: %s", member.name, member.client.health().reason)
                member.client.kill()
            if member.num_failures and time.monotonic() - ready_s > _WELL_AFTER_S:
                member.num_failures = 0
            await asyncio.wait([death], timeout=_LOOK_S)

    def _give_up(self, reason: str) -> None:
        self._death_reason = reason = f"no replica is left, and none could be started again: {reason}"
        self._fail_waiting(EngineDeadError(reason))
        for callback in self._on_death:
            callback(reason)

    # -- more and fewer, while serving

    async def add(self) -> str:
        """Start another replica; returns its name once it serves."""
        device_environment(self.config, len(self._members))
        member = self._add_member()
        try:
            await asyncio.shield(member.started)
        except QuireError:
            await self._drop(member)
            raise
        return member.name

    async def drain(self, name: str) -> int:
        """A replica takes no more requests, and those that it has go on elsewhere; returns how many. It keeps running,
        and its cache, until `undrain` or `remove`."""
        member = self._find(name)
        if not any(m.is_ready and not m.is_draining for m in self._members.values() if m is not member):
            raise BadRequestError(
                f"replica {name} is the last that takes requests: add one first, or stop the server", param="engine"
            )
        member.is_draining = True
        if not member.is_ready:
            return 0
        self.router.set_open(name, False)
        num_carried = await self.moves.carry_all(member)
        lost = member.client.streams.release(abort=True) if member.is_ready else []
        for stream, open_indices in lost:
            self._move(stream, open_indices, has_died=False)
        return num_carried + len(lost)

    def undrain(self, name: str) -> None:
        member = self._find(name)
        member.is_draining = False
        if member.is_ready:
            self.router.set_open(name, True)
            self._place_waiting()

    async def remove(self, name: str) -> int:
        """Drain a replica, then end its process."""
        num_moved = await self.drain(name)
        await self._drop(self._find(name))
        return num_moved

    async def _drop(self, member: Member) -> None:
        self._members.pop(member.name, None)
        if member.keeper is not None:
            member.keeper.cancel()
            await asyncio.gather(member.keeper, return_exceptions=True)
        if member.name in self.router.replicas:
            self.router.remove(member.name)
        member.is_ready = False
        await member.client.close()

    def _find(self, name: str) -> Member:
        member = self._members.get(name)
        if member is None:
            known = ", ".join(self._members)
            raise BadRequestError(f"there is no replica {name!r}: there are {known}", param="engine")
        return member

    # -- what there is

    @property
    def replicas(self) -> Mapping[str, EngineClient]:
        """All of them by name, whatever their state."""
        return {name: member.client for name, member in self._members.items()}

    def describe(self) -> list[dict[str, Any]]:
        """Every replica, for who runs the server."""
        found = []
        for name, member in self._members.items():
            known = self.router.replicas.get(name)
            load = member.client.load()
            found.append(
                {
                    "engine": name,
                    "state": member.client.health().state.value,
                    "draining": member.is_draining,
                    "role": member.role,
                    "restarts": member.num_restarts,
                    "pid": member.client.pid,
                    "num_running": load.num_running,
                    "num_waiting": load.num_waiting,
                    "kv_usage": round(load.kv_usage, 4),
                    "num_sequences": known.num_sequences if known is not None else 0,  # sent there and not ended
                    "num_queued_tokens": known.num_queued_tokens if known is not None else 0,
                    "cached_blocks": self.router.num_blocks_of(name) if known is not None else 0,
                }
            )
        return found

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "no replica is ready yet"
        return self._info

    def health(self) -> EngineHealth:
        """Ready while any replica is."""
        if self._death_reason or self._is_closing:
            return EngineHealth(EngineState.DEAD, self._death_reason or _SHUT_DOWN)
        states = {member.client.health().state: member.client.health() for member in self._members.values()}
        for state in (EngineState.READY, EngineState.STUCK):
            if state in states:
                return states[state]
        return EngineHealth(EngineState.STARTING, "no replica is ready")

    def load(self) -> EngineLoad:
        loads = [member.client.load() for member in self._members.values() if member.is_ready]
        if not loads:
            return EngineLoad()
        return EngineLoad(
            num_running=sum(load.num_running for load in loads),
            num_waiting=sum(load.num_waiting for load in loads),
            num_waiting_tokens=sum(load.num_waiting_tokens for load in loads),
            kv_usage=sum(load.kv_usage for load in loads) / len(loads),
            num_steps=sum(load.num_steps for load in loads),
            tokens_per_s=sum(load.tokens_per_s for load in loads),
            brownout_level=min(load.brownout_level for load in loads),
        )

    # -- requests

    def raise_if_dead(self) -> None:
        if self._death_reason or self._is_closing:
            raise EngineDeadError(self._death_reason or _SHUT_DOWN)

    def hashes_of(self, prepared: PreparedRequest, output_token_ids: Sequence[int] = ()) -> list[BlockHash]:
        """The hashes of a request's full blocks before its last token; none where it reads no cache."""
        request = prepared.request
        if not self.config.enable_prefix_caching or request.skip_prefix_cache_read:
            return []
        token_ids = [*request.prompt_token_ids, *output_token_ids]
        return prompt_hashes(token_ids, self.config.block_size, request.salt, request.adapter)

    async def stream(self, prepared: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run a request, wherever it is soonest answered, and to its end wherever that is."""
        request = prepared.request
        prompt = Prompt(request.num_prompt_tokens, self.hashes_of(prepared), request.tenant, request.n)
        while (ticket := self._route(prompt)) is None:
            await self._wait_for_replica()
        try:
            blocks_to = self.moves.blocks_of_prompt_go(ticket.replica, prompt)
            stream = self._members[ticket.replica].client.streams.start(prepared, blocks_to)
        except BaseException:
            self.router.on_end(ticket)
            raise
        flight = self._flights[stream] = Flight(ticket)
        stream.on_start = partial(self._on_start, flight)
        if blocks_to is not None:
            self.moves.start(stream, flight)
        try:
            while not stream.is_finished:
                output = stream.home.take(stream)
                if output is None:
                    await stream.wait()
                    continue
                yield output
        finally:
            prepared.num_made_tokens, prepared.num_cached_tokens = stream.num_made_tokens, stream.num_cached_tokens
            del self._flights[stream]
            if flight.carrying is not None:
                flight.carrying.cancel()
            self.router.on_end(flight.ticket)
            if self._homeless.pop(stream, None) is not None:
                self._text.outputs.discard(request.request_id)
            stream.home.close(stream)

    async def call(self, name: str, **arguments: Any) -> Any:
        """An inspection of the first replica; what changes caches is for all of them."""
        serving = [member.client for member in self._members.values() if member.is_ready]
        if not serving:
            raise EngineDeadError(self._death_reason or "no replica is ready")
        if name not in _EVERYWHERE:
            return await serving[0].call(name, **arguments)
        results = await asyncio.gather(*(client.call(name, **arguments) for client in serving))
        return min(results)  # False where one did not, or the fewest tokens pinned

    async def metrics(self) -> list[Metric]:
        found = []
        for name, client in ((name, m.client) for name, m in self._members.items() if m.is_ready):
            found += [replace(one, labels={"engine": name, **one.labels}) for one in await client.metrics()]
        return found

    # -- from one replica to another

    def _route(self, prompt: Prompt) -> Ticket | None:
        """Prompts go to replicas that compute them. One that is short, or mostly cached where requests go on, need not
        travel."""
        roles = {name: self._members[name].role for name in self.router.replicas}
        if not self.config.roles:
            return self.router.route(prompt)
        direct = self.router.choose(prompt, excluding=[name for name, role in roles.items() if role == "prefill"])
        if direct is not None and direct.num_uncached_tokens <= _SHORT_PROMPT:
            return self.router.route_to(direct.replica, prompt)
        decoding = [name for name, role in roles.items() if role == "decode"]
        return self.router.route(prompt, excluding=decoding) or self.router.route(prompt)

    def _on_report(self, name: str, report: LoadReport | CacheReport) -> None:
        if name not in self.router.replicas:
            return  # it is about to be ready, and its cache is empty until a request comes
        if isinstance(report, CacheReport):
            changes = CacheChanges(filled=report.filled, evicted=report.evicted, is_snapshot=report.is_snapshot)
            self.router.on_cache(name, changes)
            return
        load = report.load
        # What is queued and runs there came from here, and is known better here.
        rates = ReplicaLoad(prefill_tokens_per_s=load.prefill_tokens_per_s, step_s=load.decode_step_s)
        self.router.on_load(name, rates)
        others_take = any(
            m.is_ready and not m.is_draining and m.client.load().brownout_level < _NONE_TAKEN
            for m in self._members.values()
        )
        member = self._members[name]
        is_short = load.brownout_level >= _NONE_TAKEN and others_take
        self.router.set_open(name, not member.is_draining and not is_short)

    def _on_start(self, flight: Flight) -> None:
        self.router.on_first_token(flight.ticket)

    def _on_lost(self, name: str, lost: list[tuple[Stream, list[int]]]) -> None:
        """A replica has died with these requests under way: they go on elsewhere."""
        if name in self.router.replicas:
            self.router.remove(name)
        self._members[name].is_ready = False
        if lost:
            get_logger().warning("%d requests of replica %s go on elsewhere", len(lost), name)
        for stream, open_indices in lost:
            self._move(stream, open_indices, has_died=True)

    def _move(self, stream: Stream, open_indices: list[int], *, has_died: bool) -> None:
        flight = self._flights[stream]
        self.router.on_end(flight.ticket)
        flight.num_deaths += has_died
        if flight.num_deaths >= _MAX_DEATHS:
            self._text.outputs.discard(stream.request.request_id)
            stream.error = EngineDeadError(f"{flight.num_deaths} replicas died while this request ran on them")
            stream.is_gone = True
            stream.wake()
            return
        self._homeless[stream] = open_indices
        self._place_waiting()

    def _place_waiting(self) -> None:
        """Requests that lost their replica come first, then those that wait for any."""
        for stream, open_indices in list(self._homeless.items()):
            ticket = self._route(self._prompt_of(stream, open_indices))
            if ticket is None:
                return
            del self._homeless[stream]
            self._adopt(stream, open_indices, ticket)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    @property
    def num_carried(self) -> int:
        """How many of the requests that moved took their blocks along."""
        return self.moves.num_carried

    def _prompt_of(self, stream: Stream, open_indices: list[int]) -> Prompt:
        """What a request that goes on is to a router: its tokens so far."""
        line = stream.lines[open_indices[0]]
        made = line.token_ids + line.waiting.new_token_ids
        hashes = self.hashes_of(PreparedRequest(stream.request, stream.params, None), made)
        num_tokens = stream.request.num_prompt_tokens + len(made)
        return Prompt(num_tokens, hashes, stream.request.tenant, len(open_indices))

    def _adopt(self, stream: Stream, open_indices: list[int], ticket: Ticket) -> None:
        flight = self._flights[stream]
        flight.ticket = ticket
        stream.on_start = partial(self._on_start, flight)
        self.num_moved += 1
        self._members[ticket.replica].client.streams.adopt(stream, open_indices)

    async def _wait_for_replica(self) -> None:
        self.raise_if_dead()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _fail_waiting(self, error: QuireError) -> None:
        for stream in self._homeless:
            stream.error, stream.is_gone = error, True
            stream.wake()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)


def _tell_of_bug(keeper: asyncio.Task[None]) -> None:
    if not keeper.cancelled() and (error := keeper.exception()) is not None:
        get_logger().error("a replica is no longer looked after", exc_info=error)
