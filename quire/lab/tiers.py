"""Experiment: levels below the device. When loading a prefix beats computing it, and chats that outgrow the cache."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire import LLMEngine, SamplingParams
from quire.bench.charts import Chart, bar_chart, line_chart
from quire.bench.report import Percentiles
from quire.bench.units import duration, number, times, times_the
from quire.lab.context import LabContext
from quire.lab.experiment import Data, Experiment, Finding, Result, Table
from quire.tiers.disk import DiskStore
from quire.tiers.sealed import SealedStore

_DISK_BYTES = 4 << 30
_BEATS_FROM = 512  # tokens: where the disk is to be ahead of a CPU
_SOONER = 5.0  # times: how much sooner host memory's longest prefix is to come than it is computed on a GPU
_MOST_SLOWER = 0.05  # by which loads may slow others
_LINK_BYTES = 512 << 20
# Requests that come while others decode: how many tokens of theirs are found, every how many steps one comes, how many
# come in a run, and how many runs of each kind there are.
_NUM_DECODES, _JOINING_TOKENS, _STEPS_BETWEEN, _NUM_JOINING, _NUM_ROUNDS, _WARM_STEPS = 64, 4096, 10, 6, 5, 20


@dataclass(slots=True, frozen=True)
class _Chats:
    """Conversations that begin with one system prompt. So many users are there at a time, and take turns."""

    num: int
    num_users: int
    num_turns: int
    system: int  # tokens
    first: int  # of what a chat begins with, beside it
    turn: int
    answer: int
    at_once: int


def measure(context: LabContext) -> Data:
    data: Data = {"level": _level(context)}
    for part in PARTS.values():
        data |= part(context)
    return data


def measure_link(context: LabContext) -> Data:
    """Measure the link between host and device. A CPU has none."""
    if not context.on_gpu:
        return {}
    context.report("the link between host and device")
    cache = _engine(context).built.executor.executor.worker.cache  # type: ignore[union-attr]
    link, load = cache.measure_link_rates(_LINK_BYTES)
    return {"link_bytes_per_s": link, "load_bytes_per_s": load}


def measure_first_tokens(context: LabContext) -> Data:
    with tempfile.TemporaryDirectory(prefix="quire-lab-tiers-") as path:
        return {"lengths": _first_tokens(context, _prepared(_engine(context, path)))}


def measure_beside(context: LabContext) -> Data:
    """How much loads slow sequences that decode, on a GPU, where blocks are loaded beside steps."""
    return {"beside": _decodes_beside_loads(context, _prepared(_engine(context)))} if context.on_gpu else {}


def measure_chats(context: LabContext) -> Data:
    chats, runs = _chats(context), []
    for name in ("none", _level(context)):
        with tempfile.TemporaryDirectory(prefix="quire-lab-tiers-") as path:
            context.report(f"chats that outgrow the cache, level below: {name}")
            below = {} if name == "none" else _below(context, path)
            engine = _prepared(context.engine(num_blocks=_num_blocks(context), **_settings(context), **below))
            runs.append({"level": name} | _serve(context, engine, chats))
            engine.core.settle(60.0)
    return {"measured": runs, "num_chats": chats.num, "num_turns": chats.num_turns}


# Each stands alone: `python -m benchmarks.tiers` runs some of them.
PARTS: dict[str, Callable[[LabContext], Data]] = {
    "link": measure_link,
    "first-tokens": measure_first_tokens,
    "beside": measure_beside,
    "chats": measure_chats,
}


def _level(context: LabContext) -> str:
    return "host memory" if context.on_gpu else "disk"


def _engine(context: LabContext, path: str = "") -> LLMEngine:
    return context.engine(**_settings(context), **_below(context, path))


def _prepared(engine: LLMEngine) -> LLMEngine:
    """Capture the steps that a server would capture while it is idle."""
    while engine.core.prepare_more():
        pass
    return engine


def _settings(context: LabContext) -> dict[str, Any]:
    return {"max_num_seqs": context.pick(4, 4, 128), "max_num_batched_tokens": context.pick(512, 512, 8192)}


def _below(context: LabContext, path: str) -> dict[str, Any]:
    """The level below the device: host memory of a GPU, a disk of a CPU."""
    if context.on_gpu:
        return {"kv_offloading_size": context.bench.config.swap_space_gb}
    return {"kv_disk_path": path, "kv_disk_size": _DISK_BYTES}


def _num_blocks(context: LabContext) -> int:
    """How many blocks the small cache has: it holds a third of the users' chats, or less."""
    return context.pick(80, 100, 4096)


