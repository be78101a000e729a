"""What the server's process and the engine's process tell each other, in msgpack.

A request goes by a number that the server's side chose, its key. Its n sequences go by that key, key + 1 and so on. So
a step's news is two columns of small integers, and everything that happens once in a sequence's life stands apart.

Both processes are on one machine: times are those of the one monotonic clock.
"""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import msgspec

from quire import errors
from quire.config import EngineConfig
from quire.engine.api import EngineInfo, EngineLoad
from quire.engine.brownout import BrownoutSettings
from quire.errors import BadRequestError, QuireError
from quire.params import SamplingParams, SamplingSpec
from quire.plan import TokenLogprobs
from quire.request import Request


class ErrorInfo(msgspec.Struct, array_like=True, frozen=True):
    """An error on its way to the other process."""

    kind: str  # a class of quire.errors by name; anything else arrives as a plain QuireError
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        if isinstance(error, QuireError):
            return cls(type(error).__name__, str(error), getattr(error, "param", None))
        return cls("", f"{type(error).__name__}: {error}")

    def to_error(self) -> QuireError:
        kind: type[QuireError] = getattr(errors, self.kind, QuireError) if self.kind else QuireError
        assert issubclass(kind, QuireError)
        if issubclass(kind, BadRequestError):
            return kind(self.message, param=self.param)
        return kind(self.message)


# -- to the engine


class Launch(msgspec.Struct, frozen=True):
    """The first thing that an engine's process reads, on its standard input. When that ends, its parent is gone."""

    config: EngineConfig
    outputs_address: str  # where the parent listens
    commands_address: str  # where the engine shall listen
    parent_pid: int
    dies_with_parent_thread: bool  # the thread that started it is there as long as the parent is
    step_timeout_s: float
    heartbeat_s: float
    dump_dir: str
    log_level: int
    brownout: BrownoutSettings


class Add(msgspec.Struct, array_like=True, tag=1, frozen=True):
    key: int
    request_id: str
    prompt_token_ids: list[int]
    spec: SamplingSpec  # of the first sequence; the others' differ in their index
    allowed_token_ids: bytes | None  # the spec's, four bytes each: they may be a whole vocabulary
    n: int
    max_tokens: int
    end_token_ids: list[int]
    eos_token_ids: list[int]
    priority: int
    arrival_s: float
    salt: str | None
    adapter: str | None
    tenant: str
    skip_prefix_cache_read: bool

    @classmethod
    def of(cls, request: Request, key: int) -> Add:
        spec = request.specs[0]
        allowed = spec.allowed_token_ids
        return cls(
            key=key,
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            spec=dataclasses.replace(spec, allowed_token_ids=None) if allowed is not None else spec,
            allowed_token_ids=None if allowed is None else array("i", allowed).tobytes(),
            n=request.params.n,
            max_tokens=request.max_tokens,
            end_token_ids=list(request.end_token_ids),
            eos_token_ids=list(request.eos_token_ids),
            priority=request.priority,
            arrival_s=request.arrival_s,
            salt=request.salt,
            adapter=request.adapter,
            tenant=request.tenant,
            skip_prefix_cache_read=request.skip_prefix_cache_read,
        )

    def to_request(self) -> Request:
        """As the scheduler needs it: of the parameters, only what it reads."""
        spec = self.spec
        if self.allowed_token_ids is not None:
            spec = dataclasses.replace(spec, allowed_token_ids=array("i", self.allowed_token_ids))
        rest = [dataclasses.replace(spec, index=i, prompt_logprobs=None) for i in range(1, self.n)]
        return Request(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            params=SamplingParams(
                n=self.n, max_tokens=None, min_tokens=spec.min_tokens, prompt_logprobs=spec.prompt_logprobs
            ),
            max_tokens=self.max_tokens,
            end_token_ids=frozenset(self.end_token_ids),
            eos_token_ids=frozenset(self.eos_token_ids),
            specs=[spec, *rest],
            priority=self.priority,
            arrival_s=self.arrival_s,
            salt=self.salt,
            adapter=self.adapter,
            tenant=self.tenant,
            skip_prefix_cache_read=self.skip_prefix_cache_read,
        )


class Abort(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Nobody reads the request any more."""

    key: int


class Finish(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """A stop string was found in the text of one sequence."""

    key: int  # the request's
    index: int
    stop: str


class Call(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """Run a named inspection between two steps."""

    call_id: int
    name: str
    arguments: dict[str, Any]


class Stop(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """End the process."""


Command = Add | Abort | Finish | Call | Stop


# -- from the engine


class Hello(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """The engine's process listens for commands; it is not ready yet."""


class Ready(msgspec.Struct, array_like=True, tag=2, frozen=True):
    info: EngineInfo


class Failed(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """It could not start, or a step failed. It exits after this."""

    error: ErrorInfo


class Refused(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """The scheduler does not take a request."""

    key: int
    error: ErrorInfo


class Started(msgspec.Struct, array_like=True, frozen=True):
    """The first news of a sequence."""

    key: int
    index: int  # among its request's: the request's key is key - index
    first_scheduled_s: float | None
    num_cached_tokens: int
    cache_outcome: str | None


class Preempted(msgspec.Struct, array_like=True, frozen=True):
    """A sequence that lost its blocks at least once, whenever one of its counts has changed."""

    key: int
    num_preemptions: int
    num_recomputed_tokens: int


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    key: int
    of_tokens: list[TokenLogprobs] | None  # one per new token in this step
    of_prompt: list[TokenLogprobs] | None  # the next ones of the prompt


class Ended(msgspec.Struct, array_like=True, frozen=True):
    key: int
    reason: str
    stop_reason: int | str | None
    error: str | None


class StepNews(msgspec.Struct, array_like=True, tag=5):
    """What a step brought. tokens[i] is the next token of sequence keys[i]."""

    now_s: float
    keys: list[int]
    tokens: list[int]
    started: list[Started]
    preempted: list[Preempted]
    logprobs: list[Logprobs]
    ended: list[Ended]


class LoadReport(msgspec.Struct, array_like=True, tag=6, frozen=True):
    load: EngineLoad


class Heartbeat(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """From a thread beside the loop: says whether the loop gets on."""

    now_s: float
    num_steps: int
    step_started_s: float | None  # None: no step runs
    dump_path: str | None  # what the watchdog wrote about the step that runs


class CallDone(msgspec.Struct, array_like=True, tag=8, frozen=True):
    call_id: int
    value: Any


class CallFailed(msgspec.Struct, array_like=True, tag=9, frozen=True):
    call_id: int
    error: ErrorInfo


News = Hello | Ready | Failed | Refused | StepNews | LoadReport | Heartbeat | CallDone | CallFailed

encode = msgspec.msgpack.Encoder().encode
decode_launch = msgspec.msgpack.Decoder(Launch).decode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_news = msgspec.msgpack.Decoder(News).decode
