"""The executor of a model that is split among ranks: processes of this machine, or of others.

    engine ── plans, once for all ──▶ every rank: apply, forward; one of them samples
           ◀── results ────────────── that one
           ◀── heartbeats ─────────── all

The scheduler knows nothing of it: a block is a block, of which each rank holds its part. No torch here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import replace
from typing import Protocol, TypeVar

import zmq

from quire import __version__
from quire.child import ChildProcess, describe_exit
from quire.config import EngineConfig
from quire.errors import RankError
from quire.executor.adapter_slots import AdapterSlots
from quire.executor.base import BuiltExecutor
from quire.executor.memory import MemoryLedger
from quire.executor.rank_adapters import RankAdapters
from quire.executor.rank_messages import (
    Allocate,
    FromRank,
    Hello,
    Loaded,
    Meet,
    RankFailed,
    RankLaunch,
    Ready,
    Reset,
    Result,
    Run,
    Stop,
    ToRank,
    encode_launch,
    from_rank,
    to_rank,
)
from quire.executor.rank_watch import Cause, RankUse, RankWatch
from quire.executor.ray_ranks import RayRanks
from quire.grammar import GrammarCompiler
from quire.log import get_logger
from quire.models.share import check_degrees
from quire.plan import StepPlan, StepResult
from quire.socket_folder import SocketFolder, end_context
from quire.tiers.connector import store_names
from quire.tiers.split import SplitStore, SplitStores
from quire.weights.model import OpenedModel

_LOOK_MS = 100  # at whether the ranks live, while a result is waited for
_STOP_S = 5.0

T = TypeVar("T", Hello, Loaded, Ready)


class Hosts(Protocol):
    """What starts ranks and ends them."""

    def start(self, launches: list[RankLaunch], watch: RankWatch) -> None: ...

    def stop(self, within_s: float) -> None:
        """Wait for ranks that were told to stop; end those that do not."""

    def kill(self) -> None: ...


class LocalRanks:
    """Ranks as processes of this machine."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._children: list[ChildProcess] = []
        self._is_closing = False

    def start(self, launches: list[RankLaunch], watch: RankWatch) -> None:
        # What torch's own threads may be, before it is imported; ranks of one machine meet on its own interface.
        environment = {"OMP_NUM_THREADS": str(self._num_threads)} | _loopback()
        for launch in launches:
            self._children.append(
                ChildProcess(
                    (sys.executable, "-P", "-m", "quire.executor.rank_process"),
                    encode_launch(launch),
                    lambda status, rank=launch.rank: self._on_exit(watch, rank, status),  # type: ignore[misc]
                    name=f"rank {launch.rank}",
                    environment=environment,
                )
            )

    def stop(self, within_s: float) -> None:
        self._is_closing = True
        until_s = time.monotonic() + within_s
        while any(child.is_running for child in self._children) and time.monotonic() < until_s:
            time.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        self._is_closing = True
        for child in self._children:
            child.kill()
        for child in self._children:
            child.release()
        self._children.clear()

    def _on_exit(self, watch: RankWatch, rank: int, status: int) -> None:
        if self._is_closing:
            return
        tail = self._children[rank].stderr_tail() if rank < len(self._children) else ""
        text = describe_exit(status, "").strip() + (f"; its last words:\n{tail}" if tail else "")
        watch.report(rank, Cause.KILLED if status < 0 else Cause.ENDED, text)


class _ToRanks:
    """What all ranks are told, in one order. Any thread may send."""

    def __init__(self, bound: zmq.Socket[bytes]) -> None:
        self.socket = bound
        self._lock = threading.Lock()

    def tell(self, message: ToRank) -> None:
        with self._lock:
            if not self.socket.closed:
                self.socket.send(to_rank.encode(message))

    def close(self) -> None:
        with self._lock:
            self.socket.close(linger=0)