def _chats(context: LabContext) -> _Chats:
    return context.pick(
        _Chats(8, 8, 3, 64, 40, 40, 8, 2),
        _Chats(12, 12, 3, 128, 80, 80, 16, 2),
        _Chats(2000, 500, 4, 256, 48, 48, 16, 128),
    )


def _first_tokens(context: LabContext, engine: LLMEngine) -> list[dict[str, float]]:
    """By length of a prefix: the shortest of several times to the first token, computed and loaded. They are taken in
    turn, so that whatever else the machine does meets all."""
    stores = [store for store in engine.built.executor.executor.stores if isinstance(store, SealedStore)]
    disk = next((store.connector for store in stores if isinstance(store.connector, DiskStore)), None)
    found: list[dict[str, float]] = []
    rng = random.Random(context.seed)
    for length in context.pick((64, 256), (128, 256, 512, 1024), (512, 1024, 2048, 4096)):
        context.report(f"first token after a prefix of {length:,} tokens, computed and loaded")
        names = ("computed_s", "loaded_s", *(("cold_s",) if disk else ()))
        times_s: dict[str, list[float]] = {name: [] for name in names}
        num_loaded = 0
        for _ in range(context.pick(1, 3, 5)):
            prompt = [rng.randrange(context.vocab) for _ in range(length + 1)]
            for name, seconds in times_s.items():
                if name == "cold_s" and disk is not None:
                    disk.drop_from_page_cache()
                took_s, num_loaded = _one(engine, prompt)
                seconds.append(took_s)
                engine.core.settle(60.0)
                engine.reset_prefix_cache()
        best = {name: min(seconds) for name, seconds in times_s.items()}
        found.append({"tokens": length, "num_loaded_tokens": num_loaded, **best})
    return found


