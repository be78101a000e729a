"""Experiment: levels below the device. When loading a prefix beats computing it, and chats that outgrow the cache."""

from __future__ import annotations

import random
import tempfile
import time
from typing import Any

from quire.bench.charts import bar_chart, line_chart
from quire.bench.units import duration, number, times
from quire.engine.llm_engine import LLMEngine
from quire.lab.context import LabContext
from quire.lab.experiment import Data, Experiment, Story
from quire.lab.result import Finding, Table
from quire.params import SamplingParams
from quire.tiers.disk import DiskStore

_DISK_BYTES = 4 << 30
_BEATS_FROM = 512  # tokens: where the disk is to be ahead of a CPU


def measure(context: LabContext) -> Data:
    with tempfile.TemporaryDirectory(prefix="quire-lab-tiers-") as path:
        settings = _settings(context)
        disk = settings | {"kv_disk_path": path, "kv_disk_size": _DISK_BYTES}
        lengths = _first_tokens(context, context.engine(**disk))
    levels = {"none": settings}
    if context.on_gpu:
        levels["host memory"] = settings | {"kv_offloading_size": context.bench.config.swap_space_gb}
    chats = _chats(context)
    runs = []
    for name in (*levels, "disk"):
        with tempfile.TemporaryDirectory(prefix="quire-lab-tiers-") as path:
            own = levels.get(name) or settings | {"kv_disk_path": path, "kv_disk_size": _DISK_BYTES}
            context.report(f"chats that outgrow the cache, level below: {name}")
            engine = context.engine(num_blocks=_num_blocks(context), **own)
            runs.append({"level": name} | _serve(context, engine, chats))
            engine.core.settle(60.0)
    return {"lengths": lengths, "measured": runs, "num_chats": len(chats[0]), "num_turns": len(chats)}


def _settings(context: LabContext) -> dict[str, Any]:
    return {"max_num_seqs": context.pick(4, 4, 64), "max_num_batched_tokens": context.pick(512, 512, 8192)}


def _num_blocks(context: LabContext) -> int:
    """How many blocks the small cache has: it holds a quarter of the chats, or less."""
    return context.pick(80, 100, 8192)


def _chats(context: LabContext) -> list[list[list[int]]]:
    """By turn and chat: the prompt, which is the chat so far and something new. All begin with one system prompt."""
    num_chats, num_turns, system, turn = context.pick((8, 3, 64, 48), (12, 3, 128, 96), (2000, 3, 256, 256))
    rng = random.Random(context.seed)
    head = [rng.randrange(context.vocab) for _ in range(system)]
    chats = [list(head) for _ in range(num_chats)]
    prompts = []
    for _ in range(num_turns):
        for chat in chats:
            chat += [rng.randrange(context.vocab) for _ in range(turn)]
        prompts.append([list(chat) for chat in chats])
    return prompts


def _first_tokens(context: LabContext, engine: LLMEngine) -> list[dict[str, float]]:
    """By length of a prefix: the shortest of several times to the first token, computed and loaded from disk. The two
    are taken in turn, so that whatever else the machine does meets both."""
    [disk] = [store.connector for store in engine.built.executor.executor.stores]
    assert isinstance(disk, DiskStore)
    found: list[dict[str, float]] = []
    rng = random.Random(context.seed)
    for length in context.pick((64, 256), (128, 256, 512, 1024), (512, 1024, 2048, 4096)):
        context.report(f"first token after a prefix of {length:,} tokens, computed and loaded")
        computed: list[float] = []
        loaded: list[float] = []
        cold: list[float] = []
        num_loaded = 0
        for _ in range(context.pick(1, 3, 5)):
            prompt = [rng.randrange(context.vocab) for _ in range(length + 1)]
            computed.append(_one(engine, prompt)[0])
            engine.core.settle(60.0)
            engine.reset_prefix_cache()
            for times_s in (loaded, cold):
                if times_s is cold:
                    disk.drop_from_page_cache()
                seconds, num_loaded = _one(engine, prompt)
                times_s.append(seconds)
                engine.core.settle(60.0)
                engine.reset_prefix_cache()
        best = {"computed_s": min(computed), "loaded_s": min(loaded), "cold_s": min(cold)}
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


