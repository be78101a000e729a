"""Experiment: what a smaller KV cache costs in accuracy. Perplexity on a fixed text with keys and values in fewer bits.

The text runs as a prompt in short chunks, so that every chunk reads what the cache kept of the ones before.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from quire.bench.charts import Chart, Series
from quire.bench.units import listed, number, signed_percent, size
from quire.config import EngineConfig
from quire.errors import ConfigError, DownloadError, ModelError, QuireError
from quire.lab.context import DEFAULT_MODEL, LabContext
from quire.lab.passage import PASSAGE
from quire.lab.result import Finding, Result, Table
from quire.params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine

KEY = "kv-accuracy"
TITLE = "Fewer bits a value: the KV cache and accuracy"

RANDOM = "random weights"
_TABLE_TITLE = "{}, read through caches of different dtypes"

_CHUNK = 128
_KV_BYTES = 512 << 20
_NOTHING = "The perplexity of random weights, and how it changes, say next to nothing about a trained model."

Run = dict[str, Any]  # a Reading as data: see _data


@dataclass(slots=True)
class Reading:
    """The passage read with one pair of dtypes: a logprob for every token after each window's first."""

    dtype: str
    kv_dtype: str
    token_bytes: float = 0.0
    logprobs: list[float] = field(default_factory=list)
    refusal: str = ""
    is_failure: bool = False  # not refused: it broke

    @property
    def name(self) -> str:
        return f"{self.kv_dtype} KV, {self.dtype} weights"

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


@dataclass(slots=True, frozen=True)
class Shift:
    """How one reading's logprobs differ from another's, token by token."""

    perplexity_percent: float
    mean: float
    largest: float

    @classmethod
    def between(cls, reading: Reading, reference: Reading) -> Shift:
        gaps = [abs(a - b) for a, b in zip(reading.logprobs, reference.logprobs, strict=True)]
        ratio = reading.perplexity / reference.perplexity
        return cls(100 * (ratio - 1), sum(gaps) / len(gaps), max(gaps))


def run(context: LabContext) -> Result:
    started = time.perf_counter()
    window, num_windows = context.pick((256, 2), (512, 4), (512, 4))
    pairs = [("float32", "float32"), ("float32", "float16"), ("float32", "bfloat16"), ("float32", "fp8")]
    if context.on_gpu:
        pairs = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "fp8")]
    config, is_real = _model(context)
    readings = [_read(context, config, dtype, kv, is_real, window, num_windows) for dtype, kv in pairs]
    done = [each for each in readings if each.logprobs]
    if not done:
        raise ConfigError(f"no pair of dtypes could be run: {readings[0].refusal}")
    result = Result(
        key=KEY,
        title=TITLE,
        question="Half the bytes a value, or a quarter, mean twice or four times the tokens in the same cache. How "
        "much worse does the model predict a text that it reads through such a cache?",
        tables=[_table(readings, done[0])],
        charts=_charts(done),
        data={
            "model": config.model if is_real else RANDOM,
            "tokens": len(done[0].logprobs),
            "readings": [_data(each, readings) for each in readings],
        },
        seconds=time.perf_counter() - started,
    )
    tell(result, context)
    return result


def _data(reading: Reading, readings: list[Reading]) -> dict[str, Any]:
    data: dict[str, Any] = {"dtype": reading.dtype, "kv_dtype": reading.kv_dtype, "refusal": reading.refusal}
    data |= {"is_failure": reading.is_failure, "kv_bytes_per_token": reading.token_bytes}
    if reading.logprobs:
        done = [each for each in readings if each.logprobs]
        same = [each for each in done if each.dtype == reading.dtype]
        data["perplexity"] = reading.perplexity
        data["shift"] = asdict(Shift.between(reading, done[0]))
        data["shift_at_same_weights"] = asdict(Shift.between(reading, same[0]))
    return data


def tell(result: Result, context: LabContext) -> None:
    """The words, from the data."""
    readings = result.data["readings"]
    done = [each for each in readings if "perplexity" in each]
    if result.data["model"] == RANDOM:
        _tell_random(result, readings, done, _remedy(context))
    elif "shift" in done[0]:  # else a report of a time when the shifts stood in its words alone: those are kept
        result.tables[0].note = f"{result.data['tokens']:,} tokens, against the first row."
        result.findings, result.explanation = _findings(done, readings), _explain(done)
        result.data["headline"] = _headline(done)


def _remedy(context: LabContext) -> str:
    if not context.on_gpu:
        return "Run the lab with a model that has weights of its own."
    return (
        f"Have {DEFAULT_MODEL} in the cache (quire pull {DEFAULT_MODEL}, or the cache of a machine that has it) and "
        f"run quire lab --gpu-8b --only {KEY} --fresh: it then reads a passage of English with that model."
    )


