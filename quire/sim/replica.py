"""One engine in virtual time: the real scheduler and block manager, and a cost model where the device would be.

Whenever anything happens (a request comes or ends, a prompt is computed, blocks run out), the step goes through
`schedule()` and `update()` as in an engine. Between such steps every sequence only gets its next token, and nothing
is decided: those stretches are passed in one leap, which grows the same blocks and takes the same time.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from quire.errors import BadRequestError
from quire.kv import UNCHANGED, KVManager
from quire.plan import StepPlan, StepResult, StepTimings
from quire.request import Request, Sequence
from quire.scheduler import Scheduler, SchedulerConfig
from quire.scheduler.traffic import FetchReport
from quire.sim.cost import SimClock, StepCost
from quire.step_costs import PlanLoads, StepKind, StepLoad

_MOVE_S = 1e-3  # that an engine with nothing to run waits for blocks
_LEAP_POINTS = 4  # inter-token times kept of a leap, during which they grow evenly


@dataclass(slots=True, frozen=True, kw_only=True)
class ReplicaConfig:
    """What an engine is made of, apart from its cost."""

    num_blocks: int
    block_size: int
    scheduler: SchedulerConfig
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    windows: tuple[int | None, ...] = (None,)
    # For an engine whose tokens are read as they come: prompt tokens beside so many decodes, or seconds of a step.
    smooth_tokens: Callable[[int], int] | None = None
    target_step_s: float | None = None
    # A step is planned so long before it begins: requests that come later are in the one after it.
    lead_s: float = 0.0
    # A first token, which is sent before the others of its step, keeps those waiting for so long on their way.
    first_token_s: float = 0.0
    can_leap: bool = True
    has_peers: bool = False  # others send it blocks


@dataclass(slots=True)
class TokenTimes:
    """What clients saw, of all replicas together. Times between tokens are values with weights."""

    first_s: array[float] = field(default_factory=lambda: array("d"))
    whole_s: array[float] = field(default_factory=lambda: array("d"))
    between_s: array[float] = field(default_factory=lambda: array("d"))
    between_counts: array[float] = field(default_factory=lambda: array("d"))
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    def forget(self) -> None:
        """Begin anew: what came before was the way to a steady state."""
        for times in (self.first_s, self.whole_s, self.between_s, self.between_counts):
            del times[:]
        self.num_output_tokens = self.num_prompt_tokens = 0

    def add(self, other: TokenTimes) -> None:
        """Add what the clients of another run saw."""
        self.first_s += other.first_s
        self.whole_s += other.whole_s
        self.between_s += other.between_s
        self.between_counts += other.between_counts
        self.num_output_tokens += other.num_output_tokens
        self.num_prompt_tokens += other.num_prompt_tokens

    def between(self, seconds: float, count: float) -> None:
        self.between_s.append(seconds)
        self.between_counts.append(count)


@dataclass(slots=True)
class _Leap:
    """`num_steps` steps of the same sequences, each `slope_s` longer than the one before."""

    start_s: float
    num_seqs: int
    first_s: float
    slope_s: float
    num_steps: int

    def end_s(self, num_steps: int) -> float:
        return self.start_s + num_steps * self.first_s + self.slope_s * num_steps * (num_steps - 1) / 2

    def stop_after(self, then_s: float) -> None:
        """End with the first step that ends no sooner than this."""
        low, high = 1, self.num_steps
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.end_s(middle) >= then_s else (middle + 1, high)
        self.num_steps = low


class _PeerBlocks:
    """The store of blocks that other replicas have sent, by hash. They take no time to load."""

    name = "peers"
    takes_all = False

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def contains(self, key: bytes) -> bool:
        return key in self.keys

    def load_s(self, num_blocks: int) -> float:
        return 0.0

    def forget(self, keys: Collection[bytes]) -> None:
        self.keys.difference_update(keys)

    def expire(self, older_than_s: float, done: Callable[[int], None]) -> None:
        done(0)

    def usage(self) -> dict[str, float]:
        return {"num_blocks": len(self.keys)}


class Replica:
    """Driven by events: `add` a request, and `advance` when `due_s` has come."""

    def __init__(self, config: ReplicaConfig, cost: StepCost, times: TokenTimes) -> None:
        self.config = config
        self.cost = cost
        self.clock = SimClock()
        self._peers = _PeerBlocks()
        self.kv = KVManager(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            stores=(self._peers,) if config.has_peers else (),
            windows=config.windows,
            max_span_tokens=config.scheduler.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            watermark=config.watermark,
            clock=self.clock,
        )
        self.scheduler = Scheduler(config.scheduler, self.kv, clock=self.clock)
        if config.smooth_tokens is not None:
            self.scheduler.smooth_steps(config.smooth_tokens)
        if config.target_step_s is not None:
            self.scheduler.set_target_step(config.target_step_s)
        self.due_s: float | None = None  # when the step that runs ends
        self.busy_s = 0.0
        self.block_seconds = 0.0  # blocks in use times seconds
        self.num_events = 0  # steps that were scheduled, and leaps
        self.on_first_token: Callable[[Request], None] = lambda request: None
        self.on_end: Callable[[Request], None] = lambda request: None
        self.on_fetched: Callable[[FetchReport, float], None] | None = None
        self._leaving: list[tuple[Request, Leave, Callable[[], None]]] = []
        self._came_s: dict[str, float] = {}  # by request_id, of those that began elsewhere: their last token
        self._times = times
        self._inbox: deque[tuple[float, Request]] = deque()
        self._begun_s = 0.0
        self._is_waking = False
        self._held_up_s = 0.0  # how late the tokens of the last step were
        self._step: StepPlan | None = None
        self._leap: _Leap | None = None
        self._loads = PlanLoads()
        self._last_token_s: dict[int, float] = {}  # by seq_id

    @property
    def num_requests(self) -> int:
        """Requests under way here."""
        return len(self.scheduler.requests) + len(self._inbox)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of requests that no step has begun with."""
        return self.scheduler.num_waiting_tokens + sum(request.num_prompt_tokens for _, request in self._inbox)

    def add(self, request: Request, now_s: float, *, last_token_s: float | None = None) -> None:
        """The request reaches the engine. Times may not go back. last_token_s: it began elsewhere."""
        self._inbox.append((now_s, request))
        if last_token_s is not None:
            self._came_s[request.request_id] = last_token_s
        self._disturb(now_s)

    def fetch(self, number: int, token_ids: list[int], keys: list[bytes], now_s: float) -> None:
        """Blocks have come from another replica: they are loaded into the cache, and `on_fetched` is told."""
        self._peers.keys.update(keys)
        self.scheduler.traffic.fetch(number, token_ids, None, None)
        self._disturb(now_s)

    def release(self, request: Request, leave: Leave, stay: Callable[[], None], now_s: float) -> None:
        """Give a request away after the step that runs; `stay` is called where it has ended by then."""
        self._leaving.append((request, leave, stay))
        self._disturb(now_s)

    def _disturb(self, now_s: float) -> None:
        """Begin a step, or end a leap early, because something new has to be scheduled. An engine that sleeps reads all
        that has come before it begins: what comes at the same moment is in the same step."""
        if self.due_s is None:
            self._is_waking = True
            self.due_s = now_s
        elif self._leap is not None:
            self._leap.stop_after(now_s + self.config.lead_s)
            self.due_s = self._leap.end_s(self._leap.num_steps)

    def advance(self) -> None:
        """The step that runs has ended, or the engine has woken up; the next begins."""
        assert self.due_s is not None, "nothing runs"
        now_s = self.due_s
        self.clock.advance_to(now_s)
        if self._is_waking:
            self._is_waking = False
            self.due_s = None
            self._let_go()
            self._begin(now_s + self.config.lead_s)
            return
        self.busy_s += now_s - self._begun_s
        self.block_seconds += self.kv.num_used_blocks * (now_s - self._begun_s)
        if self._leap is not None:
            self._end_leap(self._leap, now_s)
        else:
            self._end_step(now_s)
        self.due_s = None
        self._let_go()
        self._begin(now_s)

    # -- a step begins

    def _begin(self, now_s: float) -> None:
        self._take_in(now_s)
        while not self.scheduler.has_work:
            if not self._inbox:
                return
            now_s = self._inbox[0][0] + self.config.lead_s
            self._take_in(now_s)
        self.clock.advance_to(now_s)
        self._begun_s = now_s
        self.num_events += 1
        self._leap = self._find_leap(now_s) if self.config.can_leap and not self._inbox else None
        if self._leap is not None:
            self.due_s = self._leap.end_s(self._leap.num_steps)
            return
        plan = self.scheduler.schedule()
        self._tell_fetched(now_s)
        if plan is None:
            assert self.config.has_peers, "there is work and nothing can run"
            return  # a fetch that found nothing to load
        assert plan.spans.rows or plan.keyed_moves, "there is work and nothing can run"
        loads = self._loads.read(plan)
        self._step = plan
        self.due_s = now_s + (self.cost.load_s(loads) if plan.spans.rows else _MOVE_S)

    def _let_go(self) -> None:
        leaving, self._leaving = self._leaving, []
        for request, leave, stay in leaving:
            if request.is_finished:
                stay()
                continue
            [seq] = request.sequences
            last_token_s = self._last_token_s.pop(seq.seq_id)
            self.scheduler.abort(request.request_id)
            leave(seq.output_token_ids, last_token_s)

    def _tell_fetched(self, now_s: float) -> None:
        for report in self.scheduler.traffic.take_reports():
            assert isinstance(report, FetchReport) and self.on_fetched is not None
            self.on_fetched(report, now_s)

    def _take_in(self, now_s: float) -> None:
        """Requests that came early enough for a step that begins now."""
        while self._inbox and self._inbox[0][0] + self.config.lead_s <= now_s:
            request = self._inbox.popleft()[1]
            try:
                self.scheduler.add(request)
                if request.request_id in self._came_s:
                    self._last_token_s[request.sequences[0].seq_id] = self._came_s.pop(request.request_id)
            except BadRequestError as error:
                self._times.errors[str(error)] = self._times.errors.get(str(error), 0) + 1
                self.on_end(request)

    def _find_leap(self, now_s: float) -> _Leap | None:
        """Steps until just before the first sequence ends, if every one of them only decodes and has its blocks."""
        running = self.scheduler.running
        if not running or self.scheduler.num_waiting or self.scheduler.num_swapped or self.scheduler.traffic.has_work:
            return None
        num_steps, num_kv_tokens = 1 << 30, 0
        for seq in running:
            length = len(seq.token_ids)
            # The last token of a prompt may be left alone as well, and is then computed like a decode.
            if seq.num_computed_tokens != length - 1 or seq.first_token_s is None:
                return None
            num_steps = min(num_steps, seq.max_len - length - 1)
            num_kv_tokens += length
        num = len(running)
        # Each may take a block more than its share of tokens fills.
        num_steps = min(num_steps, (self.kv.num_free_blocks // (num * len(self.kv.windows)) - 1) * self.kv.block_size)
        if num_steps < 2:
            return None
        first_s = self.cost.load_s(StepLoad(num_decodes=num, num_decode_kv_tokens=num_kv_tokens))
        return _Leap(now_s, num, first_s, num * self.cost.kv_token_s, num_steps)

    # -- it ends

    def _end_step(self, now_s: float) -> None:
        assert self._step is not None
        plan, seconds = self._step, now_s - self._begun_s
        result = StepResult(step=plan.step, tokens=[[0]] * len(plan.sampled_rows()))
        result.timings = StepTimings(forward_s=seconds, total_s=seconds)
        result.moved = [move.ticket for move in plan.keyed_moves]
        self._peers.forget([key for move in plan.keyed_moves for _, key in move.pairs])
        last_token_s, begun_s, num_in_step, num_first = self._last_token_s, self._begun_s, 0, 0
        updates = self.scheduler.update(result)
        self._tell_fetched(now_s)
        for update in updates:
            seq = update.seq
            before_s = last_token_s.get(seq.seq_id)
            if before_s is None:
                self._times.first_s.append(now_s - seq.request.arrival_s)
                self._times.num_prompt_tokens += seq.num_prompt_tokens
                num_first += 1
                self.on_first_token(seq.request)
            elif before_s == begun_s:
                num_in_step += 1
            else:  # it was preempted meanwhile
                self._times.between(now_s - before_s, 1)
            if update.finished:
                last_token_s.pop(seq.seq_id, None)
                self._end_request(seq, now_s)
            else:
                last_token_s[seq.seq_id] = now_s
        held_up_s, self._held_up_s = self._held_up_s, num_first * self.config.first_token_s
        if num_in_step:
            self._times.between(now_s - begun_s + self._held_up_s - held_up_s, num_in_step)

    def _end_request(self, seq: Sequence, now_s: float) -> None:
        self._times.whole_s.append(now_s - seq.request.arrival_s)
        self._times.num_output_tokens += seq.num_output_tokens
        self.on_end(seq.request)
        seq.request.sequences = []  # the two point at each other

    def _end_leap(self, leap: _Leap, now_s: float) -> None:
        num_steps, kv = leap.num_steps, self.kv
        tokens = [0] * num_steps
        for seq in self.scheduler.running:
            length = len(seq.token_ids)
            seq.token_ids += tokens
            seq.num_computed_tokens = computed = length + num_steps - 1
            allocation = kv.grow(seq.seq_id, computed, length - 1)
            assert allocation is not None, "a leap has its blocks"
            if allocation is not UNCHANGED:
                kv.commit(seq.seq_id, seq.token_ids, computed)
            assert seq.row is not None
            self._loads.set_computed(seq.row, computed)
            seq.last_token_s = self._last_token_s[seq.seq_id] = now_s
        stats = self.scheduler.stats
        stats.num_steps += num_steps
        stats.num_decode_tokens += num_steps * leap.num_seqs
        mean_s = (now_s - leap.start_s) / num_steps
        for _ in range(min(num_steps, 8)):  # as many as it takes to believe it
            self.scheduler.costs.observe_step(StepKind(leap.num_seqs, 0), device_s=mean_s, total_s=mean_s)
        num_points = min(num_steps, _LEAP_POINTS)
        for point in range(num_points):
            at = (point + 0.5) * num_steps / num_points - 0.5
            self._times.between(leap.first_s + at * leap.slope_s, leap.num_seqs * num_steps / num_points)
        self._leap, self._held_up_s = None, 0.0


Leave = Callable[[list[int], float], None]  # the output tokens that it has, and when the last of them came
