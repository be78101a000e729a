"""Two experiments: what a KV cache in fewer bits costs in accuracy, and what weights in fewer bits do.

A fixed text is read with each format, and how well the model predicts it is compared with float32. The text runs as a
prompt in short chunks, so that every chunk reads what the cache kept of the ones before. For weights, the experiment
also counts how long greedy answers stay the same.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire import EngineConfig, SamplingParams
from quire.bench.charts import bar_chart
from quire.bench.units import listed, number, signed_percent, size
from quire.bench.workloads import usable_vocab
from quire.errors import ConfigError, DownloadError, ModelError, QuireError
from quire.lab.context import DEFAULT_MODEL, PASSAGE, LabContext
from quire.lab.experiment import Data, Experiment, Finding, Record, Result, Table

if TYPE_CHECKING:
    from quire import LLMEngine

RANDOM = "random weights"
_CHUNK = 128
_KV_BYTES = 512 << 20
_PACKED = "as in the file, 8-bit activations"
# What a format may cost in perplexity, in percent.
_KV_LIMITS = {"fp8": 2.0, "bfloat16": 1.0, "float16": 0.1, "float32": 0.1}
_WEIGHT_LIMITS = {_PACKED: 1.0, "int8": 1.0, "fp8": 2.0, "bfloat16": 0.5, "float16": 0.1}
_SAYS_NOTHING = "Random weights: says nothing about a trained model."
_PROMPTS = (
    "The three laws of motion say that",
    "Here is a short story about a lighthouse keeper.",
    "def fibonacci(n):",
    "To make bread at home, first",
    "The main difference between a lake and a river is",
    "Dear Sir or Madam,",
    "Q: Why is the sky blue?\nA:",
    "1, 2, 3, 5, 8, 13,",
)


@dataclass(slots=True)
class Reading:
    """The passage read with one format: a logprob for every token after each window's first. Or why it was not."""

    logprobs: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    token_bytes: float = 0.0  # of the KV cache
    weight_bytes: int = 0
    refusal: str = ""
    is_failure: bool = False  # not refused: it broke

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))

    def shift_from(self, reference: Reading) -> dict[str, float]:
        """How its logprobs differ from another's, token by token."""
        moves = [a - b for a, b in zip(self.logprobs, reference.logprobs, strict=True)]
        gaps = [abs(move) for move in moves]
        percent = 100 * (self.perplexity / reference.perplexity - 1)
        noise = 100 * statistics.stdev(moves) / math.sqrt(len(moves)) if len(moves) > 1 else 0.0  # of the percentage
        return {"perplexity_percent": percent, "mean": sum(gaps) / len(gaps), "largest": max(gaps), "noise": noise}


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


def _read(context: LabContext, config: EngineConfig, name: str, is_real: bool, num_answer_tokens: int = 0) -> Reading:
    from quire import LLMEngine

    reading = Reading()
    context.report(name)
    try:
        engine = LLMEngine.from_config(config)
    except (QuireError, RuntimeError) as error:  # a kernel that this device cannot run: the others are still worth it
        reading.refusal, reading.is_failure = str(error), not isinstance(error, QuireError)
        return reading
    try:
        reading.weight_bytes = engine.ledger.weight_bytes
        reading.token_bytes = engine.ledger.block_bytes / engine.ledger.block_size
        windows = _windows(engine, is_real, context)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        for window, output in zip(windows, _run(engine, windows, params), strict=True):
            entries = zip(window, output.prompt_logprobs, strict=True)
            reading.logprobs += [entry[token].logprob for token, entry in entries if entry is not None]
        if num_answer_tokens:
            starts = [window[:16] for window in windows]
            if is_real and engine.tokenizer is not None:
                starts = [engine.tokenizer.encode(prompt) for prompt in _PROMPTS]
            params = SamplingParams(temperature=0.0, max_tokens=num_answer_tokens, ignore_eos=True, detokenize=False)
            reading.answers = [output.outputs[0].token_ids for output in _run(engine, starts, params)]
    finally:
        engine.close()
    return reading


