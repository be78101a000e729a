"""Running a workload through an engine, step by step, and writing down everything that can be known about it.

    report = measure(engine, WORKLOADS["lab16"](vocab), name="lab16")
    report = measure_repeats(engine, workload, warm=other_prompts, repeats=3, name="lab16")

The watching costs a look at each running sequence per step, and at most half a percent of the time for the cache.
"""

from __future__ import annotations

import statistics
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.bench.engines import forced_length
from quire.bench.machine import describe_engine, describe_machine, num_usable_cpus, peak_rss_bytes, rss_bytes
from quire.bench.progress import WARM_UP, Progress, WarmUpInterrupted, repeat_name
from quire.bench.report import KVReport, Percentiles, RunReport, Sample
from quire.bench.steps import (
    StepWatch,
    kv_counts,
    preemption_counts,
    prefill_and_decode_rates,
    since,
    time_counts,
    watch_steps,
)
from quire.bench.workloads import Workload
from quire.errors import BadRequestError, ConfigError
from quire.interrupt import StopFlag, stop_on_interrupt

if TYPE_CHECKING:
    from quire import LLMEngine, RequestOutput
    from quire.request import Request
    from quire.request import Sequence as Line

Stage = Callable[[str, Workload], Progress]  # begins a warm-up or a repeat: its name and its work


def measure(
    engine: LLMEngine,
    workload: Workload,
    *,
    name: str = "",
    parameters: Mapping[str, Any] | None = None,
    arrivals: Sequence[float] | None = None,
    sampling: Mapping[str, Any] | None = None,
    sample_every_s: float = 0.05,
    progress: Progress | None = None,
) -> RunReport:
    """Run every request to its full length. Without `arrivals` (seconds from the start, ascending) all come at once.

    `sampling` goes to SamplingParams (n, temperature, …). With sample_every_s=0 the cache is read at every step, and
    the numbers about it are exact and repeatable. The first Ctrl-C ends the run between two steps: the report then
    says `interrupted` and holds what was done.
    """
    if not workload:
        raise ConfigError("the workload is empty: nothing to measure")
    if arrivals is not None and (len(arrivals) != len(workload) or list(arrivals) != sorted(arrivals)):
        raise ConfigError(f"arrivals must be {len(workload)} ascending times, one for each request")
    check_lengths(workload, engine.max_model_len, name)
    _drain(engine)
    with watch_steps(engine.core, every_step=sample_every_s == 0) as watch, stop_on_interrupt() as stop:
        run = _Run(engine, watch, sampling or {}, sample_every_s)
        try:
            run.go(workload, arrivals, stop, progress)
        finally:
            engine.abort_request(list(run.requests))
            _drain(engine)
        report = run.report(stop.is_set)
    report.workload, report.parameters = name, dict(parameters or {})
    report.settings, report.machine = describe_engine(engine), describe_machine()
    report.requests = len(workload)
    return report


def measure_repeats(
    engine: LLMEngine,
    workload: Workload,
    *,
    warm: Workload | None = None,
    num_warmups: int = 1,
    repeats: int = 1,
    stage: Stage | None = None,
    **options: Any,
) -> RunReport:
    """Untimed runs of `warm` (other prompts of the same lengths), then the workload `repeats` times, each from an
    empty prefix cache. The median run's report, with every repeat's numbers in it. `options` are measure()'s.

    Raises WarmUpInterrupted on Ctrl-C in an untimed run: its numbers are nobody's question."""
    assert repeats >= 1
    quiet = {key: options[key] for key in ("sampling", "name") if key in options}
    for _ in range(num_warmups if warm is not None else 0):
        assert warm is not None
        progress = stage(WARM_UP, warm) if stage is not None else None
        if measure(engine, warm, progress=progress, **quiet).interrupted:
            raise WarmUpInterrupted

    def run(repeat: str) -> RunReport:
        engine.reset_prefix_cache()
        if stage is not None:
            options["progress"] = stage(repeat, workload)
        return measure(engine, workload, **options)

    return _merge(run_repeats(repeats, run))


