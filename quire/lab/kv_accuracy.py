"""Experiment: what a smaller KV cache costs in accuracy. Perplexity on a fixed text with keys and values in fewer bits.

The text runs as a prompt in short chunks, so that every chunk reads what the cache kept of the ones before.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from quire import EngineConfig, SamplingParams
from quire.bench.charts import bar_chart
from quire.bench.units import listed, number, signed_percent, size
from quire.bench.workloads import usable_vocab
from quire.errors import ConfigError, DownloadError, ModelError, QuireError
from quire.lab.context import DEFAULT_MODEL, LabContext
from quire.lab.experiment import Data, Experiment, Record, Story
from quire.lab.passage import PASSAGE
from quire.lab.result import Finding, Table

if TYPE_CHECKING:
    from quire import LLMEngine

KEY = "kv-accuracy"
RANDOM = "random weights"
_CHUNK = 128
_KV_BYTES = 512 << 20
_LIMIT_PERCENT = {"fp8": 2.0, "bfloat16": 1.0}  # what a dtype may cost in perplexity; any other may cost 0.1
_NOTHING = "The perplexity of random weights, and how it changes, say next to nothing about a trained model."


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


def measure(context: LabContext) -> Data:
    pairs = [("float32", "float32"), ("float32", "float16"), ("float32", "bfloat16"), ("float32", "fp8")]
    if context.on_gpu:
        pairs = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "fp8")]
    config, is_real = reading_model(context)
    readings = [_read(context, config, dtype, kv, is_real) for dtype, kv in pairs]
    done = [each for each in readings if each.logprobs]
    if not done:
        raise ConfigError(f"no pair of dtypes could be run: {readings[0].refusal}")
    return {
        "model": config.model if is_real else RANDOM,
        "tokens": len(done[0].logprobs),
        "readings": [_data(each, done) for each in readings],
    }


def _data(reading: Reading, done: list[Reading]) -> Record:
    data: Record = {"dtype": reading.dtype, "kv_dtype": reading.kv_dtype, "refusal": reading.refusal}
    data |= {"is_failure": reading.is_failure, "kv_bytes_per_token": reading.token_bytes}
    if reading.logprobs:
        same = next(each for each in done if each.dtype == reading.dtype)
        data["perplexity"] = reading.perplexity
        data["shift"] = asdict(Shift.between(reading, done[0]))
        data["shift_at_same_weights"] = asdict(Shift.between(reading, same))
    return data


def reading_model(context: LabContext) -> tuple[EngineConfig, bool]:
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


def _read(context: LabContext, config: EngineConfig, dtype: str, kv_dtype: str, is_real: bool) -> Reading:
    from quire import LLMEngine

    reading = Reading(dtype, kv_dtype)
    context.report(f"{kv_dtype} KV, {dtype} weights")
    try:
        engine = LLMEngine.from_config(config.replace(dtype=dtype, kv_cache_dtype=kv_dtype))
    except QuireError as error:
        reading.refusal = str(error)
        return reading
    except RuntimeError as error:  # a kernel that this device cannot run: the other dtypes are still worth it
        reading.refusal, reading.is_failure = str(error), True
        return reading
    try:
        reading.token_bytes = engine.ledger.block_bytes / engine.ledger.block_size
        for index, token_ids in enumerate(windows(engine, is_real, context)):
            reading.logprobs += logprobs(engine, f"window-{index}", token_ids)
    finally:
        engine.close()
    return reading


def windows(engine: LLMEngine, is_real: bool, context: LabContext) -> list[list[int]]:
    window, num_windows = context.pick((256, 2), (512, 4), (512, 4))
    length = min(window, engine.max_model_len - 1)
    if is_real and engine.tokenizer is not None:
        ids = engine.tokenizer.encode(PASSAGE)
    else:
        rng = random.Random(context.seed)
        ids = [rng.randrange(10, usable_vocab(engine.spec.vocab_size)) for _ in range(length * num_windows)]
    return [ids[at : at + length] for at in range(0, len(ids), length) if len(ids) - at > 1][:num_windows]


def logprobs(engine: LLMEngine, request_id: str, token_ids: list[int]) -> list[float]:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    engine.add_request(request_id, {"prompt_token_ids": token_ids}, params)
    found: list[Any] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.prompt_logprobs:
                found = list(output.prompt_logprobs)
    return [entry[token].logprob for token, entry in zip(token_ids, found, strict=True) if entry is not None]


# -- what it says


def tell(data: Data, context: LabContext) -> Story:
    readings, is_random = data["readings"], data["model"] == RANDOM
    done = [each for each in readings if "perplexity" in each]
    others = [_name(each) for each in done[1:]]
    shifts = listed([f"{e['kv_dtype']} {signed_percent(e['shift']['perplexity_percent'])}" for e in done[1:]])
    bytes_each = listed([f"{size(each['kv_bytes_per_token'])} in {each['kv_dtype']}" for each in done])
    if is_random:
        headline = f"accuracy not measured, as the weights are random; a token takes {bytes_each}"
    elif shifts:
        headline = f"perplexity against {_name(done[0])}: {shifts}"
    else:
        headline = f"only {_name(done[0])} could be run"
    moved = bar_chart(
        f"How far each token's logprob moves from {_name(done[0])}",
        "mean |Δ logprob|",
        others,
        {"mean": [each["shift"]["mean"] for each in done[1:]]},
        note="Random weights: says nothing about a trained model." if is_random else "",
    )
    taken = {"KiB": [each["kv_bytes_per_token"] / 1024 for each in done]}
    return Story(
        question="Half the bytes a value, or a quarter, mean twice or four times the tokens in the same cache. How "
        "much worse does the model predict a text that it reads through such a cache?",
        headline=headline,
        charts=[moved, bar_chart("KV cache a token", "KiB", [_name(each) for each in done], taken)] if others else [],
        tables=[_table(data)],
        findings=[_finding(each, is_random) for each in done[1:]]
        + [
            Finding(
                f"{_name(each)}: what cannot be is refused, with a way out.",
                f"“{each['refusal']}”",
                not each.get("is_failure", False),
            )
            for each in readings
            if each["refusal"]
        ],
        explanation=_explain_random(done, bytes_each, context) if is_random else _explain(done),
    )


def _name(reading: Record) -> str:
    return f"{reading['kv_dtype']} KV, {reading['dtype']} weights"


def _finding(reading: Record, is_random: bool) -> Finding:
    limit, shift = _LIMIT_PERCENT.get(reading["kv_dtype"], 0.1), reading["shift"]
    expected = f"{_name(reading)}: the perplexity changes by less than {limit:g} %."
    if is_random:
        seen = "The weights are random and predict nothing, so a cache cannot make them predict it worse."
        return Finding(expected, seen, None)
    seen = f"{signed_percent(shift['perplexity_percent'])}, mean |Δ logprob| {number(shift['mean'])}."
    return Finding(expected, seen, abs(shift["perplexity_percent"]) < limit)


def _table(data: Data) -> Table:
    done = [each for each in data["readings"] if "perplexity" in each]
    rows: list[list[object]] = []
    for each in data["readings"]:
        if each not in done:
            rows.append([each["kv_dtype"], each["dtype"], "–", "–", "–", "refused", "–", "–"])
            continue
        room, shift = done[0]["kv_bytes_per_token"] / each["kv_bytes_per_token"], each["shift"]
        moved = "reference" if each is done[0] else signed_percent(shift["perplexity_percent"])
        rows.append([each["kv_dtype"], each["dtype"], size(each["kv_bytes_per_token"]), number(room)])
        rows[-1] += [f"{each['perplexity']:,.4f}", moved, number(shift["mean"]), number(shift["largest"])]
    columns = ["KV cache", "weights", "KV a token", "times the tokens", "perplexity", "change", "mean |Δ logprob|"]
    is_random = data["model"] == RANDOM
    what = "Random tokens" if is_random else "The passage"
    note = f"{data['tokens']:,} tokens, against the first row." + (f" {_NOTHING}" if is_random else "")
    return Table(f"{what}, read through caches of different dtypes", [*columns, "largest"], rows, note)


def _explain_random(done: list[Record], bytes_each: str, context: LabContext) -> list[str]:
    remedy = "Run the lab with a model that has weights of its own."
    if context.on_gpu:
        remedy = (
            f"Have {DEFAULT_MODEL} in the cache (quire pull {DEFAULT_MODEL}, or the cache of a machine that has it) "
            f"and run quire lab --gpu-8b --only {KEY} --fresh: it then reads a passage of English with that model."
        )
    return [
        f"What a cache of fewer bits costs in accuracy was not measured here. {_NOTHING} A perplexity of "
        f"{number(done[0]['perplexity'])} is no better than a blind guess among the whole vocabulary, and whether it "
        f"comes out higher or lower with another dtype is chance. {remedy}",
        f"What it saves does hold: a token takes {bytes_each}.",
    ]


def _explain(done: list[Record]) -> list[str]:
    reference, last = done[0], done[-1]
    paragraphs = []
    same = next(each for each in done if each["dtype"] == last["dtype"])
    if same is not reference and same is not last:
        own = last["shift_at_same_weights"]
        paragraphs.append(
            f"The weights' dtype has its part in that. With the same {last['dtype']} weights, {last['kv_dtype']} "
            f"instead of {same['kv_dtype']} KV moves a logprob by {number(own['mean'])} and the perplexity by "
            f"{signed_percent(own['perplexity_percent'])}."
        )
    halves = {each["kv_dtype"]: each["shift"]["mean"] for each in done if each["dtype"] == reference["dtype"]}
    if halves.get("float16") and halves.get("bfloat16"):
        paragraphs.append(
            f"bfloat16 is {number(halves['bfloat16'] / halves['float16'])} times as far off as float16 in the same "
            "bytes. It keeps 8 bits of a number where float16 keeps 11, a factor of eight, and trades them for a range "
            "that keys and values do not need."
        )
    return paragraphs or ["No other dtype could be read, so there is nothing to compare."]


EXPERIMENT = Experiment(KEY, "Fewer bits a value: the KV cache and accuracy", measure, tell)
