"""A rank's own process: `python -m quire.executor.rank_process`, started by an engine whose model is split.

It reads what to load on standard input, meets the other ranks, loads its share, and runs plans until it is told to
stop or the engine is gone. Ray's actors host the same (`host_rank`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import platform
import signal
import socket
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import zmq

from quire import __version__
from quire.child import die_with_parent, log_to_parent, read_launch
from quire.errors import ErrorInfo, QuireError
from quire.executor.rank_adapters import AdapterReader
from quire.executor.rank_messages import (
    Allocate,
    Beat,
    FromRank,
    Hello,
    KeepAdapters,
    Loaded,
    Meet,
    PlaceAdapter,
    RankBackend,
    RankDevice,
    RankFailed,
    RankLaunch,
    ReadAdapter,
    Ready,
    Reset,
    Result,
    Run,
    Stop,
    ToRank,
    decode_launch,
    from_rank,
    to_rank,
)
from quire.log import get_logger
from quire.models.share import share_of
from quire.tiers.split import Expire, Forget, Told
from quire.tiers.teller import StoreTeller

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from quire.executor.rank_steps import RankSteps
    from quire.tiers.sealed import SealedStore

BEAT_S = 1.0
_LOOK_S = 30e-6
_SIOCGIFADDR = 0x8915
_T = TypeVar("_T", Meet, Allocate)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when ranks end
    faulthandler.enable()
    launch = decode_launch(read_launch(sys.stdin.buffer))
    log_to_parent(launch.log_level)
    die_with_parent(launch.parent_pid, with_its_thread=launch.dies_with_parent_thread)
    return host_rank(launch)


def host_rank(launch: RankLaunch) -> int:
    """Everything that a rank does, from its first word to its last."""
    link = _Link(launch)
    try:
        steps = _build(launch, link)
        _run(steps, link)
    except Exception as error:
        if not isinstance(error, QuireError | ConnectionError):
            get_logger().exception("rank %d stopped", launch.rank)
        link.send(RankFailed(getattr(error, "gone_rank", launch.rank), ErrorInfo.of(error)))
        return 1
    finally:
        link.close()
    return 0


class _Link:
    """The rank's ends of the sockets, and its heartbeat."""

    def __init__(self, launch: RankLaunch) -> None:
        self._launch = launch
        self._context = zmq.Context()
        self._plans = self._socket(zmq.SUB, launch.plans_address)
        self._plans.setsockopt(zmq.SUBSCRIBE, b"")
        self._results = self._socket(zmq.PUSH, launch.results_address)
        self.steps: RankSteps | None = None
        self.teller: StoreTeller | None = None
        self._telling: zmq.Socket[bytes] | None = None  # the teller's
        self._is_over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="quire-rank-beat", daemon=True)
        self._beating.start()

    def send(self, message: FromRank) -> None:
        self._results.send(from_rank.encode(message))

    def send_beside(self, message: FromRank) -> None:
        """Send from another thread than the one that runs the steps."""
        beside = self._socket(zmq.PUSH, self._launch.beats_address)
        beside.send(from_rank.encode(message))
        beside.close(linger=2000)

    def receive(self) -> ToRank:
        return to_rank.decode(self._plans.recv())

    def has_message(self) -> bool:
        return bool(self._plans.poll(0))

    def tell_of(self, stores: list[SealedStore]) -> StoreTeller | None:
        """Have the engine told what becomes of these, on a thread with a socket of its own."""
        if not stores:
            return None
        telling = self._telling = self._socket(zmq.PUSH, self._launch.beats_address)

        def send(told: Told) -> None:
            telling.send(from_rank.encode(told))

        self.teller = StoreTeller(self._launch.rank, stores, send)
        return self.teller

    def close(self) -> None:
        self._is_over.set()
        self._beating.join()
        if self.teller is not None and self._telling is not None:
            self.teller.close()
            self._telling.close(linger=0)
        self._plans.close(linger=0)
        self._results.close(linger=2000)
        self._context.term()

    def _beat(self) -> None:
        beats = self._socket(zmq.PUSH, self._launch.beats_address)
        while True:
            steps = self.steps
            numbers = (0, 0.0, 0.0) if steps is None else (steps.num_steps, steps.busy_s, steps.waiting_s)
            with contextlib.suppress(zmq.ZMQError):
                beats.send(from_rank.encode(Beat(self._launch.rank, *numbers)), zmq.NOBLOCK)
            if self._is_over.wait(BEAT_S):
                break
        beats.close(linger=0)

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.RCVHWM, 0)
        opened.setsockopt(zmq.SNDHWM, 0)
        if self._launch.server_key is not None:
            opened.curve_publickey, opened.curve_secretkey = zmq.curve_keypair()
            opened.curve_serverkey = self._launch.server_key.encode()
        opened.connect(address)
        return opened