def run_repeats(repeats: int, run: Callable[..., RunReport]) -> list[RunReport]:
    """The reports of all repeats, or of those before Ctrl-C. `repeat` tells `run` its name. Where it has a warm-up of
    its own, one that is interrupted leaves the repeats before it standing."""
    reports: list[RunReport] = []
    while len(reports) < repeats and not (reports and reports[-1].interrupted):
        try:
            reports.append(run(repeat=repeat_name(len(reports), repeats)))
        except WarmUpInterrupted:
            if not reports:
                raise
            break
    return reports


def median_run(reports: Sequence[RunReport]) -> RunReport:
    """The median run by throughput."""
    return sorted(reports, key=lambda report: report.output_tok_s)[(len(reports) - 1) // 2]


def _merge(reports: list[RunReport]) -> RunReport:
    """The median by throughput. An interrupted run stands only where there is no whole one."""
    whole = [report for report in reports if not report.interrupted]
    chosen = median_run(whole or reports)
    merge_repeats(chosen, whole or reports)
    chosen.interrupted = len(whole) < len(reports)
    return chosen


def merge_repeats(chosen: RunReport, reports: Sequence[RunReport]) -> None:
    """Write into one report what each of its repeats found."""
    found = [report.metrics() for report in reports]
    chosen.repeats = [report.output_tok_s for report in reports]
    chosen.repeat_values = {name: [m[name] for m in found] for name in found[0] if all(name in m for m in found)}


def check_lengths(workload: Workload, max_model_len: int, name: str) -> None:
    """A request that is cut short would be measured as less work than asked for."""
    longest = max(len(prompt) + num_out for prompt, num_out in workload)
    if longest > max_model_len:
        raise ConfigError(
            f"workload {name or 'given'} has a request of {longest} tokens, and max_model_len is {max_model_len}: "
            f"choose another workload or shorter lengths, or a model and KV cache that hold more"
        )


def _drain(engine: LLMEngine) -> None:
    """Steps and block transfers that nobody waits for any more."""
    if engine.core.is_dead:
        return
    while engine.core.has_work:
        engine.step()


@dataclass(slots=True)
class _Tracked:
    """One sequence as its reader sees it."""

    seq: Line
    num_seen: int
    last_s: float | None = None


@dataclass(slots=True)
class _Run:
    """One run as it goes."""

    engine: LLMEngine
    watch: StepWatch
    sampling: Mapping[str, Any]
    sample_every_s: float
    requests: dict[str, Request] = field(default_factory=dict)  # unfinished
    tracked: dict[int, _Tracked] = field(default_factory=dict)  # by seq_id
    prompt_tokens: int = 0
    output_tokens: int = 0
    completed: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    itl_s: array[float] = field(default_factory=lambda: array("d"))
    samples: list[Sample] = field(default_factory=list)
    started_s: float = 0.0
    seconds: float = 0.0
    idle_s: float = 0.0
    _kv_before: dict[str, int] = field(default_factory=dict)
    _preempted_before: dict[str, int] = field(default_factory=dict)
    _times_before: dict[str, float] = field(default_factory=dict)
    _sampled: tuple[float, float, float] = (0.0, 0.0, 0.0)  # at the last sample: time, CPU seconds, busy seconds
    _rss_before: int = 0

    def go(
        self, workload: Workload, arrivals: Sequence[float] | None, stop: StopFlag, progress: Progress | None
    ) -> None:
        engine = self.engine
        self._kv_before, self._preempted_before = kv_counts(engine), preemption_counts(engine)
        self._times_before, self._rss_before = time_counts(engine), peak_rss_bytes()
        cuda = _cuda()
        if cuda is not None:
            cuda.reset_peak_memory_stats()
        self.started_s = time.monotonic()
        self._sampled = (self.started_s, time.process_time(), engine.stats.busy_s)
        num_added = 0
        while not stop.is_set:
            num_added = self._add_due(workload, arrivals, num_added)
            if not engine.has_unfinished_requests():
                if num_added == len(workload):
                    break
                assert arrivals is not None
                self._wait_until(self.started_s + arrivals[num_added])
                continue
            outputs = engine.step()
            self._look_at_tokens(outputs)
            now = time.monotonic()
            if now - self._sampled[0] >= self.sample_every_s:
                self._sample(now)
            if progress is not None:
                progress(self.output_tokens, self.completed)
        self.seconds = time.monotonic() - self.started_s
        self.prompt_tokens -= sum(_num_uncomputed(request) for request in self.requests.values())  # after Ctrl-C
        self._sample(time.monotonic())

    def _add_due(self, workload: Workload, arrivals: Sequence[float] | None, num_added: int) -> int:
        now = time.monotonic()
        while num_added < len(workload):
            due_s = self.started_s + (arrivals[num_added] if arrivals is not None else 0.0)
            if due_s > now:
                break
            prompt, num_out = workload[num_added]
            try:
                # Due, not now: a request that comes while a step runs waits for the step, and that is latency.
                request = self.engine.add_request(
                    f"bench-{num_added}", prompt, forced_length(num_out, **self.sampling), arrival_time=due_s
                )
            except BadRequestError as error:
                raise ConfigError(f"request {num_added} of the workload: {error}") from None
            self.requests[request.request_id] = request
            for seq in request.sequences:
                self.tracked[seq.seq_id] = _Tracked(seq, len(prompt))
            self.prompt_tokens += len(prompt)
            num_added += 1
        return num_added

    def _wait_until(self, due_s: float) -> None:
        started = time.monotonic()
        time.sleep(max(0.0, min(due_s - started, 0.05)))  # short, so that Ctrl-C is heard
        self.idle_s += time.monotonic() - started

    def _look_at_tokens(self, outputs: list[RequestOutput]) -> None:
        """Running sequences hold blocks; those that ended in this step do not any more, but have an output."""
        tracked = self.tracked
        for seq_id in self.engine.core.kv.tables:
            if seq_id not in tracked:  # with n > 1: forked in this step
                self._track_forks()
            self._look(tracked[seq_id])
        for output in outputs:
            if output.finished:
                self._finish(self.requests.pop(output.request_id), output)

    def _track_forks(self) -> None:
        for request in self.requests.values():
            for seq in request.sequences:
                if seq.seq_id not in self.tracked:
                    self.tracked[seq.seq_id] = _Tracked(seq, request.num_prompt_tokens)

    def _look(self, line: _Tracked) -> None:
        seq = line.seq
        num_tokens = len(seq.token_ids)
        if num_tokens == line.num_seen or seq.last_token_s is None:
            return
        self.output_tokens += num_tokens - line.num_seen
        line.num_seen = num_tokens
        if line.last_s is not None:
            self.itl_s.append(seq.last_token_s - line.last_s)
        line.last_s = seq.last_token_s

    def _finish(self, request: Request, output: RequestOutput) -> None:
        for seq in request.sequences:
            line = self.tracked.pop(seq.seq_id, None) or _Tracked(seq, request.num_prompt_tokens)
            self._look(line)
            if seq.first_token_s is not None and line.last_s is not None and seq.num_output_tokens > 1:
                self.tpot_s.append((line.last_s - seq.first_token_s) / (seq.num_output_tokens - 1))
        failures = [completion.error for completion in output.outputs if completion.error]
        if failures:
            self.errors[failures[0]] += 1
            return
        self.completed += 1
        first = min(seq.first_token_s for seq in request.sequences if seq.first_token_s is not None)
        last = max(seq.last_token_s for seq in request.sequences if seq.last_token_s is not None)
        self.ttft_s.append(first - request.arrival_s)
        self.e2e_s.append(last - request.arrival_s)

    def _sample(self, now: float) -> None:
        core = self.engine.core
        then, cpu_then, busy_then = self._sampled
        cpu, busy = time.process_time(), self.engine.stats.busy_s
        elapsed = max(now - then, 1e-9)
        self.samples.append(
            Sample(
                t_s=now - self.started_s,
                running=core.scheduler.num_running,
                waiting=core.scheduler.num_waiting + core.scheduler.num_swapped,
                kv_usage=core.kv.num_used_blocks / core.kv.num_blocks,
                waste_percent=self.watch.kv.last_waste_percent if core.kv.num_used_blocks else 0.0,
                rss_bytes=rss_bytes(),
                prompt_tokens=self.watch.num_prefill_tokens,
                output_tokens=self.output_tokens,
                cpu_percent=100 * (cpu - cpu_then) / elapsed / num_usable_cpus(),
                device_percent=min(100.0, 100 * (busy - busy_then) / elapsed),
            )
        )
        self._sampled = (now, cpu, busy)

    def report(self, interrupted: bool) -> RunReport:
        seconds, steps = max(self.seconds, 1e-9), self.watch.steps
        prefill, decode = prefill_and_decode_rates(steps)
        time_s = since(self._times_before, time_counts(self.engine)) | {"idle": self.idle_s}
        busy_s = time_s.pop("busy")
        if self.watch.depth == 1:  # else these overlap, and do not add up to the run
            time_s["other"] = max(0.0, seconds - sum(time_s.values()))
        peak_rss = peak_rss_bytes()
        if peak_rss == self._rss_before:  # the process had more at some time before this run
            peak_rss = max(sample.rss_bytes for sample in self.samples)
        cuda = _cuda()
        # Weighted by time, each sample's share is of the time since the one before.
        spans = [b.t_s - a for a, b in zip([0.0, *(s.t_s for s in self.samples)], self.samples, strict=False)]
        cpu_percent = sum(span * s.cpu_percent for span, s in zip(spans, self.samples, strict=True)) / seconds
        return RunReport(
            workload="",
            completed=self.completed,
            errors=dict(self.errors),
            interrupted=interrupted,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            seconds=self.seconds,
            output_tok_s=self.output_tokens / seconds,
            total_tok_s=(self.prompt_tokens + self.output_tokens) / seconds,
            prefill_tok_s=prefill,
            decode_tok_s=decode,
            ttft_s=Percentiles.of(self.ttft_s),
            itl_s=Percentiles.of(self.itl_s),
            tpot_s=Percentiles.of(self.tpot_s),
            e2e_s=Percentiles.of(self.e2e_s),
            num_steps=len(steps),
            running_mean=statistics.fmean(step.num_seqs for step in steps) if steps else 0.0,
            time_s=time_s,
            kv=self._kv_report(seconds),
            peak_rss_bytes=peak_rss,
            peak_gpu_bytes=None if cuda is None else int(cuda.max_memory_allocated()),
            cpu_percent=cpu_percent,
            device_percent=min(100.0, 100 * busy_s / seconds),
            samples=self.samples,
        )

    def _kv_report(self, seconds: float) -> KVReport:
        seen, kv = self.watch.kv, self.engine.core.kv
        counts = since(self._kv_before, kv_counts(self.engine))
        return KVReport(
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            block_bytes=self.engine.ledger.block_bytes,
            peak_blocks=seen.peak_blocks,
            occupancy_mean=seen.sum_used / max(seen.num_readings, 1) / kv.num_blocks,
            occupancy_max=seen.peak_blocks / kv.num_blocks,
            waste_percent_mean=seen.sum_waste_percent / max(seen.num_waste_readings, 1),
            waste_percent_max=seen.max_waste_percent,
            waste_percent_at_peak=seen.waste_percent_at_peak,
            table_entries_max=seen.table_entries_max,
            churn_per_s=(counts["blocks_allocated"] + counts["blocks_freed"]) / seconds,
            preemptions=since(self._preempted_before, preemption_counts(self.engine)),
            min_available=kv.num_free_blocks if seen.min_available is None else seen.min_available,
            **counts,
        )


def _num_uncomputed(request: Request) -> int:
    """Prompt tokens that no step was given yet, and no cache had."""
    first = request.sequences[0]
    if first.first_token_s is not None:  # the whole prompt was computed, even if it was preempted since
        return 0
    return max(0, request.num_prompt_tokens - first.num_computed_tokens)


def _cuda() -> Any:
    """torch.cuda where a GPU is in use, else None."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None