def _serve(context: LabContext, engine: LLMEngine, chats: list[list[list[int]]]) -> dict[str, Any]:
    """A few users at a time, turn after turn: by the time that a chat goes on, its blocks have been evicted."""
    at_once, num_out = context.pick((2, 8), (2, 16), (64, 64))
    waiting = [prompt for turn in chats for prompt in turn]
    params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
    begun_s: dict[str, float] = {}
    first_s: dict[str, float] = {}
    num_cached = num_added = 0
    started = time.perf_counter()
    while num_added < len(waiting) or engine.has_unfinished_requests():
        while num_added < len(waiting) and engine.get_num_unfinished_requests() < at_once:
            name = f"chat-{num_added}"
            begun_s[name] = time.perf_counter()
            engine.add_request(name, {"prompt_token_ids": waiting[num_added]}, params)
            num_added += 1
        for output in engine.step():
            if output.request_id not in first_s:
                first_s[output.request_id] = time.perf_counter() - begun_s[output.request_id]
            num_cached += (output.num_cached_tokens or 0) * output.finished
    seconds = time.perf_counter() - started
    waits = sorted(first_s.values())
    return {
        "seconds": seconds,
        "output_tok_s": len(waiting) * num_out / seconds,
        "first_token_p50_s": waits[len(waits) // 2],
        "first_token_p99_s": waits[int(0.99 * (len(waits) - 1))],
        "prompt_tokens": sum(map(len, waiting)),
        "found_tokens": num_cached,
    }


# -- what it says


def tell(data: Data, context: LabContext) -> Story:
    lengths, runs = data["lengths"], data["measured"]
    plain, below = runs[0], runs[-1]
    gain, tokens = below["output_tok_s"] / plain["output_tok_s"], [entry["tokens"] for entry in lengths]
    long = [entry for entry in lengths if entry["tokens"] >= _BEATS_FROM] or lengths[-1:]
    return Story(
        question="Blocks that the cache has no room for can be kept on disk. From which length on is loading a prefix "
        "faster than computing it, and what is that worth to chats that do not fit in the cache together?",
        headline=f"chats that outgrow the cache: {times(gain)} the throughput with a disk below it, first token p50 "
        f"{duration(below['first_token_p50_s'])} instead of {duration(plain['first_token_p50_s'])}",
        charts=[
            line_chart(
                "First token after a prefix",
                "tokens of the prefix",
                "seconds",
                {
                    "computed": (tokens, [entry["computed_s"] for entry in lengths]),
                    "loaded, from the page cache": (tokens, [entry["loaded_s"] for entry in lengths]),
                    "loaded, from the disk": (tokens, [entry["cold_s"] for entry in lengths]),
                },
                log="xy",
            ),
            bar_chart(
                "Chats that outgrow the cache: time to first token",
                "seconds",
                [run["level"] for run in runs],
                {
                    "p50": [run["first_token_p50_s"] for run in runs],
                    "p99": [run["first_token_p99_s"] for run in runs],
                },
                x_label="level below the device",
            ),
            bar_chart(
                "Chats that outgrow the cache: output tokens per second",
                "tokens/s",
                [run["level"] for run in runs],
                {"tokens/s": [run["output_tok_s"] for run in runs]},
                x_label="level below the device",
            ),
        ],
        tables=[
            Table(
                "First token, computed and loaded",
                ["prefix tokens", "computed", "from the page cache", "from the disk", "times", "tokens loaded"],
                [
                    [
                        f"{entry['tokens']:,}",
                        duration(entry["computed_s"]),
                        duration(entry["loaded_s"]),
                        duration(entry["cold_s"]),
                        times(entry["computed_s"] / entry["cold_s"]),
                        f"{entry['num_loaded_tokens']:,}",
                    ]
                    for entry in lengths
                ],
                "The shortest of several, taken in turn. What was written or read lately comes from the system's page "
                "cache; for the next column it was dropped.",
            ),
            Table(
                f"{data['num_chats']} chats of {data['num_turns']} turns",
                ["level below", "output tok/s", "first token p50", "first token p99", "prompt tokens found %"],
                [
                    [
                        run["level"],
                        number(run["output_tok_s"]),
                        duration(run["first_token_p50_s"]),
                        duration(run["first_token_p99_s"]),
                        f"{100 * run['found_tokens'] / run['prompt_tokens']:.1f}",
                    ]
                    for run in runs
                ],
            ),
        ],
        findings=[
            Finding(
                f"From {_BEATS_FROM} tokens on, loading beats computing.",
                "; ".join(
                    f"{entry['tokens']:,} tokens: {duration(entry['cold_s'])} against {duration(entry['computed_s'])}"
                    for entry in long
                )
                + ".",
                all(max(entry["loaded_s"], entry["cold_s"]) < entry["computed_s"] for entry in long),
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
        ],
        explanation=[
            "A prefix costs a computation for every token, which grows with the model, or so many bytes from below, "
            "which grow with its KV heads and layers only. The engine chooses by the rates that it measures, for each "
            "prefix and each part of it.",
            "A chat's first turn is computed either way, and so is what is new in a later one: these are the p99, and "
            "what keeps the gain from being larger.",
        ],
    )


EXPERIMENT = Experiment("tiers", "Levels below the device: chats that outgrow the cache", measure, tell)
