"""An engine's own loop under timed arrivals, with neither HTTP nor a client: what `quire sim --validate h200` compares.

    python -m benchmarks.gpu_loop

Llama-3.1-8B's shape with random weights on the GPU, with every graph captured before. For each seed come 200 requests
of ShareGPT-like lengths at 8 a second and then 480 at 24, whose first 200 prompts are the same and in the cache. It
prints the figures of both seeds together, and the constants of `quire/sim/devices.py` that are from such steps.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from quire.bench.model_shapes import write_llama_8b
from quire.bench.steps import StepWatch
from quire.bench.workloads import arrival_times, sharegpt
from quire.config import EngineConfig
from quire.engine import messages
from quire.engine.build import build_token_side
from quire.engine.core import EngineCore
from quire.engine.launch import settle_for_serving
from quire.engine.loop import EngineLoop
from quire.engine.text_side import open_model
from quire.models.spec import ModelSpec
from quire.params import SamplingSpec
from quire.plan import StepPlan, StepResult
from quire.request import Request
from quire.sim.devices import DEVICES, Efficiency
from quire.sim.roofline import MAX_FUSED_ROWS, RooflineCost
from quire.step_costs import StepLoad

SEEDS = (11, 12)
LOADS = ((8, 200), (24, 480))  # requests a second, and how many
_LONGEST_STEP_S = 0.02  # of those that are fitted: a longer one was disturbed, or had no graph
_MOST_PROMPT_TOKENS = 320


@dataclass(slots=True)
class TimedStep:
    planned_s: float
    ended_s: float
    load: StepLoad


class StepTimes(StepWatch):
    """Stands in for the engine's executor, and notes when steps were planned and when their results were there."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core, every_step=False)
        self._planned_s: deque[float] = deque()
        self.timed: list[TimedStep] = []

    def submit(self, plan: StepPlan) -> int:
        self._planned_s.append(time.monotonic())
        return super().submit(plan)

    def collect(self, ticket: int) -> StepResult:
        result = super().collect(ticket)
        self.timed.append(TimedStep(self._planned_s.popleft(), time.monotonic(), self.steps.pop().load))
        return result


@dataclass(slots=True)
class Seen:
    """Of all loads at one rate."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        first, between = (1e3 * np.percentile(times, [50, 99]) for times in (self.first_s, self.between_s))
        tokens_per_s = (len(self.first_s) + len(self.between_s)) / self.seconds
        return (
            f"{tokens_per_s:,.0f} tokens/s, first token p50 {first[0]:.2f} p99 {first[1]:.2f} ms, "
            f"inter-token p50 {between[0]:.2f} p99 {between[1]:.2f} ms"
        )


class Arrivals:
    """Both ends of a loop: hands it requests when they are due, and notes when their tokens come."""

    def __init__(self, rate: float, num: int, seed: int, seen: Seen) -> None:
        self._workload = sharegpt(128_000, seed=seed, num=num)
        self._name = f"{rate} {seed}"
        self._seen = seen
        began_s = time.monotonic() + 0.05
        self._due_s = [began_s + at for at in arrival_times(num, rate, seed=seed)]
        self._num_sent = self._num_ended = 0
        self._last_s: dict[int, float] = {}

    def receive(self, wait_s: float | None) -> messages.Command | None:
        until_s = None if wait_s is None else time.monotonic() + wait_s
        while True:
            now_s, index = time.monotonic(), self._num_sent
            if index < len(self._due_s) and now_s >= self._due_s[index]:
                self._num_sent += 1
                return self._add(index)
            if self._num_ended == len(self._due_s):
                return messages.Stop()
            if until_s is not None and now_s >= until_s:
                return None
            wakes_s = [at for at in (until_s, *self._due_s[index : index + 1]) if at is not None]
            time.sleep(max(0.0, min(wakes_s, default=now_s + 0.01) - now_s))

    def _add(self, index: int) -> messages.Add:
        prompt, num_out = self._workload[index]
        request = Request(
            request_id=f"{self._name} {index}",
            prompt_token_ids=prompt,
            max_tokens=num_out,
            end_token_ids=frozenset(),
            spec=SamplingSpec(temperature=0.0),
            arrival_s=self._due_s[index],
        )
        return messages.Add(index, request)

    def send(self, message: messages.EngineMessage) -> None:
        if not isinstance(message, messages.StepOutputs):
            return
        for key in message.keys:
            if key in self._last_s:
                self._seen.between_s.append(message.now_s - self._last_s[key])
            else:
                self._seen.first_s.append(message.now_s - self._due_s[key])
            self._last_s[key] = message.now_s
        self._num_ended += len(message.ended)
        if self._num_ended == len(self._due_s):
            self._seen.seconds += message.now_s - self._due_s[0]


def measure(core: EngineCore) -> tuple[dict[int, Seen], list[list[TimedStep]]]:
    """What was seen at each rate, and the steps of each load."""
    found, steps = {rate: Seen() for rate, _ in LOADS}, []
    while core.can_prepare:
        core.prepare_more()
    inner = core.executor
    for seed in SEEDS:
        for rate, num in LOADS:
            core.executor = watch = StepTimes(core)
            arrivals = Arrivals(rate, num, seed, found[rate])
            EngineLoop(core, arrivals.receive, arrivals.send).run()
            steps.append(watch.timed)
            core.executor = inner
    return found, steps


def tell_constants(spec: ModelSpec, loads: list[list[TimedStep]]) -> None:
    """What is left of steps without them, by least squares, and how long before their beginning steps are planned."""
    efficiency = replace(Efficiency(), wide_layer_s=0.0, prompts_layer_s=0.0)
    cost = RooflineCost(spec, DEVICES["h200"], efficiency=efficiency)
    features, rest, leads = [], [], []
    for steps in loads:
        for before, step in itertools.pairwise(steps):
            seconds, load = step.ended_s - before.ended_s, step.load
            if not load.num_prompt_tokens:
                leads.append(before.ended_s - step.planned_s)
            if load.num_decodes and seconds < _LONGEST_STEP_S and load.num_prompt_tokens <= _MOST_PROMPT_TOKENS:
                is_wide = cost.padded_rows(load)[0] > MAX_FUSED_ROWS
                features.append((spec.num_layers * is_wide, spec.num_layers * (load.num_prompts > 0)))
                rest.append(seconds - cost.load_s(load))
    wide_s, prompts_s = np.linalg.lstsq(np.array(features), np.array(rest), rcond=None)[0]
    print(
        f"{len(rest):,} steps: {1e6 * wide_s:.1f} µs a layer above {MAX_FUSED_ROWS} rows, {1e6 * prompts_s:.1f} more "
        f"with prompts; planned {1e3 * np.median(leads):.2f} ms ahead"
    )


def main() -> None:
    path = str(write_llama_8b())
    config = EngineConfig(model=path, load_format="dummy", max_model_len=4096, skip_tokenizer_init=True)
    opened = open_model(config)
    side = build_token_side(config, opened)
    side.smooth_for_readers(config)
    settle_for_serving()
    found, steps = measure(side.core)
    side.core.close()
    for rate, seen in found.items():
        print(f"{rate} requests/s: {seen}")
    tell_constants(opened.spec, steps)


if __name__ == "__main__":
    main()
