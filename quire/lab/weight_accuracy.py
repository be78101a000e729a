"""Experiment: what smaller weights cost in accuracy. Perplexity on a fixed text, and how long greedy answers stay the
same, with each format that the weights can have here, against float32.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from quire import EngineConfig, SamplingParams
from quire.bench.charts import bar_chart
from quire.bench.units import listed, number, signed_percent, size
from quire.errors import ConfigError, QuireError
from quire.lab.context import LabContext
from quire.lab.experiment import Data, Experiment, Record, Story
from quire.lab.kv_accuracy import RANDOM, Reading, Shift, logprobs, reading_model, windows
from quire.lab.result import Finding, Table

if TYPE_CHECKING:
    from quire import LLMEngine

KEY = "weights"
REFERENCE = "float32"
_PACKED = "as in the file, 8-bit activations"
# By format, what it may cost in perplexity, in percent.
_LIMIT_PERCENT = {_PACKED: 1.0, "int8": 1.0, "fp8": 2.0, "bfloat16": 0.5, "float16": 0.1}
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
class _Format(Reading):
    """The passage and the answers with weights in one format."""

    weight_bytes: int = 0
    answers: list[list[int]] = field(default_factory=list)


def formats(context: LabContext, is_gguf: bool) -> dict[str, dict[str, Any]]:
    """By name, what an engine is started with; the reference first."""
    found: dict[str, dict[str, Any]] = {REFERENCE: {"dtype": "float32"}}
    if not context.on_gpu and is_gguf:
        found[_PACKED] = {"dtype": "auto"}
    found |= {"float16": {"dtype": "float16"}, "bfloat16": {"dtype": "bfloat16"}}
    return found | ({"fp8": {"quantization": "fp8"}} if context.on_gpu else {"int8": {"quantization": "int8"}})


def measure(context: LabContext) -> Data:
    config, is_real = reading_model(context)
    found = {
        name: _read(context, config.replace(**changes), name, is_real)
        for name, changes in formats(context, _is_gguf(config, is_real)).items()
    }
    reference = found[REFERENCE]
    if not reference.logprobs:
        raise ConfigError(f"float32, which the others are compared with, could not be run: {reference.refusal}")
    return {
        "model": config.model if is_real else RANDOM,
        "tokens": len(reference.logprobs),
        "answer_tokens": len(reference.answers[0]),
        "formats": [_data(name, each, reference) for name, each in found.items()],
    }


def _is_gguf(config: EngineConfig, is_real: bool) -> bool:
    from quire.weights import resolve_model

    return is_real and resolve_model(config.model, load_format=config.load_format).suffix == ".gguf"


def _read(context: LabContext, config: EngineConfig, name: str, is_real: bool) -> _Format:
    from quire import LLMEngine

    found = _Format(name, config.kv_cache_dtype)
    context.report(name)
    try:
        engine = LLMEngine.from_config(config.replace(kv_cache_dtype="auto"))
    except QuireError as error:
        found.refusal = str(error)
        return found
    try:
        found.weight_bytes = engine.ledger.weight_bytes
        parts = windows(engine, is_real, context)
        for index, token_ids in enumerate(parts):
            found.logprobs += logprobs(engine, f"window-{index}", token_ids)
        starts = [part[:16] for part in parts]
        if is_real and engine.tokenizer is not None:
            starts = [engine.tokenizer.encode(prompt) for prompt in _PROMPTS]
        found.answers = _answers(engine, starts, context.pick(32, 64, 128))
    finally:
        engine.close()
    return found


def _answers(engine: LLMEngine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    for index, token_ids in enumerate(prompts):
        engine.add_request(f"answer-{index}", {"prompt_token_ids": token_ids}, params)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        found |= {one.request_id: one.outputs[0].token_ids for one in engine.step() if one.finished}
    return [found[f"answer-{index}"] for index in range(len(prompts))]


def _data(name: str, each: _Format, reference: _Format) -> Record:
    data: Record = {"name": name, "refusal": each.refusal, "weight_bytes": each.weight_bytes}
    if each.logprobs:
        data["perplexity"] = each.perplexity
        data["shift"] = asdict(Shift.between(each, reference))
        data["same_tokens"] = [
            next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(theirs))
            for ours, theirs in zip(each.answers, reference.answers, strict=True)
        ]
    return data


# -- what it says


def tell(data: Data, context: LabContext) -> Story:
    is_random = data["model"] == RANDOM
    others = [each for each in data["formats"][1:] if "perplexity" in each]
    names = [each["name"] for each in others]
    shifts = listed([f"{e['name']} {signed_percent(e['shift']['perplexity_percent'])}" for e in others])
    headline = f"perplexity against float32 weights: {shifts}" if others else "only float32 could be run"
    if is_random:
        headline = "accuracy not measured, as the weights are random"
    charts = [
        bar_chart(
            "Perplexity against float32 weights",
            "percent more",
            names,
            {"change": [each["shift"]["perplexity_percent"] for each in others]},
            note="Random weights: says nothing about a trained model." if is_random else "",
        ),
        bar_chart(
            "Greedy answers: tokens before the first that differs",
            "tokens",
            names,
            {"median": [statistics.median(each["same_tokens"]) for each in others]},
            note=f"Of {data['answer_tokens']}, in the middle of {len(_PROMPTS)} answers.",
        ),
    ]
    return Story(
        question="Weights in fewer bits are read faster and leave more room. How much worse does the model predict a "
        "text with them, and how soon does a greedy answer take another turn?",
        headline=headline,
        charts=charts if others else [],
        tables=[_table(data)],
        findings=[_finding(each, is_random) for each in others]
        + [
            Finding(f"{each['name']}: what cannot be is refused, with a way out.", f"“{each['refusal']}”", True)
            for each in data["formats"]
            if each["refusal"]
        ],
        explanation=[
            "A greedy answer is the harder test: where two tokens are nearly as likely, the smallest change decides "
            "between them, and all that follows is another text, not a worse one. Perplexity says whether it is worse."
        ],
    )


def _finding(each: Record, is_random: bool) -> Finding:
    limit = _LIMIT_PERCENT[each["name"]]
    expected = f"{each['name']}: the perplexity rises by less than {limit:g} %."
    if is_random:
        return Finding(expected, "The weights are random and predict nothing.", None)
    change = each["shift"]["perplexity_percent"]
    seen = f"{signed_percent(change)}, mean |Δ logprob| {number(each['shift']['mean'])}."
    return Finding(expected, seen, change < limit)


def _table(data: Data) -> Table:
    rows: list[list[object]] = []
    for each in data["formats"]:
        if "perplexity" not in each:
            rows.append([each["name"], "–", "–", "refused", "–", "–", "–"])
            continue
        shift, same, is_reference = each["shift"], each["same_tokens"], each["name"] == REFERENCE
        change = "reference" if is_reference else signed_percent(shift["perplexity_percent"])
        rows.append([each["name"], size(each["weight_bytes"]), f"{each['perplexity']:,.4f}", change])
        rows[-1] += [number(shift["mean"]), number(statistics.median(same))]
        rows[-1].append(f"{sum(count == data['answer_tokens'] for count in same)} of {len(same)}")
    columns = ["weights", "memory", "perplexity", "change", "mean |Δ logprob|", "same tokens, median", "same answers"]
    what = "random tokens" if data["model"] == RANDOM else "a passage of English"
    note = f"{data['tokens']:,} tokens of {what}; {data['answer_tokens']} greedy tokens after each of a few beginnings."
    return Table("Weights in different formats", columns, rows, note)


EXPERIMENT = Experiment(KEY, "Fewer bits a weight: formats and accuracy", measure, tell)
