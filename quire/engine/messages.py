"""What an engine and those who use it from another thread or process tell each other. `link.py` makes bytes of it.

A request goes by a number that its sender chose, its key. Its n sequences go by that key, key + 1 and so on. So what a
step brings is two columns of small integers, and everything that happens once in a sequence's life stands apart.

All of them are on one machine: times are those of the one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.config import EngineConfig
from quire.engine.api import EngineInfo, EngineLoad
from quire.engine.launch import EngineProcessOptions
from quire.errors import ErrorInfo as ErrorInfo
from quire.plan import TokenLogprobs
from quire.pooling import Pooled
from quire.request import Request


@dataclass(slots=True, frozen=True, kw_only=True)
class Launch:
    """The first thing that an engine's process reads, on its standard input. When that ends, its parent is gone."""

    config: EngineConfig
    link: int  # the descriptor of its end of the connection (`link.py`)
    parent_pid: int
    dies_with_parent_thread: bool  # the thread that started it is there as long as the parent is
    log_level: int
    options: EngineProcessOptions


# -- to the engine


@dataclass(slots=True, frozen=True)
class Add:
    key: int
    request: Request  # as it was made: nothing has scheduled it yet
    # The `to` and `num_known` of a `Send`, which might come too late for the request's first step if sent after this.
    blocks_to: tuple[str, int] | None = None


@dataclass(slots=True, frozen=True)
class Abort:
    """End a request. Its reader hears of the end, if there still is one."""

    key: int


@dataclass(slots=True, frozen=True)
class Finish:
    """A stop string was found in the text of one sequence."""

    key: int  # the request's
    index: int
    stop: str


@dataclass(slots=True, frozen=True)
class Call:
    """Run a named inspection between two steps."""

    call_id: int
    name: str
    arguments: dict[str, Any]


@dataclass(slots=True, frozen=True)
class Stop:
    """End the loop."""


@dataclass(slots=True, frozen=True)
class Send:
    """Give a request's full blocks to another engine, from now on while it runs."""

    key: int
    to: str | None  # its EngineInfo.kv_address; None: no longer
    num_known: int = 0  # leading blocks that it has already


@dataclass(slots=True, frozen=True)
class Fetch:
    """Load what there is of a prefix below the device into its cache: a request with it is about to come."""

    fetch_id: int
    token_ids: list[int]
    salt: str | None
    adapter: str | None


Command = Add | Abort | Finish | Call | Stop | Send | Fetch


# -- from the engine


@dataclass(slots=True, frozen=True)
class Ready:
    info: EngineInfo


@dataclass(slots=True, frozen=True)
class Failed:
    """It could not start, or a step failed. It exits after this."""

    error: ErrorInfo


@dataclass(slots=True, frozen=True)
class Refused:
    """The scheduler does not take a request."""

    key: int
    error: ErrorInfo


@dataclass(slots=True, frozen=True)
class Started:
    """Sent once for each sequence, with its first output."""

    key: int
    index: int  # among its request's: the request's key is key - index
    first_scheduled_s: float | None
    num_cached_tokens: int
    cache_outcome: str | None


@dataclass(slots=True, frozen=True)
class Preempted:
    """A sequence that lost its blocks at least once, whenever one of its counts has changed."""

    key: int
    num_preemptions: int
    num_recomputed_tokens: int


@dataclass(slots=True, frozen=True)
class Logprobs:
    key: int
    of_tokens: list[TokenLogprobs] | None  # one per new token in this step
    of_prompt: list[TokenLogprobs] | None  # the next ones of the prompt


@dataclass(slots=True, frozen=True)
class PooledResult:
    """The vectors of a sequence that ends in the same message."""

    key: int
    pooled: Pooled


@dataclass(slots=True, frozen=True)
class Ended:
    key: int
    reason: str
    stop_reason: int | str | None
    error: str | None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class StepOutputs:
    """The outputs of a step. tokens[i] is the next token of sequence keys[i]."""

    now_s: float
    keys: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    pooled: list[PooledResult] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class LoadReport:
    load: EngineLoad


@dataclass(slots=True, frozen=True)
class CacheReport:
    """Hashes that the prefix cache gained and lost. Comes before the outputs of the step that changed it."""

    filled: list[bytes]
    evicted: list[bytes]
    is_snapshot: bool = False  # `filled` is everything: too much changed to be told one by one


@dataclass(slots=True, frozen=True)
class Heartbeat:
    """Says whether the loop gets on. A thread beside the loop sends it."""

    now_s: float
    num_steps: int
    step_started_s: float | None  # None: no step runs
    dump_path: str | None  # what the watchdog wrote about the step that runs


@dataclass(slots=True, frozen=True)
class CallDone:
    call_id: int
    value: Any


@dataclass(slots=True, frozen=True)
class CallFailed:
    call_id: int
    error: ErrorInfo


@dataclass(slots=True, frozen=True)
class Sent:
    """Blocks of a request have arrived at another engine."""

    key: int
    num_tokens: int  # that they hold, counted from the first
    has_failed: bool  # nothing more is sent


@dataclass(slots=True, frozen=True)
class Fetched:
    fetch_id: int
    num_tokens: int  # of the prefix that the device's cache has


EngineMessage = (
    Ready
    | Failed
    | Refused
    | StepOutputs
    | LoadReport
    | CacheReport
    | Heartbeat
    | CallDone
    | CallFailed
    | Sent
    | Fetched
)