def _windows(engine: LLMEngine, is_real: bool, context: LabContext) -> list[list[int]]:
    window, num_windows = context.pick((256, 2), (512, 4), (512, 4))
    length = min(window, engine.max_model_len - 1)
    if is_real and engine.tokenizer is not None:
        ids = engine.tokenizer.encode(PASSAGE)
    else:
        rng = random.Random(context.seed)
        ids = [rng.randrange(10, usable_vocab(engine.spec.vocab_size)) for _ in range(length * num_windows)]
    return [ids[at : at + length] for at in range(0, len(ids), length) if len(ids) - at > 1][:num_windows]


def _run(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    """The outputs, in the order of the prompts."""
    for index, token_ids in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": token_ids}, params)
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step() if output.finished}
    return [found[str(index)] for index in range(len(prompts))]


# -- the KV cache


def measure_kv(context: LabContext) -> Data:
    pairs = [("float32", kv_dtype) for kv_dtype in ("float32", "float16", "bfloat16", "fp8")]
    if context.on_gpu:
        pairs = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "fp8")]
    config, is_real = reading_model(context)
    readings = [
        _read(context, config.replace(dtype=dtype, kv_cache_dtype=kv), f"{kv} KV, {dtype} weights", is_real)
        for dtype, kv in pairs
    ]
    done = {pair: reading for pair, reading in zip(pairs, readings, strict=True) if reading.logprobs}
    if not done:
        raise ConfigError(f"no pair of dtypes could be run: {readings[0].refusal}")
    reference = next(iter(done.values()))
    entries: list[Record] = []
    for (dtype, kv), each in zip(pairs, readings, strict=True):
        entries.append({"dtype": dtype, "kv_dtype": kv, "refusal": each.refusal, "is_failure": each.is_failure})
        entries[-1]["kv_bytes_per_token"] = each.token_bytes
        if each.logprobs:
            same = next(other for (weights, _), other in done.items() if weights == dtype)
            entries[-1] |= {"perplexity": each.perplexity, "shift": each.shift_from(reference)}
            entries[-1]["shift_at_same_weights"] = each.shift_from(same)
    model = config.model if is_real else RANDOM
    return {"model": model, "tokens": len(reference.logprobs), "readings": entries}


def tell_kv(data: Data, context: LabContext) -> Result:
    is_random = data["model"] == RANDOM
    entries = [each | {"name": f"{each['kv_dtype']} KV, {each['dtype']} weights"} for each in data["readings"]]
    done = [each for each in entries if "perplexity" in each]
    reference, others = done[0], done[1:]
    names = [each["name"] for each in others]
    bytes_each = listed([f"{size(each['kv_bytes_per_token'])} in {each['kv_dtype']}" for each in done])
    moves, title = [each["shift"]["mean"] for each in others], "How far each token's logprob moves from"
    note, kib = _SAYS_NOTHING if is_random else "", [each["kv_bytes_per_token"] / 1024 for each in done]
    charts = [
        bar_chart(f"{title} {reference['name']}", "mean |Δ logprob|", names, {"mean": moves}, note=note),
        bar_chart("KV cache a token", "KiB", [reference["name"], *names], {"KiB": kib}),
    ]
    rows: list[list[object]] = []
    for each in entries:
        rows.append([each["kv_dtype"], each["dtype"], *["–"] * 2, *_accuracy_cells(each, reference), "–"])
        if "perplexity" in each:
            room = reference["kv_bytes_per_token"] / each["kv_bytes_per_token"]
            rows[-1][2:4] = [size(each["kv_bytes_per_token"]), number(room)]
            rows[-1][-1] = number(each["shift"]["largest"])
    columns = ["KV cache", "weights", "KV a token", "times the tokens", "perplexity", "change", "mean |Δ logprob|"]
    return Result(
        question="Half the bytes a value, or a quarter, mean twice or four times the tokens in the same cache. How "
        "much worse does the model predict a text that it reads through such a cache?",
        headline=f"{_headline(others, 'kv_dtype', reference['name'], is_random)}; a token takes {bytes_each}",
        charts=charts if others else [],
        tables=[Table("The text, read through caches of different dtypes", [*columns, "largest"], rows, _note(data))],
        findings=_findings(entries, others, is_random, [_KV_LIMITS[each["kv_dtype"]] for each in others]),
        explanation=_explain_random(context) if is_random else _explain_kv(reference, done),
    )