def _build(launch: RankLaunch, link: _Link) -> RankSteps:
    """Load this rank's share, agree with the others on the number of blocks, and put the worker together."""
    import torch  # only now: the engine has heard from us

    from quire.executor.build import build_local, load_model, row_constraints
    from quire.executor.device import device_of_rank, ranks_per_gpu
    from quire.executor.rank_steps import RankSteps
    from quire.executor.timeline import Timeline
    from quire.grammar import GrammarCompiler
    from quire.kernels.cpu.threads import default_num_threads
    from quire.parallel.ranks import Ranks
    from quire.weights.model import open_model

    timeline = Timeline()
    device = device_of_rank(launch.config, launch.local_rank)
    config = launch.config.replace(device=str(device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif config.num_threads is None:
        config = config.replace(num_threads=max(1, default_num_threads() // launch.num_ranks_on_host))
    torch.set_num_threads(config.num_threads or 1)
    opened = open_model(config)
    tensor_size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    store, address = _open_store(launch)
    link.send(
        Hello(
            launch.rank,
            launch.place or platform.node(),
            os.getpid(),
            __version__,
            str(torch.__version__),
            opened.fingerprint(),
            address,
        )
    )
    if store is None:
        store = _join_store(_expect(link, Meet).store)
    shares = [share_of(opened.spec, rank, tensor_size, num_stages) for rank in range(tensor_size * num_stages)]
    widths = [len(share.words) for share in shares[:tensor_size]]
    ranks = Ranks(store, launch.rank, tensor_size, num_stages, widths, device, shares_gpu=ranks_per_gpu() > 1)
    timeline.mark("ranks")
    loaded = load_model(
        config,
        opened.spec,
        opened.checkpoint,
        share=shares[launch.rank],
        ranks=ranks,
        num_ranks_on_host=launch.num_ranks_on_host,
        timeline=timeline,
    )
    link.send(Loaded(launch.rank, loaded.ledger))
    allocate = _expect(link, Allocate)
    local = build_local(
        loaded,
        opened.checkpoint,
        allocate.ledger,
        whole_block_bytes=allocate.whole_block_bytes,
        num_ranks_on_host=launch.num_ranks_on_host,
    )
    worker, backend, kv_dtype = local.worker, loaded.backend, str(loaded.backend.kv_dtype).removeprefix("torch.")
    link.send(
        Ready(
            launch.rank,
            RankBackend(RankDevice(backend.device.type), backend.weight_dtype, kv_dtype, backend.kernels, backend.note),
            loaded.max_num_seqs,
            loaded.max_num_batched_tokens,
            worker.cache.measure_swap_rate(),
            timeline.seconds,
        )
    )
    if ranks.samples:
        grammars = GrammarCompiler.of_model(config, opened.checkpoint, opened.spec)
        worker.constraints = row_constraints(grammars, beside_gpu=worker.is_gpu)
    reader = None
    if worker.adapters is not None:
        begin_thread = partial(torch.cuda.set_device, device) if worker.is_gpu else None
        reader = AdapterReader(launch.rank, worker.adapters, link.send_beside, begin_thread)
    return RankSteps(
        local,
        ranks,
        lag=num_stages,
        single_threaded_torch=backend.is_native_cpu,
        adapters=reader,
        teller=link.tell_of(local.stores),
    )


def _run(steps: RankSteps, link: _Link) -> None:
    """The next step is submitted while one runs, and results go out as they come."""
    link.steps = steps
    while True:
        if steps.has_result or steps.num_submitted >= 2:
            link.send(Result(steps.collect()))
            continue
        if steps.num_submitted and not link.has_message():
            time.sleep(_LOOK_S)  # at both
            continue
        match link.receive():
            case Run(plan, num_collected):
                steps.submit(plan, num_collected)
            case Forget() | Expire() as order:
                steps.carry_out(order)
            case Reset():
                steps.reset()
            case (ReadAdapter() | KeepAdapters() | PlaceAdapter()) as told if steps.adapters is not None:
                steps.adapters.handle(told)
            case Stop():
                steps.close()
                return
            case other:
                raise AssertionError(f"{other} while running")


def _open_store(launch: RankLaunch) -> tuple[Store | None, str | None]:
    """A store in a file, which all ranks of one machine open; over TCP the first opens one and says where."""
    from torch._C._distributed_c10d import FileStore, TCPStore

    kind, _, place = launch.store.partition(":")
    num_ranks = launch.config.tensor_parallel_size * launch.config.pipeline_parallel_size
    if kind == "file":
        return FileStore(place, num_ranks), None
    if launch.rank:
        return None, None
    store = TCPStore(place, 0, num_ranks, is_master=True, wait_for_workers=False)
    return store, f"{place}:{store.port}"


def _join_store(address: str) -> Store:
    from torch._C._distributed_c10d import TCPStore

    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False)


def use_interface_of(address: str) -> None:
    """Have gloo talk over the interface that has this address: a machine's name may lead to another, or nowhere."""
    if "GLOO_SOCKET_IFNAME" in os.environ or sys.platform != "linux":
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(256, b"\0"))
                if socket.inet_ntoa(found[20:24]) == address:
                    os.environ["GLOO_SOCKET_IFNAME"] = name
                    return


def _expect(link: _Link, kind: type[_T]) -> _T:
    """The next message, which can be no other."""
    while True:
        message = link.receive()
        if isinstance(message, kind):
            return message
        if isinstance(message, Stop):
            raise SystemExit(0)
        assert isinstance(message, Meet), f"{message} where {kind.__name__} was expected"  # it is for the others


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # gloo would wait for what was sent and nobody will read: the tokens of the last step
