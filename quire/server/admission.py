"""Admission: how much may wait for its first output, and who is told to come back later.

Over a cap a request is refused with a 429 before the engine hears of it: what waits takes memory, and an operator may
know how long his clients are willing to wait. `Retry-After` is how long what waits now will take at the rate at which
waiting requests were served of late, while there were enough of them to fill a batch: with fewer, that rate is how fast
requests come, not how fast they go.

A request waits from its admission to its first output. An answer that is not streamed gives its first output when it
is done, though, so the engine's own count of waiting requests bounds ours from above.

With several keys a cap is shared: when it is reached, a key that has less than its equal share waiting may still
enter, so one key's flood does not shut out another. That makes at most twice the cap.

While memory is short the engine reports a brownout level. At 2, new requests may generate at most
`brownout_max_tokens`, which the response header `x-quire-max-tokens` tells; at 3 none are taken.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from quire.engine.api import PreparedRequest, ServingEngine
from quire.server.errors import ApiError
from quire.server.settings import ServerSettings

MAX_TOKENS_HEADER = "x-quire-max-tokens"
_MAX_RETRY_AFTER_S = 120
_RATE_MEMORY_S = 15.0  # counts time in which a crowd waited
_UNKNOWN_RETRY_AFTER_S = 5
_REPORT_SLACK_S = 0.5  # what was admitted this long before an engine's report is surely in it
# About what a waiting request costs in this process and the engine's: a connection with its buffers, token ids twice.
_WAITING_REQUEST_BYTES = 64 << 10
_WAITING_TOKEN_BYTES = 128
_SHORTER_ANSWERS = 2  # EngineLoad.brownout_level
_NONE_TAKEN = 3


class OverloadedError(ApiError):
    """Too much waits. `reason` is for the metrics: waiting_requests, waiting_tokens or brownout."""

    def __init__(self, message: str, *, reason: str, retry_after_s: int) -> None:
        super().__init__(
            429,
            f"{message}: try again in {retry_after_s} s",
            type="overloaded",
            code=reason,
            headers={"retry-after": str(retry_after_s)},
        )
        self.reason = reason
        self.retry_after_s = retry_after_s


class Ticket:
    """One admitted request. Its response gets `headers`."""

    __slots__ = ("_admission", "_is_waiting", "headers", "num_tokens", "tenant")

    def __init__(self, admission: Admission, tenant: str, num_tokens: int) -> None:
        self._admission = admission
        self._is_waiting = True
        self.tenant = tenant
        self.num_tokens = num_tokens
        self.headers: dict[str, str] = {}

    def started(self) -> None:
        """Its first output is here: it waits no more. Calling again does nothing."""
        self.stop_waiting(was_served=True)

    def stop_waiting(self, *, was_served: bool) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._admission._stop_waiting(self, was_served=was_served)


class _Rate:
    """Served requests and tokens per second, over the last seconds in which a crowd waited.

    Other time does not count: a quiet hour says nothing about how fast the next ones will be served.
    """

    __slots__ = ("_busy_s", "_num_requests", "_num_tokens")

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._num_requests = 0.0
        self._num_tokens = 0.0

    def passed(self, busy_s: float) -> None:
        decay = math.exp(-busy_s / _RATE_MEMORY_S)
        self._busy_s = self._busy_s * decay + busy_s
        self._num_requests *= decay
        self._num_tokens *= decay

    def served(self, num_tokens: int) -> None:
        self._num_requests += 1
        self._num_tokens += num_tokens

    def seconds_for(self, num_requests: int, num_tokens: int) -> float | None:
        """How long so much takes to be served; None where no crowd was served yet."""
        if not self._num_requests:
            return None
        return self._busy_s * max(num_requests / self._num_requests, num_tokens / max(self._num_tokens, 1.0))


class Admission:
    """Counts what waits, by tenant. Belongs to the event loop's thread."""

    def __init__(
        self, engine: ServingEngine, settings: ServerSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._clock = clock
        self._rate = _Rate()
        self._last_s = clock()
        self._requests: Counter[str] = Counter()  # waiting, by tenant; without zeros
        self._tokens: Counter[str] = Counter()
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self._caps: tuple[int, int] | None = None
        self._report = engine.load()
        self._unreported: deque[tuple[float, int]] = deque()  # admitted since the engine's last report: when, tokens
        self._num_unreported_tokens = 0

    @property
    def caps(self) -> tuple[int, int]:
        """Requests and tokens that may wait; those that the operator did not set come from the machine's memory."""
        if self._caps is None:
            self._caps = _caps(self._settings)
        return self._caps

    def admit(self, prepared: Sequence[PreparedRequest], tenant: str = "") -> list[Ticket]:
        """Admit all of these requests, or raise OverloadedError and admit none. The caller calls `stop_waiting` of
        every ticket, however its request ends."""
        self._tick()
        level = self._engine.load().brownout_level if self._settings.brownout else 0
        if level >= _NONE_TAKEN:
            raise self._overloaded("the server is short of memory and takes no new requests", "brownout")
        self._check_caps(tenant, len(prepared), sum(one.num_prompt_tokens for one in prepared))
        return [self._take(one, tenant, level) for one in prepared]

    def _take(self, prepared: PreparedRequest, tenant: str, level: int) -> Ticket:
        num_tokens = prepared.num_prompt_tokens
        ticket = Ticket(self, tenant, num_tokens)
        if level >= _SHORTER_ANSWERS and prepared.request.max_tokens > self._settings.brownout_max_tokens:
            prepared.request.max_tokens = self._settings.brownout_max_tokens
            ticket.headers[MAX_TOKENS_HEADER] = str(self._settings.brownout_max_tokens)
        self._requests[tenant] += 1
        self._tokens[tenant] += num_tokens
        self.num_waiting += 1
        self.num_waiting_tokens += num_tokens
        self._unreported.append((self._last_s, num_tokens))
        self._num_unreported_tokens += num_tokens
        return ticket

    def _check_caps(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        if not self.num_waiting:  # a request that is over a cap by itself must be served too, once nothing else waits
            self._unreported.clear()
            self._num_unreported_tokens = 0
            return
        max_requests, max_tokens = self.caps
        num_waiting, num_waiting_tokens = self._really_waiting()
        num_tenants = len(self._requests.keys() | {tenant})
        wanted = (
            ("requests", num_waiting + num_requests, self._requests[tenant] + num_requests, max_requests),
            ("tokens", num_waiting_tokens + num_tokens, self._tokens[tenant] + num_tokens, max_tokens),
        )
        for what, total, own, cap in wanted:
            if total > 2 * cap or (total > cap and own > cap / num_tenants):
                message = f"{total} {what} would wait, more than the {cap} that may"
                raise self._overloaded(message, f"waiting_{what}")

    def _really_waiting(self) -> tuple[int, int]:
        """Requests and tokens: ours, less what the engine's last report tells to be running."""
        report = self._engine.load()
        if report is not self._report:
            self._report = report
            while self._unreported and self._unreported[0][0] < self._last_s - _REPORT_SLACK_S:
                self._num_unreported_tokens -= self._unreported.popleft()[1]
        return (
            min(self.num_waiting, report.num_waiting + len(self._unreported)),
            min(self.num_waiting_tokens, report.num_waiting_tokens + self._num_unreported_tokens),
        )

    def _overloaded(self, message: str, reason: str) -> OverloadedError:
        seconds = self._rate.seconds_for(self.num_waiting, self.num_waiting_tokens)
        if seconds is None:
            retry_after_s = _UNKNOWN_RETRY_AFTER_S
        else:
            retry_after_s = min(max(math.ceil(seconds), 1), _MAX_RETRY_AFTER_S)
        return OverloadedError(message, reason=reason, retry_after_s=retry_after_s)

    def _stop_waiting(self, ticket: Ticket, *, was_served: bool) -> None:
        self._tick()
        if was_served and self._is_crowded:
            self._rate.served(ticket.num_tokens)
        self.num_waiting -= 1
        self.num_waiting_tokens -= ticket.num_tokens
        for counts, number in ((self._requests, 1), (self._tokens, ticket.num_tokens)):
            counts[ticket.tenant] -= number
            if not counts[ticket.tenant]:
                del counts[ticket.tenant]

    def _tick(self) -> None:
        now_s = self._clock()
        if self._is_crowded:
            self._rate.passed(now_s - self._last_s)
        self._last_s = now_s

    @property
    def _is_crowded(self) -> bool:
        """Whether what waits keeps the engine busy. A cap may be lower than a batch, and full of few long prompts."""
        if not self.num_waiting:
            return False  # and the caps may not be known: nothing has come yet
        max_requests, max_tokens = self.caps
        enough = min(self._engine.info.max_num_seqs, max_requests / 2)
        return self.num_waiting >= enough or self.num_waiting_tokens >= max_tokens / 2


def _caps(settings: ServerSettings) -> tuple[int, int]:
    """How many may wait: by default as many as an eighth of the memory holds. So a client that sends a thousand prompts
    at once is answered a thousand times, as by other servers, and none can fill the machine."""
    memory = _memory_bytes() // 8
    requests = settings.max_waiting_requests or max(memory // _WAITING_REQUEST_BYTES, 1_000)
    tokens = settings.max_waiting_tokens or max(memory // _WAITING_TOKEN_BYTES, 1_000_000)
    return requests, tokens


def _memory_bytes() -> int:
    """The memory of the machine, or of the container where that has less."""
    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        num_bytes = min(num_bytes, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return num_bytes
