"""Drafting against plain decoding: the same engine, the same requests, one after the other in every repeat.

The texts are from Python's own library, which every machine that runs this has. Three kinds of request copy from their
prompt (they edit a file, extract from it or quote it); one does not. Prompts are in the prefix cache, so that decoding
is what is measured.
"""

from __future__ import annotations

import importlib
import inspect
import keyword
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from quire.bench.engines import run_workload
from quire.bench.machine import describe_engine, describe_machine
from quire.bench.report import RunReport
from quire.bench.workloads import Workload
from quire.engine.batch import runs_beside_host
from quire.engine.build import make_drafter
from quire.errors import ConfigError
from quire.speculation import METHODS, SpeculativeConfig

if TYPE_CHECKING:
    from quire import LLMEngine

MakeDrafter = Callable[[], Any]  # a new one for every run; None: plain decoding

COPYING = ("edits", "extraction", "quotes")
TEXTS = (*COPYING, "free")
PLAIN = "none"
_MODULES = (
    *("heapq", "textwrap", "shlex", "calendar", "csv", "random", "statistics", "tempfile", "uuid", "weakref"),
    *("argparse", "ast", "cmd", "codecs", "configparser", "contextlib", "copy", "dataclasses", "difflib", "dis"),
    *("doctest", "enum", "fractions", "functools", "gettext", "gzip", "ipaddress", "mailbox", "mimetypes", "pickle"),
    *("plistlib", "pprint", "selectors", "shutil", "smtplib", "socketserver", "subprocess", "tarfile", "threading"),
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
_CODE_LINES, _SHIFT = 60, 40  # of a file, in a prompt; and from one prompt to the next out of the same file
_MIN_REQUESTS = 4  # of a run: where fewer run at once, one after the other, since one text says little
_NAME = re.compile(r"\b[a-z_]\w{2,}\b")
_DEFINITION = re.compile(r"^ *(?:def|class) .*$(?:\n *r?\"\"\"(?s:.*?)\"\"\")?", re.MULTILINE)


def conversation(text: str, number: int) -> tuple[str, str]:
    """What a user asks, and how the answer to it begins."""
    if text == "free":
        return f"Write a story, number {number + 1}.", _OPENINGS[number % len(_OPENINGS)]
    module = importlib.import_module(_MODULES[number % len(_MODULES)])
    turn = number // len(_MODULES)  # another part of it, where there are more requests than modules
    lines = inspect.getsource(module).splitlines()
    if text == "quotes":
        document = inspect.cleandoc(module.__doc__ or "")
        lines = document.splitlines() if len(document) > 1200 and not turn else lines
        piece = "\n".join(lines[_SHIFT * turn : _SHIFT * turn + _CODE_LINES])
        ask = "Quote this text from its beginning, word for word:"
        return f"{ask}\n\n{piece}", _beginning(piece)
    first = next((i for i, line in enumerate(lines) if line.startswith(("def ", "class "))), 0)
    first = (first + _SHIFT * turn) % max(1, len(lines) - _CODE_LINES)
    piece = "\n".join(lines[first : first + _CODE_LINES])
    code = f"```python\n{piece}\n```"
    if text == "extraction":
        found = _DEFINITION.findall(piece)
        ask = "Copy every definition out of this code, each with its docstring, word for word:"
        return f"{ask}\n\n{code}", "```python\n" + (found[0] if found else piece[:80]) + "\n"
    names = Counter(name for name in _NAME.findall(piece) if not keyword.iskeyword(name))
    name = min(names, key=lambda each: abs(names[each] - 3))  # an edit changes a few places
    edited = re.sub(rf"\b{name}\b", f"{name}_given", piece)
    ask = f"Rename `{name}` to `{name}_given` in this code. Answer with the whole code:"
    return f"{ask}\n\n{code}", "```python\n" + _beginning(edited)


def _beginning(piece: str) -> str:
    """The first lines of a piece, about 40 tokens."""
    return piece[: piece.find("\n", 120) + 1] or piece[:120]


def make_workload(
    text: str, count: int, num_out: int, encode: Callable[[str], list[int]], render: Callable[[str], list[int]]
) -> Workload:
    """`count` requests of a kind, each with another prompt. render: the tokens from what a user asks to the answer."""
    asked = (conversation(text, i) for i in range(count))
    return [([*render(ask), *encode(begun)], num_out) for ask, begun in asked]


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
    tokenizer, scheduler = engine.tokenizer, engine.core.scheduler

    def render(ask: str) -> list[int]:
        if tokenizer.chat_template is None and engine.built.text.chat_template is None:
            return tokenizer.encode(f"{ask}\n\n")
        return list(engine.render_chat([{"role": "user", "content": ask}])["prompt_token_ids"])

    drafters = _drafters(engine, methods)
    own = scheduler.drafter
    if in_cpu_time:
        if runs_beside_host(engine.core) or engine.config.num_ranks > 1:
            raise ConfigError("--cpu-time is for a CPU and one process: leave it out")
        # The drafter, too, goes by what steps cost without the machine's other work.
        engine.core.executor.host_clock = time.process_time  # type: ignore[attr-defined]
        engine.core.interval_clock = time.process_time
    while runs_beside_host(engine.core) and engine.core.prepare_more():
        pass  # what is captured while a run is timed would be counted
    try:
        for text in texts:
            for load in loads:
                work = make_workload(text, max(load, _MIN_REQUESTS), num_out, tokenizer.encode, render)
                yield from _measure(engine, text, load, work, drafters, repeats, in_cpu_time)
    finally:
        scheduler.drafter = own
        if in_cpu_time:
            engine.core.executor.host_clock = time.perf_counter  # type: ignore[attr-defined]
            engine.core.interval_clock = time.perf_counter


def _drafters(engine: LLMEngine, methods: Sequence[str]) -> dict[str, MakeDrafter]:
    """Makers of new drafters, by name: as the engine is configured where that is one of the methods."""
    own = engine.config.speculative_config
    configs = {} if own is None else {own.method: own}
    drafters: dict[str, MakeDrafter] = {PLAIN: lambda: None}
    position = engine.built.executor.max_draft_position

    def maker(config: SpeculativeConfig) -> MakeDrafter:
        return lambda: make_drafter(config, engine.core.scheduler, position)

    for method in dict.fromkeys([*methods, *configs]):
        if method not in METHODS:
            raise ConfigError(f"--methods must be some of {', '.join(METHODS)}, got {method}")
        if method == "draft_model" and method not in configs:
            raise ConfigError("--methods draft_model needs a model that drafts: name it with --spec-model")
        drafters[method] = maker(configs.get(method) or SpeculativeConfig.read({"method": method}))
    return drafters


def _measure(
    engine: LLMEngine,
    text: str,
    load: int,
    work: Workload,
    drafters: dict[str, MakeDrafter],
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
            requests=len(work),
            completed=len(work),
        )
        for name in drafters
    }
    for repeat in range(-1, repeats):  # the first is not counted: it fills the cache and teaches what steps cost
        for name, make in drafters.items():
            scheduler.drafter = make()  # a new one: answers of the run before would be drafts of this one
            before = stats.num_steps, stats.num_draft_tokens, stats.num_accepted_tokens
            seconds, num_tokens = 0.0, 0
            for first in range(0, len(work), load):
                began_s = time.process_time()
                took_s, came = run_workload(engine, work[first : first + load], sampling)
                seconds += time.process_time() - began_s if in_cpu_time else took_s
                num_tokens += came
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