def _tell_random(result: Result, readings: list[Run], done: list[Run], remedy: str) -> None:
    """Random weights predict nothing, so nothing can make them predict it worse: only the bytes are a result."""
    result.tables[0].title = _TABLE_TITLE.format("Random tokens")
    result.tables[0].note = (
        f"{result.data['tokens']:,} random tokens, against the first row. {_NOTHING} The last columns say how far "
        "rounding moves its numbers, which are spread otherwise than a trained model's."
    )
    for chart in result.charts[:-1]:
        chart.note = "Random weights: says nothing about a trained model."
    result.findings = [
        Finding(
            f"{_name(each)}: the perplexity changes by less than {_limit(each):g} %.",
            "The weights are random and predict nothing, so a cache cannot make them predict it worse.",
            None,
        )
        for each in done[1:]
    ] + _refusals(readings)
    bytes_each = listed([f"{size(each['kv_bytes_per_token'])} in {each['kv_dtype']}" for each in done])
    result.explanation = [
        f"What a cache of fewer bits costs in accuracy was not measured here. {_NOTHING} A perplexity of "
        f"{number(done[0]['perplexity'])} is no better than a blind guess among the whole vocabulary, and whether it "
        f"comes out higher or lower with another dtype is chance. {remedy}",
        f"What it saves does hold: a token takes {bytes_each}.",
    ]
    result.data["headline"] = f"accuracy not measured, as the weights are random; a token takes {bytes_each}"


def _model(context: LabContext) -> tuple[EngineConfig, bool]:
    """A model whose predictions mean something, where one can be had; else the lab's own, with random weights."""
    from quire.weights import resolve_model

    base = context.settings.engine_config()
    small: dict[str, Any] = {"kv_cache_memory_bytes": _KV_BYTES, "max_num_seqs": 8, "max_num_batched_tokens": _CHUNK}
    small |= {"swap_space_gb": 0.0, "max_model_len": None}
    if base.load_format != "dummy":
        return base.replace(**small), True
    if context.on_gpu:
        try:
            resolve_model(DEFAULT_MODEL)
            return base.replace(**small | {"model": DEFAULT_MODEL, "load_format": "auto"}), True
        except (DownloadError, ModelError):
            small["kv_cache_memory_bytes"] = 4 * _KV_BYTES
    return base.replace(**small | {"max_model_len": base.max_model_len}), False


def _read(
    context: LabContext, config: EngineConfig, dtype: str, kv_dtype: str, is_real: bool, window: int, num_windows: int
) -> Reading:
    from quire.engine.llm_engine import LLMEngine

    reading = Reading(dtype, kv_dtype)
    context.report(reading.name)
    try:
        engine = LLMEngine.from_config(config.replace(dtype=dtype, kv_cache_dtype=kv_dtype))
    except QuireError as error:
        reading.refusal = str(error)
        return reading
    except RuntimeError as error:  # of a kernel that this device cannot run: the other dtypes are still worth reading
        reading.refusal, reading.is_failure = str(error), True
        return reading
    try:
        reading.token_bytes = engine.ledger.block_bytes / engine.ledger.block_size
        for number_of, token_ids in enumerate(_windows(engine, is_real, window, num_windows, context.seed)):
            reading.logprobs += _logprobs(engine, f"window-{number_of}", token_ids)
    finally:
        engine.close()
    return reading


def _windows(engine: LLMEngine, is_real: bool, window: int, num_windows: int, seed: int) -> list[list[int]]:
    length = min(window, engine.max_model_len - 1)
    if is_real and engine.tokenizer is not None:
        ids = engine.tokenizer.encode(PASSAGE)
    else:
        rng = random.Random(seed)
        ids = [rng.randrange(10, min(engine.spec.vocab_size, 128_000)) for _ in range(length * num_windows)]
    return [ids[at : at + length] for at in range(0, len(ids), length) if len(ids) - at > 1][:num_windows]


def _logprobs(engine: LLMEngine, request_id: str, token_ids: list[int]) -> list[float]:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    engine.add_request(request_id, {"prompt_token_ids": token_ids}, params)
    found: list[Any] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.prompt_logprobs:
                found = list(output.prompt_logprobs)
    return [entry[token].logprob for token, entry in zip(token_ids, found, strict=True) if entry is not None]