def _explain_kv(reference: Record, done: list[Record]) -> list[str]:
    paragraphs = []
    last = done[-1]
    same = next(each for each in done if each["dtype"] == last["dtype"])
    if same is not reference and same is not last:
        own = last["shift_at_same_weights"]
        noise = f", give or take {own['noise']:.2f} % by which tokens were read" if "noise" in own else ""
        paragraphs.append(
            f"The weights' dtype has its part in that. With the same {last['dtype']} weights, {last['kv_dtype']} "
            f"instead of {same['kv_dtype']} KV moves a logprob by {number(own['mean'])} and the perplexity by "
            f"{signed_percent(own['perplexity_percent'])}{noise}. 0.3 % is the aim."
        )
    halves = {each["kv_dtype"]: each["shift"]["mean"] for each in done if each["dtype"] == reference["dtype"]}
    if halves.get("float16") and halves.get("bfloat16"):
        paragraphs.append(
            f"bfloat16 is {number(halves['bfloat16'] / halves['float16'])} times as far off as float16 in the same "
            "bytes. It keeps 8 bits of a number where float16 keeps 11, a factor of eight, and trades them for a range "
            "that keys and values do not need."
        )
    return paragraphs or ["No other dtype could be read, so there is nothing to compare."]


# -- the weights


def formats(context: LabContext, is_gguf: bool) -> dict[str, dict[str, Any]]:
    """The settings that an engine is started with, by the format's name; the reference comes first."""
    found: dict[str, dict[str, Any]] = {"float32": {"dtype": "float32"}}
    if not context.on_gpu and is_gguf:
        found[_PACKED] = {"dtype": "auto"}
    found |= {"float16": {"dtype": "float16"}, "bfloat16": {"dtype": "bfloat16"}}
    return found | ({"fp8": {"quantization": "fp8"}} if context.on_gpu else {"int8": {"quantization": "int8"}})


def measure_weights(context: LabContext) -> Data:
    from quire.weights import resolve_model

    config, is_real = reading_model(context)
    is_gguf = is_real and resolve_model(config.model, load_format=config.load_format).suffix == ".gguf"
    found = {
        name: _read(context, config.replace(**changes), name, is_real, context.pick(32, 64, 128))
        for name, changes in formats(context, is_gguf).items()
    }
    reference = found["float32"]
    if not reference.logprobs:
        raise ConfigError(f"float32, which the others are compared with, could not be run: {reference.refusal}")
    entries: list[Record] = []
    for name, each in found.items():
        entries.append({"name": name, "refusal": each.refusal, "weight_bytes": each.weight_bytes})
        if each.logprobs:
            pairs = zip(each.answers, reference.answers, strict=True)
            entries[-1] |= {"perplexity": each.perplexity, "shift": each.shift_from(reference)}
            entries[-1]["same_tokens"] = [_num_same(ours, theirs) for ours, theirs in pairs]
    return {
        "model": config.model if is_real else RANDOM,
        "tokens": len(reference.logprobs),
        "answer_tokens": len(reference.answers[0]),
        "formats": entries,
    }


def _num_same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    return next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(theirs))


