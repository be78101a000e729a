"""The loop of an engine that serves others, in a thread or a process of its own: commands in, steps, messages out.

`AsyncLLM` runs it in a thread, `process.py` behind sockets. It knows neither text nor how messages travel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from quire.engine import messages
from quire.engine.api import EngineLoad
from quire.engine.brownout import Brownout, PressureReading
from quire.engine.calls import CALLS
from quire.engine.core import EngineCore
from quire.engine.metrics import step_metrics
from quire.engine.stats import Metric
from quire.engine.watchdog import Progress
from quire.errors import BadRequestError, ErrorInfo, QuireError
from quire.log import get_logger
from quire.request import Request, Sequence
from quire.scheduler import SequenceUpdate
from quire.scheduler.traffic import SendReport

_REPORT_EVERY_S = 0.1
_QUIET_S = 0.1  # without a request, before something is prepared that the next one would have to wait for
_IDLE_REPORT_S = 1.0
_ANSWER_S = 0.005  # while a call is at work on another thread
_LOOK_S = 1e-3  # while a step is put off: is the one that runs really still running?

_BROWNOUT = (
    "memory suffices again",
    "prompts get less of each step",
    "and new requests get shorter answers",
    "and no new requests are taken",
)

# Waits so many seconds for a command (None: until one comes); None where there is none.
Receive = Callable[[float | None], messages.Command | None]


class EngineLoop:
    """Drives a core until it is told to stop. One thread calls it."""

    def __init__(
        self,
        core: EngineCore,
        receive: Receive,
        send: Callable[[messages.EngineMessage], None],
        brownout: Brownout | None = None,
        *,
        publishes_cache: bool = False,
    ) -> None:
        self.core = core
        self.progress = Progress()
        self._receive = receive
        self._send = send
        self._requests: dict[int, Request] = {}  # by key
        self._keys: dict[str, int] = {}  # by request_id
        self._seq_keys: dict[int, int] = {}  # by seq_id, of the sequences that had an output
        self._preemptions: dict[int, tuple[int, int]] = {}  # by seq_id: the counts that were sent last
        self._answers: dict[int, Future[Any]] = {}  # by call_id: calls that are still at work on another thread
        self._is_stopping = False
        self._next_report_s = 0.0
        self._last_load: EngineLoad | None = None
        self._brownout = brownout or Brownout()
        self._cache_log = core.kv.log_cache() if publishes_cache else None
        self._cache_told = 0

    def run(self) -> None:
        """Raises EngineDeadError when a step fails."""
        while True:
            self.progress.step_started_s = time.monotonic()
            self._take_commands()
            self._send_answers()
            if self._is_stopping:
                return
            if self.core.has_work:
                self._step()
            self._tell_traffic()
            if time.monotonic() >= self._next_report_s:
                self._report()

    def _step(self) -> None:
        updates = self.core.step()
        command = None
        if self.core.device_waits:
            command = self._receive(0.0)  # a request that has come meanwhile shall be in the next step
            if command is None:
                self.core.begin_step()
        self._tell_cache()
        if updates:
            self._send(self._step_outputs(updates))
        self.progress.num_steps = self.core.stats.num_steps
        if command is not None:
            self._handle(command)

    def live_requests(self) -> list[Request]:
        """For the watchdog, from its thread."""
        return list(self._requests.values())

    # -- commands

    def _take_commands(self) -> None:
        """Everything that has come; sleeps while there is nothing to do, or nothing that must be done yet."""
        command = self._receive(0.0)
        is_quiet = False
        while command is None and not self.core.has_work and not self._is_stopping:
            self._report()
            self._send_answers()
            self.progress.step_started_s = None
            if self.core.can_prepare:
                command = self._receive(0.0 if is_quiet else _QUIET_S)
                is_quiet = command is None
                self.progress.step_started_s = time.monotonic()
                if is_quiet:
                    self.core.prepare_more()
                continue
            # Rates and brownout fall with time alone.
            is_settled = self._last_load is not None and not self._last_load.tokens_per_s and not self._brownout.level
            is_settled = is_settled and not self.core.can_die_idle
            wait_s = _ANSWER_S if self._answers else None if is_settled else _IDLE_REPORT_S
            command = self._receive(wait_s)
            self.core.check()
            self.progress.step_started_s = time.monotonic()
        while command is not None and not self._is_stopping:
            self._handle(command)
            command = self._receive(0.0)
        while not self._is_stopping and (spare_s := self.core.spare_s()) > 0:
            if (command := self._receive(min(spare_s, _LOOK_S))) is not None:
                self._handle(command)

    def _handle(self, command: messages.Command) -> None:
        match command:
            case messages.Add():
                self._add(command)
            case messages.Abort():
                self._abort(command.key)
            case messages.Finish():
                self._finish(command)
            case messages.Call():
                self._call(command)
            case messages.Stop():
                self._is_stopping = True
            case messages.Send():
                self._send_blocks(command)
            case messages.Fetch():
                self.core.scheduler.traffic.fetch(command.fetch_id, command.token_ids, command.salt, command.adapter)

    def _add(self, command: messages.Add) -> None:
        request = command.request
        try:
            self.core.add(request)
        except BadRequestError as error:
            self._send(messages.Refused(command.key, ErrorInfo.of(error)))
            return
        self._requests[command.key] = request
        self._keys[request.request_id] = command.key
        if command.blocks_to is not None:
            self.core.scheduler.traffic.send(request, *command.blocks_to)

    def _abort(self, key: int) -> None:
        request = self._requests.get(key)
        if request is None:
            return  # it ended while the command was on its way
        if updates := self.core.abort(request.request_id):
            self._send(self._step_outputs(updates))

    def _finish(self, command: messages.Finish) -> None:
        request = self._requests.get(command.key)
        for seq in request.sequences if request is not None else ():
            if seq.index == command.index:
                self.core.finish(seq, command.stop)
                self._forget(seq)

    def _call(self, command: messages.Call) -> None:
        try:
            if command.name == "metrics":
                value: Any = self._metrics()
            elif command.name in CALLS:
                value = CALLS[command.name](self.core, **command.arguments)
            else:
                raise BadRequestError(f"there is no engine call {command.name!r}", param="name")
            if isinstance(value, Future):
                self._answers[command.call_id] = value
            else:
                self._send(messages.CallDone(command.call_id, value))  # in here: it may be something that cannot travel
        except Exception as error:
            if self.core.is_dead:
                raise
            if not isinstance(error, QuireError):
                get_logger().exception("the engine call %s failed", command.name)
            self._send(messages.CallFailed(command.call_id, ErrorInfo.of(error)))

    def _send_answers(self) -> None:
        """Send the answers of those calls whose work is done by now."""
        for call_id, work in list(self._answers.items()):
            if work.done():
                del self._answers[call_id]
                error = work.exception()
                if error is None:
                    self._send(messages.CallDone(call_id, work.result()))
                else:
                    self._send(messages.CallFailed(call_id, ErrorInfo.of(error)))

    # -- blocks to and from other engines

    def _send_blocks(self, command: messages.Send) -> None:
        request = self._requests.get(command.key)
        if request is None:
            return  # it ended while the command was on its way
        if command.to is None:
            self.core.scheduler.traffic.stop(request.request_id)
        else:
            self.core.scheduler.traffic.send(request, command.to, command.num_known)

    def _tell_traffic(self) -> None:
        for report in self.core.scheduler.traffic.take_reports():
            if not isinstance(report, SendReport):
                self._send(messages.Fetched(report.fetch_id, report.num_tokens))
            elif (key := self._keys.get(report.request_id)) is not None:
                self._send(messages.Sent(key, report.num_tokens, report.has_failed))

    # -- outputs

    def _step_outputs(self, updates: list[SequenceUpdate]) -> messages.StepOutputs:
        """The one place that runs for every sequence of every step."""
        seq_keys = self._seq_keys
        outputs = messages.StepOutputs(time.monotonic())
        # First tokens stand first: their readers are woken in this order, and hundreds take a while.
        first_keys: list[int] = []
        first_tokens: list[int] = []
        for update in updates:
            seq = update.seq
            key = seq_keys.get(seq.seq_id)
            keys, tokens = outputs.keys, outputs.tokens
            if key is None:
                key = self._start(seq, outputs)
                keys, tokens = first_keys, first_tokens
            for token in update.new_token_ids:
                keys.append(key)
                tokens.append(token)
            if update.logprobs is not None or update.prompt_logprobs is not None:
                outputs.logprobs.append(messages.Logprobs(key, update.logprobs, update.prompt_logprobs))
            if update.pooled is not None:
                outputs.pooled.append(messages.PooledResult(key, update.pooled))
            if seq.num_preemptions:
                self._tell_preemptions(key, seq, outputs)
            if update.finished:
                assert seq.finish_reason is not None
                drafted, reason = (seq.num_draft_tokens, seq.num_accepted_tokens), seq.finish_reason.value
                outputs.ended.append(messages.Ended(key, reason, seq.stop_reason, update.error, *drafted))
        if first_keys:
            outputs.keys[:0], outputs.tokens[:0] = first_keys, first_tokens
        if outputs.ended:  # not before: a request's last sequences may end in one step
            for update in updates:
                if update.finished:
                    self._forget(update.seq)
        return outputs

    def _start(self, seq: Sequence, outputs: messages.StepOutputs) -> int:
        key = self._keys[seq.request.request_id] + seq.index
        self._seq_keys[seq.seq_id] = key
        outcome = None if seq.cache_outcome is None else seq.cache_outcome.value
        outputs.started.append(messages.Started(key, seq.index, seq.first_scheduled_s, seq.num_cached_tokens, outcome))
        return key

    def _tell_preemptions(self, key: int, seq: Sequence, outputs: messages.StepOutputs) -> None:
        counts = (seq.num_preemptions, seq.num_recomputed_tokens)
        if self._preemptions.get(seq.seq_id) != counts:
            self._preemptions[seq.seq_id] = counts
            outputs.preempted.append(messages.Preempted(key, *counts))

    def _forget(self, seq: Sequence) -> None:
        """A sequence has ended; with its last one, the request is gone."""
        self._seq_keys.pop(seq.seq_id, None)
        self._preemptions.pop(seq.seq_id, None)
        if seq.request.is_finished:
            key = self._keys.pop(seq.request.request_id, None)
            if key is not None:
                del self._requests[key]
                seq.request.sequences = []

    # -- reports

    def _tell_cache(self) -> None:
        if self._cache_log is not None and self._cache_log.at != self._cache_told:
            change = self._cache_log.read(self._cache_told)
            self._cache_told = change.at
            self._send(messages.CacheReport(change.filled, change.evicted, change.is_snapshot))

    def _report(self) -> None:
        """Report the load between steps, a few times a second, and whenever the loop goes to sleep."""
        now_s = time.monotonic()
        self._next_report_s = now_s + _REPORT_EVERY_S
        self._update_brownout(now_s)
        self._tell_cache()
        load = self._load()
        if load != self._last_load:
            self._last_load = load
            self._send(messages.LoadReport(load))

    def _update_brownout(self, now_s: float) -> None:
        brownout, scheduler = self._brownout, self.core.scheduler
        before = brownout.level
        level = brownout.update(now_s, PressureReading.of(scheduler, self.core.kv))
        if level != before:
            scheduler.set_prefill_limit(brownout.prefill_limit(scheduler.config.max_num_batched_tokens))
            get_logger().debug("brownout level %d -> %d: %s", before, level, _BROWNOUT[level])  # the server tells

    def _load(self) -> EngineLoad:
        scheduler, kv = self.core.scheduler, self.core.kv
        return EngineLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            kv_usage=kv.num_used_blocks / kv.num_blocks,
            num_steps=self.core.stats.num_steps,
            tokens_per_s=self.core.stats.tokens_per_s(),
            prefill_tokens_per_s=scheduler.costs.mixed_tokens_per_s,
            decode_step_s=scheduler.costs.decodes_s or None,
            brownout_level=self._brownout.level,
        )

    def _metrics(self) -> list[Metric]:
        level = Metric("quire:brownout_level", "gauge", self._brownout.level)
        return [*step_metrics(self.core), level]
