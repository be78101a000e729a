"""Where a step's time goes: by kind of step, and inside it by operation."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.bench.engines import forced_length
from quire.bench.machine import describe_engine, describe_machine
from quire.bench.measure import check_lengths
from quire.bench.progress import Progress
from quire.bench.report import RunReport
from quire.bench.steps import Step, watch_steps
from quire.bench.workloads import Workload
from quire.interrupt import stop_on_interrupt

if TYPE_CHECKING:
    from quire import LLMEngine

PARTS = ("schedule", "prepare", "products", "attention", "other ops", "sample", "update", "rest")
# What the simulator learns a machine's costs from (`quire sim --profile`).
STEP_COLUMNS = ("num_decodes", "num_decode_kv_tokens", "num_prompts", "num_prompt_tokens", "num_causal_pairs")
# Methods of a matrix: the fused ones are products with something small behind them.
_PRODUCTS = ("multiply", "multiply_add_norm", "multiply_act", "multiply_rope_write", "logits")


@dataclass(slots=True)
class StepKind:
    """Steps that do the same sort of work. Seconds are totals."""

    name: str
    num_steps: int = 0
    num_tokens: int = 0
    wall_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))


@contextmanager
def _timed_operations(decoder: Any) -> Iterator[defaultdict[str, float]]:
    """Seconds by part, for as long as it lasts. Only for a device that has finished when a call returns.

    There is no public way to watch operations, so their classes' methods are replaced meanwhile. A product may call
    another operation inside: only the outermost call counts.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    is_inside = False

    def timed(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return method(*args, **kwargs)
            is_inside, started = True, time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds[part] += time.perf_counter() - started
                is_inside = False

        return call

    stack, decoder.stack = decoder.stack, None  # inside one call for all layers nothing could be told apart
    watched = [(type(decoder.ops), "attention", "attention")]
    watched += [(kind, name, "products") for kind in {type(m) for m in decoder._matrices} for name in _PRODUCTS]
    originals = [(kind, name, getattr(kind, name), name in vars(kind)) for kind, name, _ in watched]
    for (kind, name, part), (_, _, method, _) in zip(watched, originals, strict=True):
        setattr(kind, name, timed(part, method))
    try:
        yield seconds
    finally:
        decoder.stack = stack
        for kind, name, method, is_own in originals:
            if is_own:
                setattr(kind, name, method)
            else:
                delattr(kind, name)


def profile_workload(
    engine: LLMEngine, workload: Workload, *, name: str, progress: Progress | None = None
) -> tuple[RunReport, list[StepKind]]:
    """Run all requests at once, and divide each step. On a GPU the operations overlap with the host, so a step is
    divided by the executor's own marks, and `benchmarks.gpu` has the split by kernels."""
    check_lengths(workload, engine.max_model_len, name)
    core = engine.core
    worker = getattr(core.executor, "worker", None)
    decoder = None if worker is None else worker.decoder
    is_timed = decoder is not None and engine.built.executor.backend.device.type == "cpu"
    kinds: dict[str, StepKind] = {}
    steps: dict[str, list[float]] = {column: [] for column in ("seconds", *STEP_COLUMNS)}
    ids = [f"profile-{i}" for i in range(len(workload))]
    num_done, num_generated = 0, engine.stats.generation_tokens
    read_uses = getattr(core.executor, "uses", None)  # of an executor that has ranks
    uses_before = read_uses() if read_uses is not None else []
    started = time.perf_counter()
    with (
        watch_steps(core, every_step=False) as watch,
        stop_on_interrupt() as stop,
        _timed_operations(decoder) if is_timed else nullcontext() as timed,
    ):
        for request_id, (prompt, num_out) in zip(ids, workload, strict=True):
            engine.add_request(request_id, prompt, forced_length(num_out))
        while engine.has_unfinished_requests() and not stop.is_set:
            num_before, host = len(watch.steps), core.host
            before = (host.schedule_s, host.update_s)
            if timed is not None:
                timed.clear()
            began = time.perf_counter()
            outputs = engine.step()
            wall_s = time.perf_counter() - began
            num_done += sum(output.finished for output in outputs)
            if progress is not None:
                progress(engine.stats.generation_tokens - num_generated, num_done)
            if len(watch.steps) == num_before:
                continue  # nothing ran: block transfers were waited for
            host_s = (host.schedule_s - before[0], host.update_s - before[1])
            _add(kinds, watch.steps[-1], wall_s, host_s, timed)
            steps["seconds"].append(wall_s)
            for column in STEP_COLUMNS:
                steps[column].append(float(getattr(watch.steps[-1].load, column)))
        interrupted = stop.is_set
        engine.abort_request(ids)
        while core.has_work:
            engine.step()
    seconds = time.perf_counter() - started
    found = sorted(kinds.values(), key=lambda kind: -kind.wall_s)
    report = RunReport(
        workload=name,
        settings=describe_engine(engine),
        machine=describe_machine(),
        requests=len(workload),
        completed=0 if interrupted else len(workload),
        interrupted=interrupted,
        seconds=seconds,
        num_steps=sum(kind.num_steps for kind in found),
        steps=steps,
    )
    for kind in found:
        report.values[f"{kind.name}: steps"] = float(kind.num_steps)
        report.values[f"{kind.name}: step_ms"] = 1e3 * kind.wall_s / kind.num_steps
        report.values |= {f"{kind.name}: {part}_ms": 1e3 * s / kind.num_steps for part, s in kind.parts_s.items()}
    if read_uses is not None:
        _add_ranks(report, [after.busy_s - one.busy_s for one, after in zip(uses_before, read_uses(), strict=True)])
    elif not is_timed:
        report.notes = ["the forward pass stands under other ops; benchmarks.gpu of a checkout divides it by kernels"]
    return report, found


def _add_ranks(report: RunReport, busy_s: list[float]) -> None:
    """Add the share of the run that each rank computed. The rest, waiting for other ranks and plans, is the bubble."""
    shares = [min(1.0, seconds / report.seconds) for seconds in busy_s]
    for rank, share in enumerate(shares):
        report.values[f"rank {rank}: busy_percent"] = 100 * share
    report.values["bubble_percent"] = 100 * (1 - sum(shares) / len(shares))
    listed = ", ".join(f"{share:.0%}" for share in shares)
    report.notes = [f"ranks computed {listed} of the time; the bubble is {report.values['bubble_percent']:.0f} %"]


def _add(
    kinds: dict[str, StepKind], step: Step, wall_s: float, host_s: tuple[float, float], ops_s: dict[str, float] | None
) -> None:
    name = kind_of(step)
    kind = kinds.setdefault(name, StepKind(name))
    kind.num_steps += 1
    kind.num_tokens += step.num_decode_tokens + step.num_prefill_tokens
    kind.wall_s += wall_s
    parts, timings = kind.parts_s, step.timings
    known = {"schedule": host_s[0], "prepare": timings.prepare_s, "sample": timings.sample_s, "update": host_s[1]}
    if ops_s is None:
        known["other ops"] = timings.forward_s
    else:
        known |= {part: ops_s.get(part, 0.0) for part in ("products", "attention")}
        # Norms, embedding, and what the decoder does between its operations.
        known["other ops"] = max(0.0, timings.forward_s - known["products"] - known["attention"])
    known["rest"] = max(0.0, wall_s - sum(known.values()))
    for part, seconds in known.items():
        parts[part] += seconds


def kind_of(step: Step) -> str:
    """Decodes by the power of two that their number is at most: a step's cost depends on it."""
    if step.num_prefill_tokens:
        return "mixed" if step.num_decode_tokens else "prefill"
    width = 1 << (step.num_decode_tokens - 1).bit_length()
    return f"decode, {width}" if width <= 2 else f"decode, {width // 2 + 1}-{width}"
