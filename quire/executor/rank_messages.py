"""What an engine and the ranks of its model tell each other. Plans go to all ranks at once; the rank that samples
answers. All of it is plain data in msgpack: nothing is pickled."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.config import EngineConfig
from quire.errors import ErrorInfo
from quire.executor.adapter_slots import AdapterInfo
from quire.executor.memory import MemoryLedger
from quire.plan import StepPlan, StepResult
from quire.tiers.split import Expire, Forget, Told
from quire.wire import Codec, encoder


@dataclass(slots=True, frozen=True, kw_only=True)
class RankLaunch:
    """The first thing that a rank reads."""

    config: EngineConfig
    rank: int
    local_rank: int  # among those of its machine that see the same GPUs
    num_ranks_on_host: int
    place: str | None  # what to call the machine, where its name does not say enough
    plans_address: str  # where the engine listens, and sends to all
    results_address: str
    beats_address: str
    store: str  # where ranks find each other: file:PATH, or tcp: for one that the first of them opens
    server_key: str | None  # of sockets that leave the machine: a peer that has it may connect
    log_level: int
    parent_pid: int
    dies_with_parent_thread: bool


# -- to the ranks


@dataclass(slots=True, frozen=True)
class Meet:
    """Where the first rank's store listens."""

    store: str


@dataclass(slots=True, frozen=True)
class Allocate:
    """The ledger that all ranks can keep: the fewest blocks of any."""

    ledger: MemoryLedger
    whole_block_bytes: int  # of all ranks' parts together


@dataclass(slots=True, frozen=True)
class Run:
    plan: StepPlan
    num_collected: int  # steps whose results the scheduler knew when it planned this one


@dataclass(slots=True, frozen=True)
class Reset:
    """Forget every row."""


@dataclass(slots=True, frozen=True)
class ReadAdapter:
    """Read an adapter beside the steps, keep this rank's part of it on the host, and say what came of it."""

    number: int
    name: str
    path: str


@dataclass(slots=True, frozen=True)
class KeepAdapters:
    """Keep these of the adapters that were read on the host, and no others."""

    keys: list[str]


@dataclass(slots=True, frozen=True)
class PlaceAdapter:
    """Copy one that is kept into a slot, where later plans find it."""

    key: str
    slot: int


@dataclass(slots=True, frozen=True)
class Stop:
    pass


# -- to the engine


@dataclass(slots=True, frozen=True)
class Hello:
    """A rank is there. What has to be the same everywhere stands in it."""

    rank: int
    host: str
    pid: int
    quire_version: str
    torch_version: str
    fingerprint: str  # of the model that it opened
    store: str | None = None  # of the first rank, where ranks meet over TCP


@dataclass(slots=True, frozen=True)
class Loaded:
    """A rank has its weights; `ledger` is what it could keep."""

    rank: int
    ledger: MemoryLedger


@dataclass(slots=True, frozen=True)
class RankDevice:
    """What stands for a device of another process."""

    type: str


@dataclass(slots=True, frozen=True)
class RankBackend:
    """Where and with what a split model runs, as its ranks tell."""

    device: RankDevice
    weight_dtype: str
    kv_dtype: str
    kernels: str
    note: str | None
    serves_determinism: bool = False

    @property
    def shown_weights(self) -> str:
        return self.weight_dtype


@dataclass(slots=True, frozen=True)
class Ready:
    rank: int
    backend: RankBackend
    max_num_seqs: int
    max_num_batched_tokens: int
    swap_bytes_per_s: float | None
    timeline_s: dict[str, float]


@dataclass(slots=True, frozen=True)
class Result:
    result: StepResult


@dataclass(slots=True, frozen=True)
class RankFailed:
    rank: int
    error: ErrorInfo


@dataclass(slots=True, frozen=True)
class Beat:
    """Sent every so often from a thread of its own. A process that is stopped sends none."""

    rank: int
    num_steps: int
    busy_s: float  # computing, since its start
    waiting_s: float  # for another stage's hidden states or tokens, inside steps


@dataclass(slots=True, frozen=True)
class AdapterRead:
    """The answer to a ReadAdapter. Sent where heartbeats go, by the thread that has read the adapter."""

    rank: int
    number: int
    info: AdapterInfo | None  # None: it cannot be served
    error: ErrorInfo | None = None


ToRank = Meet | Allocate | Run | Forget | Expire | Reset | ReadAdapter | KeepAdapters | PlaceAdapter | Stop
FromRank = Hello | Loaded | Ready | Result | RankFailed | Beat | AdapterRead | Told

to_rank: Codec[ToRank] = Codec(ToRank)
from_rank: Codec[FromRank] = Codec(FromRank)
encode_launch = encoder.encode
decode_launch = msgspec.msgpack.Decoder(RankLaunch).decode