def _one(engine: LLMEngine, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many of the prompt's were found."""
    started = time.perf_counter()
    engine.add_request("one", {"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=1))
    while True:
        for output in engine.step():
            if output.finished:
                return time.perf_counter() - started, output.num_cached_tokens or 0


def _decodes_beside_loads(context: LabContext, engine: LLMEngine) -> dict[str, float]:
    """Tokens a second of sequences that decode: alone, beside requests whose long prefix is on the device, and beside
    the same ones when their prefix is loaded. Taken in turn, because steps become longer with the sequences; the
    medians of several rounds, after one that does not count."""
    context.report("decodes beside loads")
    rng = random.Random(context.seed + 1)
    prefixes = [[rng.randrange(context.vocab) for _ in range(_JOINING_TOKENS + 1)] for _ in range(_NUM_JOINING)]
    for prefix in prefixes:
        _one(engine, prefix)
        engine.core.settle(60.0)
    num_tokens = _WARM_STEPS + 3 * (_NUM_ROUNDS + 1) * _NUM_JOINING * _STEPS_BETWEEN + 100
    long = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    for i in range(_NUM_DECODES):
        prompt = [rng.randrange(context.vocab) for _ in range(128)]
        engine.add_request(f"decode-{i}", {"prompt_token_ids": prompt}, long)
    for _ in range(_WARM_STEPS):
        engine.step()
    rounds: list[dict[str, float]] = []
    for _ in range(_NUM_ROUNDS + 1):
        found = {"alone_tok_s": _decode(engine, [[]] * _NUM_JOINING), "device_tok_s": _decode(engine, prefixes)}
        engine.core.kv.reset_prefix_cache(force=True)  # the device's, and nothing that is in use
        rounds.append(found | {"host_tok_s": _decode(engine, prefixes)})
    engine.abort_request([f"decode-{i}" for i in range(_NUM_DECODES)])
    while engine.has_unfinished_requests():
        engine.step()
    engine.core.settle(60.0)
    medians = {name: statistics.median(each[name] for each in rounds[1:]) for name in rounds[0]}
    loading = statistics.median(each["host_tok_s"] / each["device_tok_s"] for each in rounds[1:])
    return medians | {"left_by_loading": loading, "num_loads": _NUM_ROUNDS * _NUM_JOINING}


def _decode(engine: LLMEngine, prefixes: list[list[int]]) -> float:
    """Tokens a second of the sequences that decode, while a request comes every few steps; an empty prefix is none."""
    one = SamplingParams(temperature=0.0, max_tokens=1)
    num_tokens, started = 0, time.perf_counter()
    for i, prefix in enumerate(prefixes):
        if prefix:
            engine.add_request(f"joining-{i}", {"prompt_token_ids": prefix}, one)
        for _ in range(_STEPS_BETWEEN):
            num_tokens += sum(output.request_id.startswith("decode") for output in engine.step())
    return num_tokens / (time.perf_counter() - started)


def _serve(context: LabContext, engine: LLMEngine, chats: _Chats) -> dict[str, Any]:
    """A few users are answered at a time: by the time that a chat goes on, its blocks have been evicted."""
    rng = random.Random(context.seed)
    head = [rng.randrange(context.vocab) for _ in range(chats.system)]
    said = [list(head) for _ in range(chats.num)]
    order = [
        chat
        for first in range(0, chats.num, chats.num_users)
        for _ in range(chats.num_turns)
        for chat in range(first, min(first + chats.num_users, chats.num))
    ]
    params = SamplingParams(temperature=0.0, max_tokens=chats.answer, ignore_eos=True, detokenize=False)
    begun_s: dict[str, float] = {}
    first_s: dict[str, float] = {}
    talking: dict[str, int] = {}  # by request: the chat that it is a turn of
    num_cached = num_prompt = 0
    started = time.perf_counter()
    while len(begun_s) < len(order) or talking:
        while len(begun_s) < len(order) and len(talking) < chats.at_once:
            chat, name = order[len(begun_s)], f"turn-{len(begun_s)}"
            if chat in talking.values():
                break  # it has not had its answer yet
            num_new = chats.first if len(said[chat]) == chats.system else chats.turn
            said[chat] += [rng.randrange(context.vocab) for _ in range(num_new)]
            talking[name], begun_s[name] = chat, time.perf_counter()
            engine.add_request(name, {"prompt_token_ids": list(said[chat])}, params)
        for output in engine.step():
            first_s.setdefault(output.request_id, time.perf_counter() - begun_s[output.request_id])
            if output.finished:
                num_cached += output.num_cached_tokens or 0
                num_prompt += len(output.prompt_token_ids)
                said[talking.pop(output.request_id)] += output.outputs[0].token_ids
    seconds = time.perf_counter() - started
    waits = Percentiles.of(list(first_s.values()))
    assert waits is not None
    return {
        "seconds": seconds,
        "output_tok_s": len(order) * chats.answer / seconds,
        "first_token_p50_s": waits.p50,
        "first_token_p99_s": waits.p99,
        "prompt_tokens": num_prompt,
        "found_tokens": num_cached,
    }


# -- what it says


def tell(data: Data, context: LabContext) -> Result:
    lengths, runs = data["lengths"], data["measured"]
    plain, below = runs[0], runs[-1]
    level = below["level"]
    sources = {"loaded_s": "from the page cache", "cold_s": "from the disk"} if level == "disk" else {}
    sources = sources or {"loaded_s": f"from {level}"}
    slowest = list(sources)[-1]
    gain, tokens = below["output_tok_s"] / plain["output_tok_s"], [entry["tokens"] for entry in lengths]
    names = {"computed_s": "computed", **{name: f"loaded, {where}" for name, where in sources.items()}}
    waits = {shown: (tokens, [entry[name] for entry in lengths]) for name, shown in names.items()}
    percentiles = {"p50": "first_token_p50_s", "p99": "first_token_p99_s"}
    long = [entry for entry in lengths if entry["tokens"] >= _BEATS_FROM] or lengths[-1:]
    each = [f"{e['tokens']:,} tokens: {duration(e[slowest])} against {duration(e['computed_s'])}" for e in long]
    return Result(
        question=f"Blocks that the cache has no room for can be kept below it (here: {level}). From which length on is "
        "loading a prefix faster than computing it, and what is that worth to chats that do not fit in the cache "
        "together?",
        headline=f"chats that outgrow the cache: {times_the(gain, 'throughput')} with a level below it ({level}), "
        f"first token p50 {duration(below['first_token_p50_s'])} instead of {duration(plain['first_token_p50_s'])}",
        charts=[
            line_chart("First token after a prefix", "tokens of the prefix", "seconds", waits, log="xy"),
            _chat_chart("time to first token", "seconds", runs, percentiles),
            _chat_chart("output tokens per second", "tokens/s", runs, {"tokens/s": "output_tok_s"}),
        ],
        tables=[
            Table(
                "First token, computed and loaded",
                ["prefix tokens", "computed", *sources.values(), "times", "tokens loaded"],
                [
                    [
                        *(f"{e['tokens']:,}", *(duration(e[name]) for name in names)),
                        *(times(e["computed_s"] / e[slowest]), f"{e['num_loaded_tokens']:,}"),
                    ]
                    for e in lengths
                ],
                "The shortest of several, taken in turn. From a disk: what was written or read lately comes from the "
                "system's page cache; for the next column it was dropped.",
            ),
            *_gpu_tables(data),
            Table(
                f"{data['num_chats']} chats of {data['num_turns']} turns",
                ["level below", "output tok/s", "first token p50", "first token p99", "prompt tokens found %"],
                [
                    [
                        *(run["level"], number(run["output_tok_s"])),
                        *(duration(run[name]) for name in percentiles.values()),
                        f"{100 * run['found_tokens'] / run['prompt_tokens']:.1f}",
                    ]
                    for run in runs
                ],
            ),
        ],
        findings=[
            Finding(
                f"From {_BEATS_FROM} tokens on, loading beats computing.",
                f"{'; '.join(each)}.",
                all(entry[name] < entry["computed_s"] for entry in long for name in sources),
            ),
            Finding(
                "With a level below, most of what a chat said before is found when it goes on.",
                f"{100 * below['found_tokens'] / below['prompt_tokens']:.0f} % of the prompt tokens are found, without "
                f"it {100 * plain['found_tokens'] / plain['prompt_tokens']:.0f} %.",
                below["found_tokens"] > plain["found_tokens"],
            ),
            Finding(
                "The first token comes sooner, at the median and for the slowest.",
                f"p50 {duration(below['first_token_p50_s'])} instead of {duration(plain['first_token_p50_s'])}, p99 "
                f"{duration(below['first_token_p99_s'])} instead of {duration(plain['first_token_p99_s'])}.",
                below["first_token_p50_s"] < plain["first_token_p50_s"]
                and below["first_token_p99_s"] < plain["first_token_p99_s"],
            ),
            *_gpu_findings(data),
        ],
        explanation=[
            "A prefix costs a computation for every token, which grows with the model, or so many bytes from below, "
            "which grow with its KV heads and layers only. The engine chooses by the rates that it measures, for each "
            "prefix and each part of it.",
            "A chat's first turn is computed either way, and so is what is new in a later one: these are the p99, and "
            "what keeps the gain from being larger.",
        ],
    )


def _chat_chart(what: str, unit: str, runs: list[Data], columns: dict[str, str]) -> Chart:
    return bar_chart(
        f"Chats that outgrow the cache: {what}",
        unit,
        [run["level"] for run in runs],
        {name: [run[key] for run in runs] for name, key in columns.items()},
        x_label="level below the device",
    )


def _gpu_tables(data: Data) -> list[Table]:
    """How fast loads use the link, and how much they slow the decodes of others."""
    if "beside" not in data:
        return []
    link, load, beside = data["link_bytes_per_s"], data["load_bytes_per_s"], data["beside"]
    every = f"and a request of {_JOINING_TOKENS:,} tokens every {_STEPS_BETWEEN} steps"
    decodes = {
        "alone_tok_s": f"{_NUM_DECODES} decodes alone",
        "device_tok_s": f"{every}, found on the device",
        "host_tok_s": f"{every}, loaded from host memory",
    }
    rows = [
        [name, f"{number(beside[key])} tok/s", f"{100 * (beside[key] / beside['alone_tok_s'] - 1):+.1f} %"]
        for key, name in decodes.items()
        if key in beside
    ]
    if "left_by_loading" in beside:
        rows.append(["what loading costs the others", "", f"{100 * (beside['left_by_loading'] - 1):+.1f} %"])
    return [
        Table(
            "From host memory to the device",
            ["", "", "share"],
            [
                ["one copy from pinned memory", f"{link / 1e9:.1f} GB/s", ""],
                ["blocks, as loads move them", f"{load / 1e9:.1f} GB/s", f"{100 * load / link:.0f} %"],
                *rows,
            ],
            "Tokens of sequences that decode. A new request costs them its own tokens' time wherever its prefix is.",
        )
    ]


def _gpu_findings(data: Data) -> list[Finding]:
    """The expectations of host memory, and whether they hold."""
    if "left_by_loading" not in data.get("beside", {}):
        return []
    longest, beside = data["lengths"][-1], data["beside"]
    sooner, slower = longest["computed_s"] / longest["loaded_s"], 1 - beside["left_by_loading"]
    return [
        Finding(
            f"From host memory, the first token comes at least {times(_SOONER)} sooner than computed.",
            f"{longest['tokens']:,} tokens: {times(sooner)}.",
            sooner >= _SOONER,
        ),
        Finding(
            f"Loading slows the decodes of others by less than {100 * _MOST_SLOWER:.0f} %.",
            f"{number(beside['host_tok_s'])} tok/s beside requests that load, {number(beside['device_tok_s'])} beside "
            f"the same ones that find their prefix on the device: {100 * slower:.1f} % less, the median of rounds.",
            slower < _MOST_SLOWER,
        ),
    ]


EXPERIMENT = Experiment("tiers", "Levels below the device: chats that outgrow the cache", measure, tell)