def _table(readings: list[Reading], reference: Reading) -> Table:
    rows: list[list[object]] = []
    for each in readings:
        if not each.logprobs:
            rows.append([each.kv_dtype, each.dtype, "–", "–", "refused", "–", "–"])
            continue
        shift = Shift.between(each, reference)
        rows.append(
            [
                each.kv_dtype,
                each.dtype,
                size(each.token_bytes),
                f"{each.perplexity:,.4f}",
                "reference" if each is reference else signed_percent(shift.perplexity_percent),
                number(shift.mean),
                number(shift.largest),
            ]
        )
    columns = ["KV cache", "weights", "KV a token", "perplexity", "change", "mean |Δ logprob|", "largest"]
    return Table(_TABLE_TITLE.format("The passage"), columns, rows)


def _charts(done: list[Reading]) -> list[Chart]:
    others: list[float | str] = [each.name for each in done[1:]]
    if not others:
        return []
    shifts = [Shift.between(each, done[0]) for each in done[1:]]
    return [
        Chart(
            "bar",
            f"How far each token's logprob moves from {done[0].name}",
            "",
            "mean |Δ logprob|",
            [Series("mean", others, [shift.mean for shift in shifts])],
        ),
        Chart(
            "bar",
            "KV cache a token",
            "",
            "KiB",
            [Series("KiB", [each.name for each in done], [each.token_bytes / 1024 for each in done])],
        ),
    ]


def _name(reading: Run) -> str:
    return f"{reading['kv_dtype']} KV, {reading['dtype']} weights"


def _limit(reading: Run) -> float:
    """Percent of perplexity that a dtype may cost."""
    return {"fp8": 2.0, "bfloat16": 1.0}.get(reading["kv_dtype"], 0.1)


def _findings(done: list[Run], readings: list[Run]) -> list[Finding]:
    findings = []
    for each in done[1:]:
        percent = each["shift"]["perplexity_percent"]
        findings.append(
            Finding(
                f"{_name(each)}: the perplexity changes by less than {_limit(each):g} %.",
                f"{signed_percent(percent)}, mean |Δ logprob| {number(each['shift']['mean'])}.",
                abs(percent) < _limit(each),
            )
        )
    return findings + _refusals(readings)


def _refusals(readings: list[Run]) -> list[Finding]:
    return [
        Finding(
            f"{_name(each)}: what cannot be is refused, with a way out.",
            f"“{each['refusal']}”",
            not each.get("is_failure", False),
        )
        for each in readings
        if each["refusal"]
    ]


def _headline(done: list[Run]) -> str:
    parts = [f"{each['kv_dtype']} {signed_percent(each['shift']['perplexity_percent'])}" for each in done[1:]]
    if not parts:
        return f"only {_name(done[0])} could be run"
    return f"perplexity against {_name(done[0])}: {listed(parts)}"


def _explain(done: list[Run]) -> list[str]:
    reference = done[0]
    paragraphs = []
    for each in done[1:]:
        shift = each["shift"]
        room = reference["kv_bytes_per_token"] / each["kv_bytes_per_token"]
        if shift["mean"] < 1e-9:
            effect = "no logprob moves at all"
        else:
            effect = (
                f"a token's logprob moves by {number(shift['mean'])} on average, {number(shift['largest'])} at most, "
                f"and the perplexity by {signed_percent(shift['perplexity_percent'])}"
            )
        paragraphs.append(f"{_name(each)}: {number(room)} times the tokens in the same bytes; {effect}.")
    last = done[-1]
    same = [each for each in done if each["dtype"] == last["dtype"]]
    if len(same) > 1 and same[0] is not reference:
        own, whole = last["shift_at_same_weights"], last["shift"]
        whose = (
            "the cache's own rounding"
            if own["mean"] > 0.7 * whole["mean"]
            else "the weights' rounding"
            if own["mean"] < 0.4 * whole["mean"]
            else "the cache's rounding and the weights' together"
        )
        paragraphs.append(
            f"That is {whose}: with the same {last['dtype']} weights, {last['kv_dtype']} instead of "
            f"{same[0]['kv_dtype']} KV moves a logprob by {number(own['mean'])} and the perplexity by "
            f"{signed_percent(own['perplexity_percent'])}."
        )
    halves = {each["kv_dtype"]: each["shift"]["mean"] for each in done if each["dtype"] == reference["dtype"]}
    if halves.get("float16") and halves.get("bfloat16"):
        ratio = halves["bfloat16"] / halves["float16"]
        paragraphs.append(
            f"bfloat16 is {number(ratio)} times as far off as float16 in the same bytes: it keeps 8 bits of a number "
            "where float16 keeps 11, a factor of eight, and trades them for a range that keys and values do not need."
            if ratio > 2
            else f"float16 and bfloat16 are about as far off as each other ({number(ratio)} times)."
        )
    return paragraphs
