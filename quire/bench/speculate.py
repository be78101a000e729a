"""Drafting against plain decoding: the same engine, the same requests, one after the other in every repeat.

The texts are of Python's own library, which every machine that runs this has. Two of them copy, as an edit of a file or
a summary that quotes does; one does not. Prompts are in the prefix cache, so that decoding is what is measured.
"""

from __future__ import annotations

import importlib
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.bench.drive import run_workload
from quire.bench.machine import describe_engine, describe_machine
from quire.bench.report import RunReport
from quire.bench.workloads import Workload
from quire.engine.build import make_drafter
from quire.errors import ConfigError
from quire.speculation import METHODS, SpeculativeConfig

if TYPE_CHECKING:
    from quire import LLMEngine

TEXTS = ("code", "quotes", "free")
PLAIN = "none"
_MODULES = (
    *("heapq", "bisect", "textwrap", "colorsys", "string", "shlex", "fnmatch", "glob", "queue", "sched", "stat"),
    *("calendar", "csv", "getopt", "keyword", "linecache", "numbers", "operator", "pprint", "quopri", "random"),
    *("reprlib", "statistics", "tempfile", "timeit", "token", "types", "uuid", "weakref", "zipapp"),
)
_OPENINGS = (
    "The old lighthouse keeper had not spoken to anyone for",
    "In the second year of the drought, the village council decided",
    "What most people misunderstand about bridges is",
    "She opened the letter slowly, because",
    "The history of salt begins",
    "If I could change one thing about how schools teach mathematics,",
    "On the train to the coast I met a man who",
    "The committee's report on urban trees recommends",
)
_CONTEXT, _BEGUN = 320, 40  # tokens of a text, and of its copy that the prompt begins


def make_workload(text: str, load: int, num_out: int, encode: Callable[[str], list[int]]) -> Workload:
    """`load` requests of a kind of text, each with another prompt."""
    if text == "free":
        return [(encode(f"{i + 1}. {_OPENINGS[i % len(_OPENINGS)]}"), num_out) for i in range(load)]
    work: Workload = []
    for i in range(load):
        module = importlib.import_module(_MODULES[i % len(_MODULES)])
        source = inspect.getsource(module) if text == "code" else inspect.cleandoc(module.__doc__ or "")
        source = source if len(source) > 400 else inspect.getsource(module)
        begin = 60 * (i // len(_MODULES))  # another part of it, where there are more requests than modules
        tokens = encode(source)[begin : begin + _CONTEXT]
        ask = encode("\n\nThe same again, with the names changed:\n\n" if text == "code" else "\n\nTo quote it:\n\n")
        work.append(([*tokens, *ask, *tokens[:_BEGUN]], num_out))
    return work


def measure_speculation(
    engine: LLMEngine,
    *,
    loads: Sequence[int],
    methods: Sequence[str],
    texts: Sequence[str],
    num_out: int,
    repeats: int,
    in_cpu_time: bool = False,
) -> Iterator[RunReport]:
    if engine.tokenizer is None:
        raise ConfigError("bench speculate reads texts: leave --skip-tokenizer-init out")
    if wrong := [text for text in texts if text not in TEXTS]:
        raise ConfigError(f"--texts must be some of {', '.join(TEXTS)}, got {wrong[0]}")
    if min(loads) < 1:
        raise ConfigError(f"--loads must be whole numbers >= 1, got {min(loads)}")
    scheduler = engine.core.scheduler
    own = scheduler.drafter
    drafters: dict[str, Callable[[], Any]] = {PLAIN: lambda: None}
    for method in methods:
        if method not in METHODS[:2]:
            raise ConfigError(f"--methods must be some of {', '.join(METHODS[:2])}; --spec-model adds a draft model")
        config = SpeculativeConfig.read({"method": method})
        drafters[method] = partial(make_drafter, config, scheduler)
    if own is not None:
        drafters["own"] = lambda: own
    try:
        for text in texts:
            for load in loads:
                work = make_workload(text, load, num_out, engine.tokenizer.encode)
                yield from _measure(engine, text, load, work, drafters, repeats, in_cpu_time)
    finally:
        scheduler.drafter = own


def _measure(
    engine: LLMEngine,
    text: str,
    load: int,
    work: Workload,
    drafters: dict[str, Callable[[], Any]],
    repeats: int,
    in_cpu_time: bool,
) -> Iterator[RunReport]:
    sampling = {"temperature": 0.8, "seed": 1} if text == "free" else {"temperature": 0.0}
    scheduler, stats = engine.core.scheduler, engine.core.scheduler.stats
    runs = {
        name: RunReport(
            workload=text,
            settings=describe_engine(engine),
            machine=describe_machine(),
            point={"load": str(load), "drafts": name},
            requests=load,
            completed=load,
        )
        for name in drafters
    }
    for repeat in range(-1, repeats):  # the first is not counted: it fills the cache and teaches what steps cost
        for name, make in drafters.items():
            scheduler.drafter = make()  # a new one: answers of the run before would be drafts of this one
            before = stats.num_steps, stats.num_draft_tokens, stats.num_accepted_tokens
            began_s = time.process_time()
            seconds, num_tokens = run_workload(engine, work, sampling)
            if in_cpu_time:
                seconds = time.process_time() - began_s
            run = runs[name]
            if repeat >= 0:
                run.repeats.append(num_tokens / seconds)
                run.output_tokens, run.num_steps = num_tokens, stats.num_steps - before[0]
                run.values["draft_tokens"] = float(stats.num_draft_tokens - before[1])
                run.values["accepted_tokens"] = float(stats.num_accepted_tokens - before[2])
                run.values["tokens_per_step"] = num_tokens / run.num_steps
    plain = runs[PLAIN].repeats
    for name, run in runs.items():
        run.output_tok_s = statistics.median(run.repeats)
        run.seconds = run.output_tokens / run.output_tok_s
        if name != PLAIN:
            ratios = [ours / theirs for ours, theirs in zip(run.repeats, plain, strict=True)]
            run.repeat_values["times_plain"] = ratios
            run.values["times_plain"] = statistics.median(ratios)
        yield run