class RankExecutor:
    """Runs plans on all ranks, as the executor's contract says."""

    def __init__(self, config: EngineConfig, hosts: Hosts, *, host: str | None = None) -> None:
        """host: the address under which ranks on other machines reach this one; None: all are on this one."""
        self._num_stages = config.pipeline_parallel_size
        self._num_ranks = config.tensor_parallel_size * self._num_stages
        self._has_drafts = config.speculative_config is not None
        self._hosts = hosts
        self._folder = SocketFolder()
        self._context = zmq.Context()
        self._keys = None if host is None else zmq.curve_keypair()
        plans, self.plans_address = self._bind(zmq.XPUB, "plans", host)
        plans.setsockopt(zmq.XPUB_VERBOSE, 1)  # each rank's subscription is told, not only the first
        self._to_ranks = _ToRanks(plans)
        self._results, self.results_address = self._bind(zmq.PULL, "results", host)
        beats, self.beats_address = self._bind(zmq.PULL, "beats", host)
        self._early: list[Hello | Loaded | Ready] = []  # while others have not been heard of
        self.members: list[Hello] = []  # by rank: where they are, and what they run
        # Not this object's own methods: the watch's thread would keep it, and it would never be closed by itself.
        self._split = SplitStores(store_names(config), self._num_ranks, self._to_ranks.tell)
        self._watch = RankWatch(self._num_ranks, beats, hosts.kill, self._split.hear)
        self.adapters = RankAdapters(self._num_ranks, self._to_ranks.tell, self._watch)
        self._submitted: deque[StepPlan] = deque()
        self._arrived: dict[int, StepResult] = {}
        self._num_collected = 0
        parts = (self._watch, self._hosts, self._to_ranks, self._results, self._context, self._folder)
        self._close = weakref.finalize(self, _end, *parts)

    # -- start

    def start(self, launches: list[RankLaunch], opened: OpenedModel) -> tuple[MemoryLedger, list[Ready]]:
        """Start the ranks and wait until all are ready for plans. Returns the ledger that all of them keep."""
        self._hosts.start(launches, self._watch)
        self.members = self._from_all(Hello)
        places = [f"{hello.host} (process {hello.pid})" for hello in self.members]
        self._watch.describe_with(places.__getitem__)
        self._check_alike(opened.fingerprint())
        for _ in range(self._num_ranks):
            self._wait(self._to_ranks.socket)
            self._to_ranks.socket.recv()  # a rank hears us
        if (store := self.members[0].store) is not None:
            self._to_ranks.tell(Meet(store))
        ledgers = [loaded.ledger for loaded in self._from_all(Loaded)]
        ledger = agreed(ledgers)
        self._to_ranks.tell(Allocate(ledger, sum(each.block_bytes for each in ledgers)))
        ready = self._from_all(Ready)
        while not self._split.wait_for_all(_LOOK_MS * 1e-3):
            self._watch.raise_if_failed()
        self._watch.all_are_ready()
        return ledger, ready

    def _check_alike(self, fingerprint: str) -> None:
        """Ranks on other machines may have another Quire, torch or copy of the model."""
        first = self.members[0]
        for hello in self.members:
            for what, theirs, ours, remedy in (
                ("Quire", hello.quire_version, __version__, "install the same version on every machine"),
                ("torch", hello.torch_version, first.torch_version, "install the same version on every machine"),
                ("the model's files", hello.fingerprint, fingerprint, "give every machine the same copy of the model"),
            ):
                if theirs != ours:
                    where = f"rank {hello.rank} on {hello.host} (process {hello.pid})"
                    raise RankError(f"{where} has other {what}: {theirs}, and here it is {ours}: {remedy}")

    def _from_all(self, kind: type[T]) -> list[T]:
        found: dict[int, T] = {message.rank: message for message in self._early if isinstance(message, kind)}
        while len(found) < self._num_ranks:
            message = self._receive()
            if kind is Hello and isinstance(message, Loaded):
                # What a rank has sent may arrive behind what others sent after they had met it.
                self._early.append(message)
                continue
            assert isinstance(message, kind), f"{message} where {kind.__name__} was expected"
            found[message.rank] = message
        return [found[rank] for rank in range(self._num_ranks)]

    # -- the executor's contract

    @property
    def depth(self) -> int:
        """Ranks go on to the next step without waiting for us; with stages, each has a step of its own. A draft has to
        know the token before it, so that drafts wait."""
        return self._num_stages if self._num_stages > 1 or self._has_drafts else 2

    @property
    def stores(self) -> list[SplitStore]:
        """Levels below the device that keep blocks, in every rank its part."""
        return self._split.stores

    def submit(self, plan: StepPlan) -> int:
        self.check()
        self._split.begin(plan.keyed_moves)
        self._to_ranks.tell(Run(plan, self._num_collected))
        self._submitted.append(plan)
        return plan.step

    def collect(self, ticket: int) -> StepResult:
        plan = self._submitted.popleft()
        assert plan.step == ticket, f"step {ticket} collected out of order"
        waited = ticket not in self._arrived
        while ticket not in self._arrived:
            self._take(self._receive())
        result = self._arrived.pop(ticket)
        self._num_collected += 1
        if waited:
            result.ended_s = time.perf_counter()
        if not plan.spans.rows:  # nobody runs: without waiting, the loop would spin until a move is over
            self._split.wait_a_moment()
        for moved, missing in self._split.take_finished():
            result.moved.append(moved)
            if missing:
                result.missing[moved] = missing
        return result

    def is_idle(self) -> bool:
        while self._results.poll(0):
            self._take(self._receive())
        return all(plan.step in self._arrived for plan in self._submitted)

    def has_time(self) -> bool:
        return False

    def prepare_more(self) -> bool:
        return False

    def check(self) -> None:
        """Raises if a rank has ended."""
        while self._watch.is_failing:
            self._watch.raise_if_failed()
            time.sleep(0.01)  # until it is known which one, and why

    def reset(self) -> None:
        """Forget every row and every step: the next plan may be another scheduler's first."""
        while self._submitted:
            self.collect(self._submitted[0].step)
        self._split.reset()
        self._to_ranks.tell(Reset())

    def uses(self) -> list[RankUse]:
        """How each rank has used its time, by its next heartbeat, which takes up to a second to come."""
        asked_s = time.monotonic()
        while any(use.seen_s <= asked_s for use in self._watch.uses):
            self.check()
            time.sleep(0.01)
        return list(self._watch.uses)

    def close(self) -> None:
        self._close()

    # -- sockets

    def _bind(self, kind: int, name: str, host: str | None) -> tuple[zmq.Socket[bytes], str]:
        bound = self._context.socket(kind)
        bound.setsockopt(zmq.RCVHWM, 0)
        bound.setsockopt(zmq.SNDHWM, 0)
        if host is None:
            address = self._folder.address(name)
            bound.bind(address)
            return bound, address
        assert self._keys is not None
        bound.curve_server = True
        bound.curve_publickey, bound.curve_secretkey = self._keys
        port = bound.bind_to_random_port(f"tcp://{host}")
        return bound, f"tcp://{host}:{port}"

    @property
    def server_key(self) -> str | None:
        return None if self._keys is None else self._keys[0].decode()

    @property
    def folder(self) -> str:
        return self._folder.path

    def _take(self, message: FromRank) -> None:
        assert isinstance(message, Result), f"{message} while running"
        self._arrived[message.result.step] = message.result

    def _receive(self) -> FromRank:
        """The next message that is no failure; those end the wait."""
        while True:
            self._wait(self._results)
            message = from_rank.decode(self._results.recv())
            if not isinstance(message, RankFailed):
                return message
            self._watch.report_error(message.rank, message.error)

    def _wait(self, bound: zmq.Socket[bytes]) -> None:
        while not bound.poll(_LOOK_MS):
            self._watch.raise_if_failed()