def tell_weights(data: Data, context: LabContext) -> Result:
    is_random, entries = data["model"] == RANDOM, data["formats"]
    others = [each for each in entries[1:] if "perplexity" in each]
    names = [each["name"] for each in others]
    changes = [each["shift"]["perplexity_percent"] for each in others]
    medians = [statistics.median(each["same_tokens"]) for each in others]
    doubt = _SAYS_NOTHING if is_random else ""
    middle = f"Of {data['answer_tokens']}, in the middle of {len(_PROMPTS)} answers."
    same_tokens = "Greedy answers: tokens before the first that differs"
    charts = [
        bar_chart("Perplexity against float32 weights", "percent more", names, {"change": changes}, note=doubt),
        bar_chart(same_tokens, "tokens", names, {"median": medians}, note=middle),
    ]
    rows: list[list[object]] = []
    for each in entries:
        rows.append([each["name"], "–", *_accuracy_cells(each, entries[0]), "–", "–"])
        if "perplexity" in each:
            same = each["same_tokens"]
            whole = sum(count == data["answer_tokens"] for count in same)
            rows[-1][1] = size(each["weight_bytes"])
            rows[-1][-2:] = [number(statistics.median(same)), f"{whole} of {len(same)}"]
    columns = ["weights", "memory", "perplexity", "change", "mean |Δ logprob|", "same tokens, median", "same answers"]
    note = f"{_note(data)} {data['answer_tokens']} greedy tokens after each of a few beginnings."
    return Result(
        question="Weights in fewer bits are read faster and leave more room. How much worse does the model predict a "
        "text with them, and how soon does a greedy answer take another turn?",
        headline=_headline(others, "name", "float32 weights", is_random),
        charts=charts if others else [],
        tables=[Table("Weights in different formats", columns, rows, note)],
        findings=_findings(entries, others, is_random, [_WEIGHT_LIMITS[name] for name in names]),
        explanation=[
            "A greedy answer is the harder test: where two tokens are nearly as likely, the smallest change decides "
            "between them, and all that follows is another text, not a worse one. Perplexity says whether it is worse.",
            *(_explain_random(context) if is_random else []),
        ],
    )


# -- what both say


def _headline(others: list[Record], label: str, reference: str, is_random: bool) -> str:
    if is_random:
        return "accuracy not measured, as the weights are random"
    shifts = listed([f"{each[label]} {signed_percent(each['shift']['perplexity_percent'])}" for each in others])
    return f"perplexity against {reference}: {shifts}" if others else f"only {reference} could be run"


def _accuracy_cells(each: Record, reference: Record) -> list[str]:
    """Perplexity, its change, and how far logprobs moved."""
    if "perplexity" not in each:
        return ["–", "refused", "–"]
    is_reference = each["name"] == reference["name"]
    change = "reference" if is_reference else signed_percent(each["shift"]["perplexity_percent"])
    return [f"{each['perplexity']:,.4f}", change, number(each["shift"]["mean"])]


def _note(data: Data) -> str:
    what = "random tokens" if data["model"] == RANDOM else "a passage of English"
    return f"{data['tokens']:,} tokens of {what}, against the first row."


def _findings(entries: list[Record], others: list[Record], is_random: bool, limits: Sequence[float]) -> list[Finding]:
    findings = []
    for each, limit in zip(others, limits, strict=True):
        expected = f"{each['name']}: the perplexity rises by less than {limit:g} %."
        if is_random:
            findings.append(Finding(expected, "The weights are random and predict nothing.", None))
            continue
        change = each["shift"]["perplexity_percent"]
        seen = f"{signed_percent(change)}, mean |Δ logprob| {number(each['shift']['mean'])}."
        findings.append(Finding(expected, seen, change < limit))
    for each in entries:
        if each["refusal"]:
            expected = f"{each['name']}: what cannot be is refused, with a way out."
            findings.append(Finding(expected, f"“{each['refusal']}”", not each.get("is_failure", False)))
    return findings


def _explain_random(context: LabContext) -> list[str]:
    remedy = "Run the lab with a model that has weights of its own."
    if context.on_gpu:
        remedy = (
            f"Have {DEFAULT_MODEL} in the cache (quire pull {DEFAULT_MODEL}, or the cache of a machine that has it) "
            "and run this experiment with --fresh: it then reads a passage of English with that model."
        )
    return [
        "What fewer bits cost in accuracy was not measured here: random weights guess blindly among the whole "
        f"vocabulary, and whether they come out better or worse in another format is chance. {remedy} What is saved in "
        "memory does hold."
    ]


KV_EXPERIMENT = Experiment("kv-accuracy", "Fewer bits a value: the KV cache and accuracy", measure_kv, tell_kv)
WEIGHTS_EXPERIMENT = Experiment("weights", "Fewer bits a weight: formats and accuracy", measure_weights, tell_weights)
