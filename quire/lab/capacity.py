"""How many devices of which kind serve a rate of requests within limits on latency, at the least price.

Arithmetic bounds what every kind of device and every degree could serve at best; the candidates are then simulated, the
cheapest bound first, until no bound is below the cheapest that was found. A simulation serves a sampled part of the
traffic with one engine, and looks for the highest rate at which the slowest percent is within the limits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quire.bench.charts import Chart, line_chart
from quire.bench.report import RunReport
from quire.bench.units import number, table
from quire.bench.workloads import sharegpt
from quire.config import EngineConfig
from quire.errors import ConfigError, MemoryBudgetError
from quire.lab.simulated import SimulatedEngine, engine_by_arithmetic
from quire.lab.traffic import Kind
from quire.models.spec import ModelSpec
from quire.sim.devices import Device
from quire.sim.fleet import Fleet
from quire.sim.traffic import SimRequest
from quire.step_costs import StepLoad

TENSOR_PARALLEL, PIPELINE_PARALLEL = (1, 2, 4, 8), (1, 2, 4)
HEADROOM = 0.1  # the share of a replica's rate that is left for bursts and for a replica that is missing
_NUM_LENGTHS = 600  # that a simulation draws from
_MIN_REQUESTS, _MAX_REQUESTS = 200, 4_000  # of one simulation, for each replica
_OPTIMISM = 1.15
_STABLE = 0.9  # the share of the requests of the second half that must end in it; long ones are still under way
_NUM_TRIES = 6  # rates that are tried for a candidate
_MAX_SIMULATED = 10  # candidates
_CHECKED_REPLICAS = 4  # replicas of the final answer that are simulated together behind the router


@dataclass(slots=True, frozen=True)
class Limits:
    """Seconds, at the 99th percentile."""

    ttft_s: float
    itl_s: float


@dataclass(slots=True)
class Candidate:
    """One kind of device at one pair of degrees. Rates are requests/s of one replica."""

    device: Device
    tensor_parallel: int
    pipeline_parallel: int
    engine: SimulatedEngine
    best_ttft_s: float  # what a mean prompt takes alone
    best_itl_s: float  # what a token of a single sequence takes
    bound: float  # no more than this by arithmetic; 0: the limits cannot be met even alone
    rate: float | None = None  # found by simulation
    ttft_s: float = 0.0  # at that rate
    itl_s: float = 0.0
    max_running: int = 0
    kv_usage: float = 0.0

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def replicas_for(self, rate: float, own: float | None = None) -> int:
        return math.ceil(rate / ((self.rate if own is None else own) or 1e-9) / (1 - HEADROOM))

    def price_for(self, rate: float, own: float | None = None) -> float:
        """Dollars an hour, for as many replicas as serve this rate."""
        return self.replicas_for(rate, own) * self.num_devices * self.device.price_per_hour

    @property
    def name(self) -> str:
        return f"{self.device.name} tp {self.tensor_parallel} pp {self.pipeline_parallel}"


@dataclass(slots=True)
class Capacity:
    """The answer, cheapest first."""

    model: str
    rate: float
    limits: Limits
    found: list[Candidate]
    not_simulated: list[Candidate]
    unfit: dict[str, str]  # device -> why the model does not fit, at the degree that comes nearest
    traffic: str
    checked: dict[str, float] = field(default_factory=dict)  # the cheapest, as several replicas behind the router

    @property
    def best(self) -> Candidate:
        return self.found[0]

    def flags(self) -> str:
        one = self.best
        words = [f"quire serve {self.model}"]
        words += [f"-tp {one.tensor_parallel}"] if one.tensor_parallel > 1 else []
        words += [f"-pp {one.pipeline_parallel}"] if one.pipeline_parallel > 1 else []
        words.append(f"-dp {one.replicas_for(self.rate)}")
        # A little above what ran at the rate that was found: more would be slower than the limits.
        words.append(f"--max-num-seqs {-(-int(1.25 * one.max_running) // 8) * 8}")
        return " ".join(words)

    def assumptions(self) -> list[str]:
        devices = {one.device.name: one.device for one in [*self.found, *self.not_simulated]}
        prices = ", ".join(f"{name} {device.price_per_hour:g}" for name, device in devices.items())
        return [
            f"traffic: {self.traffic}, Poisson arrivals; limits hold for the slowest percent",
            f"{100 * HEADROOM:.0f} % of each replica's rate stays free",
            "shares of data sheets that are reached, and launches, as measured on one H200 (quire sim --validate h200)",
            "sums and sends between devices by formula, not measured: docs/scale.md has them",
            f"dollars an hour for a device: {prices}; change them with --devices FILE",
        ]

    def to_data(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "requests_per_s": self.rate,
            "limits": asdict(self.limits),
            "flags": self.flags(),
            "candidates": [_as_data(one, self.rate) for one in self.found],
            "not_simulated": [one.name for one in self.not_simulated],
            "unfit": self.unfit,
            "checked": self.checked,
            "assumptions": self.assumptions(),
        }


def _as_data(one: Candidate, rate: float) -> dict[str, Any]:
    return {
        "device": one.device.name,
        "tensor_parallel": one.tensor_parallel,
        "pipeline_parallel": one.pipeline_parallel,
        "replicas": one.replicas_for(rate),
        "devices": one.replicas_for(rate) * one.num_devices,
        "dollars_per_hour": one.price_for(rate),
        "requests_per_s_of_a_replica": one.rate,
        "ttft_p99_s": one.ttft_s,
        "itl_p99_s": one.itl_s,
        "max_running": one.max_running,
        "kv_usage": one.kv_usage,
    }


def plan_capacity(
    config: EngineConfig,
    spec: ModelSpec,
    devices: Sequence[Device],
    *,
    rate: float,
    limits: Limits,
    mix: Sequence[Kind] = (),
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Capacity:
    """Raises with the numbers where nothing fits or nothing is fast enough."""
    lengths = _lengths(mix, config.max_model_len or spec.max_position, seed)
    candidates, unfit = _candidates(config, spec, devices, lengths, limits)
    if not candidates:
        reasons = "; ".join(f"{name}: {why}" for name, why in unfit.items())
        raise MemoryBudgetError(f"{config.model} fits on none of these devices. {reasons}")
    able = sorted((one for one in candidates if one.bound), key=lambda one: one.price_for(rate, one.bound))
    if not able:
        raise ConfigError(_too_fast(candidates, limits))
    found: list[Candidate] = []
    simulated = 0
    for one in able:
        best = min((other.price_for(rate) for other in found), default=math.inf)
        if simulated == _MAX_SIMULATED or one.price_for(rate, one.bound) >= best:
            break
        tell(f"simulating {one.name}")
        simulated += 1
        _find_rate(one, lengths, limits, seed)
        if one.rate:
            found.append(one)
    if not found:
        raise ConfigError(_too_fast(able[:simulated], limits))
    found.sort(key=lambda one: (one.price_for(rate), one.num_devices))
    traffic = "ShareGPT-like lengths" if not mix else f"{len(mix)} kinds of request"
    capacity = Capacity(config.model, rate, limits, found, able[simulated:], unfit, traffic)
    tell(f"checking {found[0].name} behind the router")
    capacity.checked = _check(found[0], rate, lengths, seed)
    return capacity


def _lengths(mix: Sequence[Kind], max_len: int, seed: int) -> list[tuple[int, int]]:
    if not mix:
        pairs = [(len(prompt), num_out) for prompt, num_out in sharegpt(1000, seed=seed + 1, num=_NUM_LENGTHS)]
    else:
        kinds = random.Random(seed).choices(mix, [kind.share for kind in mix], k=_NUM_LENGTHS)
        pairs = [(kind.prompt_len, kind.output_len) for kind in kinds]
    return [(min(num_in, max_len - 2), max(1, min(num_out, max_len - num_in - 1))) for num_in, num_out in pairs]


def _candidates(
    config: EngineConfig, spec: ModelSpec, devices: Sequence[Device], lengths: list[tuple[int, int]], limits: Limits
) -> tuple[list[Candidate], dict[str, str]]:
    found: list[Candidate] = []
    unfit: dict[str, str] = {}
    for device in devices:
        fits = False
        for ranks in TENSOR_PARALLEL:
            for stages in PIPELINE_PARALLEL:
                try:
                    engine = engine_by_arithmetic(config, spec, device, tensor_parallel=ranks, pipeline_parallel=stages)
                except MemoryBudgetError as error:
                    unfit[device.name] = str(error)  # the last one had the most devices
                    continue
                except ConfigError:
                    continue  # heads or layers do not divide so, or a machine has fewer
                fits = True
                found.append(_bounded(device, ranks, stages, engine, lengths, limits))
        if fits:
            unfit.pop(device.name, None)
    return found, unfit


def _bounded(
    device: Device, ranks: int, stages: int, engine: SimulatedEngine, lengths: list[tuple[int, int]], limits: Limits
) -> Candidate:
    """The most that arithmetic allows: no waiting, no watermark, prompts at the rate of the largest step."""
    cost = engine.cost
    num_in = sum(one for one, _ in lengths) / len(lengths)
    num_out = sum(one for _, one in lengths) / len(lengths)
    context = num_in + num_out / 2
    ttft_s = engine.front_s + cost.step_s([round(num_in)], [0])
    itl_s = cost.step_s([1], [round(context)])
    scheduler = engine.config.scheduler
    width = min(scheduler.max_num_seqs, int(engine.config.num_blocks * engine.config.block_size / context))
    bound = 0.0
    if ttft_s <= limits.ttft_s and itl_s <= limits.itl_s and width:
        large = scheduler.max_num_batched_tokens
        whole, half = (StepLoad(num_prompts=1, num_prompt_tokens=num) for num in (large, large // 2))
        prompt_token_s = (cost.load_s(whole) - cost.load_s(half)) / (large - large // 2)
        num = 1
        while num <= width:
            step_s = cost.load_s(StepLoad(num_decodes=num, num_decode_kv_tokens=round(num * context)))
            if step_s > limits.itl_s:
                break
            # In steady state a request takes its prompt's time and its share of the steps that it decodes in; a little
            # less, since what prompts and decodes run together reads the weights once.
            bound = max(bound, _OPTIMISM / (num_in * prompt_token_s + num_out * step_s / num))
            num = num + 1 if num < 8 else -(-num * 5 // 4)
    return Candidate(device, ranks, stages, engine, ttft_s, itl_s, bound)


def _find_rate(one: Candidate, lengths: list[tuple[int, int]], limits: Limits, seed: int) -> None:
    """The highest of a few rates at which the limits hold, between nothing and the bound."""
    low, high = 0.0, one.bound
    for _ in range(_NUM_TRIES):
        rate = (low + high) / 2
        fleet, report = _simulate(one, 1, rate, lengths, seed)
        assert report.kv is not None
        if (
            report.ttft_s is not None
            and report.itl_s is not None
            and report.ttft_s.p99 <= limits.ttft_s
            and report.itl_s.p99 <= limits.itl_s
            # A queue that only grows may still be within the limits when the simulation ends.
            and len(fleet.times.whole_s) >= _STABLE * rate * fleet.now_s / 2
        ):
            low = rate
            one.rate, one.ttft_s, one.itl_s = rate, report.ttft_s.p99, report.itl_s.p99
            one.max_running = max(sample.running for sample in fleet.samples)
            one.kv_usage = report.kv.peak_blocks / one.engine.config.num_blocks
        else:
            high = rate


def _simulate(
    one: Candidate, num_replicas: int, rate: float, lengths: list[tuple[int, int]], seed: int
) -> tuple[Fleet, RunReport]:
    """Two lives of a request to come to a steady state, and two to look at it; lives as arithmetic has them."""
    num_out = sum(one for _, one in lengths) / len(lengths)
    context = sum(num_in + num_out / 2 for num_in, num_out in lengths) / len(lengths)
    step_s = one.best_itl_s
    for _ in range(20):  # as many run at once as arrive while one runs, which takes longer the more run
        num = max(1, min(one.engine.config.scheduler.max_num_seqs, round(rate / num_replicas * num_out * step_s)))
        step_s = one.engine.cost.load_s(StepLoad(num_decodes=num, num_decode_kv_tokens=round(num * context)))
    half_s = max(2 * num_out * step_s, _MIN_REQUESTS / 2 / rate)
    half_s = min(half_s, _MAX_REQUESTS * num_replicas / 2 / rate)
    rng, now_s, requests = random.Random(seed), 0.0, []
    while now_s <= 2 * half_s:
        requests.append(SimRequest(now_s, *rng.choice(lengths)))
        now_s += rng.expovariate(rate)
    engine = one.engine
    # Prompts have nothing in common, so blocks that no batch could fill would only take time to make.
    most = int(1.5 * engine.config.scheduler.max_num_seqs * 2 * context / engine.config.block_size) + 1_000
    config = replace(engine.config, num_blocks=min(engine.config.num_blocks, most), enable_prefix_caching=False)
    policy = "first-token" if num_replicas > 1 else "round-robin"
    fleet = Fleet(config=config, cost=engine.cost, num_replicas=num_replicas, policy=policy, front_s=engine.front_s)
    fleet.run(requests, from_s=half_s, until_s=2 * half_s)
    return fleet, fleet.report("", len(requests))


def _check(one: Candidate, rate: float, lengths: list[tuple[int, int]], seed: int) -> dict[str, float]:
    """Simulate some of the replicas together behind the router, at their share of the rate."""
    num = min(one.replicas_for(rate), _CHECKED_REPLICAS)
    share = rate / one.replicas_for(rate) * num
    report = _simulate(one, num, share, lengths, seed + 1)[1]
    found = {"replicas": float(num), "requests_per_s": share}
    if report.ttft_s is not None and report.itl_s is not None:
        found |= {"ttft_p99_s": report.ttft_s.p99, "itl_p99_s": report.itl_s.p99}
    return found


def _too_fast(candidates: Sequence[Candidate], limits: Limits) -> str:
    first = min(candidates, key=lambda one: one.best_ttft_s)
    between = min(candidates, key=lambda one: one.best_itl_s)
    return (
        f"no device meets ttft={number(1e3 * limits.ttft_s)}ms,itl={number(1e3 * limits.itl_s)}ms: even alone a "
        f"mean prompt takes at least {number(1e3 * first.best_ttft_s)} ms ({first.name}), and a token at least "
        f"{number(1e3 * between.best_itl_s)} ms ({between.name}). Raise --slo, or take a smaller model"
    )


# -- for people


def as_text(capacity: Capacity) -> str:
    heads = ["device", "tp", "pp", "replicas", "devices", "$/hour", "req/s each"]
    heads += ["first token p99", "inter-token p99", "KV"]
    rows = []
    for one in capacity.found:
        replicas = one.replicas_for(capacity.rate)
        rows.append([
            one.device.name, str(one.tensor_parallel), str(one.pipeline_parallel), f"{replicas:,}",
            f"{replicas * one.num_devices:,}", f"{one.price_for(capacity.rate):,.2f}", number(one.rate),
            f"{number(1e3 * one.ttft_s)} ms", f"{number(1e3 * one.itl_s)} ms", f"{100 * one.kv_usage:.0f} %",
        ])  # fmt: skip
    best, checked, limits = capacity.best, capacity.checked, capacity.limits
    lines = [
        f"{capacity.model}: {number(capacity.rate)} requests/s with first tokens within "
        f"{number(1e3 * limits.ttft_s)} ms and {number(1e3 * limits.itl_s)} ms between tokens, for 99 of 100",
        "",
        table(heads, rows),
        "",
        f"Cheapest: {best.replicas_for(capacity.rate) * best.num_devices:,} × {best.device.name}, "
        f"{best.price_for(capacity.rate):,.2f} $ an hour, "
        f"{number(best.price_for(capacity.rate) / capacity.rate / 3600 * 1e6)} $ for a million requests",
        f"  {capacity.flags()}",
        f"  {checked['replicas']:.0f} of these together behind the router: first token p99 "
        f"{number(1e3 * checked.get('ttft_p99_s', math.nan))} ms, inter-token p99 "
        f"{number(1e3 * checked.get('itl_p99_s', math.nan))} ms",
    ]
    price = best.price_for(capacity.rate)
    dearer = [one.name for one in capacity.not_simulated if one.price_for(capacity.rate, one.bound) >= price]
    others = [one.name for one in capacity.not_simulated if one.name not in dearer]
    for title, names in (
        ("Dearer even at best, and so not simulated", dearer),
        (f"Perhaps cheaper, but beyond the {_MAX_SIMULATED} that are simulated (name one by --gpu)", others),
    ):
        if names:
            lines.append(f"{title}: {', '.join(names[:6])}{f' and {len(names) - 6} more' if len(names) > 6 else ''}")
    lines += [f"Does not fit: {why}" for why in capacity.unfit.values()]
    return "\n".join([*lines, "", "Assumptions", *(f"  {text}" for text in capacity.assumptions())])


def cost_chart(capacity: Capacity) -> Chart:
    """Dollars an hour against requests/s, for each device the best of its degrees."""
    rates = [capacity.rate * 2**power for power in (-6, -5, -4, -3, -2, -1, 0, 1)]
    lines = {}
    for name in dict.fromkeys(one.device.name for one in capacity.found):
        own = [one for one in capacity.found if one.device.name == name]
        lines[name] = (rates, [min(one.price_for(rate) for one in own) for rate in rates])
    title = f"{capacity.model}: cost against rate"
    return line_chart(
        title, "requests/s", "dollars an hour", lines, log="xy", note="Stairs: one replica after the other."
    )