def _end(
    watch: RankWatch,
    hosts: Hosts,
    to_ranks: _ToRanks,
    results: zmq.Socket[bytes],
    context: zmq.Context[zmq.Socket[bytes]],
    folder: SocketFolder,
) -> None:
    """Also when nobody closed it: ranks would stay."""
    watch.close()
    with contextlib.suppress(zmq.ZMQError):
        to_ranks.tell(Stop())
    hosts.stop(_STOP_S)
    to_ranks.close()
    results.close(linger=0)
    end_context(context)
    folder.close()


def agreed(ledgers: list[MemoryLedger]) -> MemoryLedger:
    """The fewest blocks and the shortest sequences of any rank, in the ledger of the one with the most bytes."""
    num_blocks = min(ledger.num_blocks for ledger in ledgers)
    num_host_blocks = min(ledger.num_host_blocks for ledger in ledgers)
    largest = max(ledgers, key=lambda ledger: (ledger.block_bytes, ledger.weight_bytes))
    return replace(
        largest,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        kv_bytes=num_blocks * largest.block_bytes,
        swap_bytes=num_host_blocks * largest.block_bytes,
        max_model_len=min(ledger.max_model_len for ledger in ledgers),
        num_ranks=len(ledgers),
    )


def build_rank_executor(
    config: EngineConfig, opened: OpenedModel, grammars: GrammarCompiler | None = None
) -> BuiltExecutor:
    """Start the ranks of a split model, here or where Ray puts them, and wait until they are ready."""
    check_degrees(opened.spec, config.tensor_parallel_size, config.pipeline_parallel_size)
    started_s = time.perf_counter()
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if config.distributed_executor_backend == "ray":
        placed = RayRanks(config)
        executor = RankExecutor(config, placed, host=placed.host)
    else:
        executor = RankExecutor(config, LocalRanks(config.num_threads or max(1, num_cpus // num_ranks)))
    launches = [
        RankLaunch(
            config=config,
            rank=rank,
            local_rank=rank,
            num_ranks_on_host=num_ranks,
            place=None,
            plans_address=executor.plans_address,
            results_address=executor.results_address,
            beats_address=executor.beats_address,
            store=f"file:{executor.folder}/store",
            server_key=executor.server_key,
            log_level=get_logger().getEffectiveLevel() or logging.INFO,
            parent_pid=os.getpid(),
            dies_with_parent_thread=threading.current_thread() is threading.main_thread(),
        )
        for rank in range(num_ranks)
    ]
    try:
        ledger, ready = executor.start(launches, opened)
    except BaseException:
        executor.close()
        raise
    first = ready[0]
    degrees = {"tensor parallel": config.tensor_parallel_size, "stages": config.pipeline_parallel_size}
    shown = ", ".join(f"{name} {size}" for name, size in degrees.items() if size > 1)
    rates = [each.swap_bytes_per_s for each in ready if each.swap_bytes_per_s]
    return BuiltExecutor(
        executor=executor,
        backend=replace(first.backend, kernels=f"{first.backend.kernels}, {shown}"),
        ledger=ledger,
        max_num_seqs=first.max_num_seqs,
        max_num_batched_tokens=first.max_num_batched_tokens,
        swap_bytes_per_s=min(rates, default=None),
        timeline_s=ready[0].timeline_s | {"all ranks": time.perf_counter() - started_s},
        # Requests are checked here; the rank that samples compiles a grammar again.
        grammars=grammars or GrammarCompiler.of_model(config, opened.checkpoint, opened.spec),
        adapters=AdapterSlots.of(config, executor.adapters) if config.enable_lora else None,
    )


def _loopback() -> dict[str, str]:
    """gloo asks the machine's name which interface to use, and not every machine knows its own."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    return next(({"GLOO_SOCKET_IFNAME": name} for name in ("lo", "lo0") if name in names), {})
