"""Experiment: what a smaller KV cache costs in accuracy. Perplexity on a fixed text with keys and values in fewer bits.

The text runs as a prompt in short chunks, so that every chunk reads what the cache kept of the ones before.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.errors import ConfigError, DownloadError, ModelError, QuireError
from quire.lab.context import DEFAULT_MODEL, LabContext
from quire.lab.passage import PASSAGE
from quire.lab.result import Chart, Finding, Result, Series, Table
from quire.lab.wording import listed, number, signed_percent, size
from quire.params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine

KEY = "kv-accuracy"
TITLE = "Fewer bits a value: the KV cache and accuracy"

_CHUNK = 128
_KV_BYTES = 512 << 20


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
    """How one reading's logprobs differ from another's."""

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
    return Result(
        key=KEY,
        title=TITLE,
        question="Half the bytes a value, or a quarter, mean twice or four times the tokens in the same cache. How "
        "much worse does the model predict a text that it reads through such a cache?",
        tables=[_table(readings, done[0], is_real)],
        charts=_charts(done, is_real),
        findings=_findings(done, readings, is_real),
        explanation=_explain(done, readings, is_real, config),
        data={
            "headline": _headline(done, is_real),
            "model": config.model if is_real else "random weights",
            "tokens": len(done[0].logprobs),
            "readings": [
                {"dtype": e.dtype, "kv_dtype": e.kv_dtype, "refusal": e.refusal, "kv_bytes_per_token": e.token_bytes}
                | ({"perplexity": e.perplexity} if e.logprobs else {})
                for e in readings
            ],
        },
        seconds=time.perf_counter() - started,
    )


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
                found = output.prompt_logprobs
    return [entry[token].logprob for token, entry in zip(token_ids, found, strict=True) if entry is not None]


def _table(readings: list[Reading], reference: Reading, is_real: bool) -> Table:
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
    note = f"{len(reference.logprobs):,} tokens, against the first row."
    if not is_real:
        note += " The weights are random: the perplexity is that of a guess, and only the differences mean anything."
    return Table("The passage, read through caches of different dtypes", columns, rows, note)


def _charts(done: list[Reading], is_real: bool) -> list[Chart]:
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


def _findings(done: list[Reading], readings: list[Reading], is_real: bool) -> list[Finding]:
    findings = []
    for each in done[1:]:
        shift = Shift.between(each, done[0])
        limit = {"fp8": 2.0, "bfloat16": 1.0}.get(each.kv_dtype, 0.1)
        findings.append(
            Finding(
                f"{each.name}: the perplexity changes by less than {limit:g} %.",
                f"{signed_percent(shift.perplexity_percent)}, mean |Δ logprob| {number(shift.mean)}."
                + ("" if is_real else " With random weights that says nothing of language."),
                abs(shift.perplexity_percent) < limit if is_real else None,
            )
        )
    for each in readings:
        if each.refusal:
            findings.append(
                Finding(
                    f"{each.name}: what cannot be is refused, with a way out.", f"“{each.refusal}”", not each.is_failure
                )
            )
    return findings


def _headline(done: list[Reading], is_real: bool) -> str:
    parts = []
    for each in done[1:]:
        shift = Shift.between(each, done[0])
        parts.append(f"{each.kv_dtype} {signed_percent(shift.perplexity_percent)}")
    if not parts:
        return f"only {done[0].name} could be run"
    what = "perplexity" if is_real else "perplexity (random weights)"
    return f"{what} against {done[0].name}: {listed(parts)}"


def _explain(done: list[Reading], readings: list[Reading], is_real: bool, config: EngineConfig) -> list[str]:
    reference = done[0]
    paragraphs = []
    for each in done[1:]:
        shift = Shift.between(each, reference)
        room = reference.token_bytes / each.token_bytes
        if shift.mean < 1e-9:
            effect = "no logprob moves at all"
        else:
            effect = (
                f"a token's logprob moves by {number(shift.mean)} on average, {number(shift.largest)} at most, and the "
                f"perplexity by {signed_percent(shift.perplexity_percent)}"
            )
        paragraphs.append(f"{each.name}: {number(room)} times the tokens in the same bytes; {effect}.")
    same = [each for each in done if each.dtype == done[-1].dtype]
    if len(same) > 1 and same[0] is not reference:
        shift = Shift.between(same[-1], same[0])
        paragraphs.append(
            f"Most of that may be the weights' own rounding: with the same {same[0].dtype} weights, "
            f"{same[-1].kv_dtype} instead of {same[0].kv_dtype} KV moves a logprob by {number(shift.mean)} and the "
            f"perplexity by {signed_percent(shift.perplexity_percent)}."
        )
    halves = {each.kv_dtype: Shift.between(each, reference).mean for each in done if each.dtype == reference.dtype}
    if halves.get("float16") and halves.get("bfloat16"):
        ratio = halves["bfloat16"] / halves["float16"]
        paragraphs.append(
            f"bfloat16 is {number(ratio)} times as far off as float16 in the same bytes: it keeps 8 bits of a number "
            "where float16 keeps 11, a factor of eight, and trades them for a range that keys and values do not need."
            if ratio > 2
            else f"float16 and bfloat16 are about as far off as each other ({number(ratio)} times)."
        )
    if not is_real:
        paragraphs.append(
            f"The weights of {config.model} are random here. Put the default model where quire can find it, and this "
            "section reads the passage with it."
        )
    return paragraphs
