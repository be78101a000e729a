"""What structured output costs beside free text of the same length.

    python -m benchmarks.structured                              # SmolLM2, one sequence, processor time of one thread
    python -m benchmarks.structured --shape llama-3.1-8b --num-seqs 64    # random weights on a GPU, seconds
    python -m benchmarks.structured --shape llama-3.1-8b --num-seqs 64 --masks-only    # no model: what fills masks

Free text and answers under each schema run in turn. Random weights never end an answer by themselves, so the schemas
want answers longer than any that is asked for; the shape's vocabulary is one of 128,256 real pieces of text, trained
once on the sources of Python's library and torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire import SamplingParams, StructuredOutputsParams
from quire.bench.model_shapes import LLAMA_8B
from quire.bench.units import table
from quire.engine.batch import run_batch, runs_beside_host
from quire.errors import QuireError
from quire.grammar import GrammarCompiler, lower
from quire.grammar.rows import ConstrainedLine, RowConstraints, mask_threads
from quire.params import SamplingSpec
from quire.request import Request
from quire.text import Tokenizer
from quire.weights import quire_home

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine

_NAME = {"type": "string", "minLength": 5, "maxLength": 30}
_RECORD = {
    "type": "object",
    "properties": {
        "name": _NAME,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "blue", "green"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["name", "age", "colour", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "records": {"type": "array", "items": _RECORD, "minItems": 1000},
    "short strings": {"type": "array", "items": _NAME, "minItems": 1000},
    "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 10**9}, "minItems": 2000},
    "one long text": {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 20_000}},
        "required": ["text"],
        "additionalProperties": False,
    },
}
FREE = "free text"
_NUM_FIRST_TOKENS = 15
_MAX_TRAINING_CHARS = 40_000_000


def write_shape() -> Path:
    """A directory with Llama-3.1-8B's config and a byte-level tokenizer of its size; no weights."""
    path = quire_home() / "llama-8b-text-shape"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA_8B))
    if not (path / "tokenizer.json").exists():
        print("training a tokenizer, once", file=sys.stderr)
        _train_tokenizer(LLAMA_8B["bos_token_id"], LLAMA_8B["vocab_size"]).save(str(path / "tokenizer.json"))
        names = {"bos_token": "<|special 0|>", "eos_token": "<|special 1|>"}
        (path / "tokenizer_config.json").write_text(json.dumps(names))
    return path


def _train_tokenizer(num_pieces: Any, vocab_size: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=num_pieces, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_sources(), trainer)
    assert tokenizer.get_vocab_size() == num_pieces, f"the text is enough for {tokenizer.get_vocab_size()} pieces only"
    tokenizer.add_special_tokens([f"<|special {i}|>" for i in range(vocab_size - num_pieces)])
    return tokenizer


def _sources() -> Iterator[str]:
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.submodule_search_locations
    num_chars = 0
    for root in (Path(sysconfig.get_paths()["stdlib"]), Path(torch.submodule_search_locations[0])):
        for path in sorted(root.rglob("*.py")):
            if "site-packages" in path.relative_to(root).parts or num_chars > _MAX_TRAINING_CHARS:
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            num_chars += len(text)
            yield text


class Runner:
    """Runs a batch under a schema, or without one."""

    def __init__(self, engine: LLMEngine, *, num_seqs: int, num_out: int) -> None:
        self.engine = engine
        self._num_seqs, self._num_out = num_seqs, num_out
        self._is_gpu = runs_beside_host(engine.core)

    def run(self, schema: str, *, num_seqs: int | None = None, num_out: int | None = None) -> float:
        """Seconds that a batch took: processor time where the device is a CPU."""
        num_out = num_out or self._num_out
        params = SamplingParams(temperature=0.8, max_tokens=num_out)
        if schema == FREE:
            params = params.clone(ignore_eos=True)
        else:
            params = params.clone(structured_outputs=StructuredOutputsParams(json=SCHEMAS[schema]))

        def add(i: int) -> Request:
            prompt = f"{i + 1}. Write JSON about the people in this room:\n"
            return self.engine.add_request(str(i), prompt, params.clone(seed=i))

        clock = time.perf_counter if self._is_gpu else time.process_time
        started = clock()
        num_tokens = 0
        for outputs in run_batch(self.engine, add, num_seqs or self._num_seqs, in_slices=False):
            for output in outputs:
                if output.finished:
                    num_tokens += len(output.outputs[0].token_ids)
        seconds = clock() - started
        wanted = num_out * (num_seqs or self._num_seqs)
        assert num_tokens == wanted, f"{schema}: {num_tokens} tokens came where {wanted} were asked for"
        return seconds

    def host_ms(self) -> tuple[float, ...]:
        """The loop's own milliseconds so far, and its steps."""
        host = self.engine.core.host
        times_s = (host.schedule_s, host.submit_s, host.collect_s, host.update_s)
        return (*(1e3 * seconds for seconds in times_s), float(self.engine.stats.num_steps))


def measure(runner: Runner, turns: int) -> None:
    """Print what each schema costs."""
    kinds = [FREE, *SCHEMAS]
    for kind in kinds:
        runner.run(kind)  # compiles, captures, fills the prefix cache
    ratios: dict[str, list[float]] = {kind: [] for kind in SCHEMAS}
    spent: dict[str, list[float]] = {kind: [0.0] * 5 for kind in kinds}
    for _ in range(turns):
        for kind in SCHEMAS:
            seconds = []
            for each in (FREE, kind):
                before = runner.host_ms()
                seconds.append(runner.run(each))
                pairs = zip(before, runner.host_ms(), spent[each], strict=True)
                spent[each] = [total + now - earlier for earlier, now, total in pairs]
            ratios[kind].append(seconds[1] / seconds[0])
    heads = ["", "x free text", "lowest", "highest", "a step: schedule ms", "submit", "collect", "update"]
    rows = []
    for kind in kinds:
        times = ratios.get(kind, [1.0])
        parts = [f"{ms / spent[kind][-1]:.2f}" for ms in spent[kind][:-1]]
        rows.append([kind, f"{statistics.median(times):.3f}", f"{min(times):.3f}", f"{max(times):.3f}", *parts])
    print(table(heads, rows))


def measure_first_token(runner: Runner) -> None:
    """Print how much later the first token of one request comes, its schema compiled before."""
    for kind in SCHEMAS:
        later_ms = []
        for _ in range(_NUM_FIRST_TOKENS):
            free_s = runner.run(FREE, num_seqs=1, num_out=1)
            later_ms.append(1e3 * (runner.run(kind, num_seqs=1, num_out=1) - free_s))
        low, middle, high = statistics.quantiles(later_ms, n=4)
        print(f"first token under {kind}: {middle:+.2f} ms ({low:+.2f} to {high:+.2f})")


def measure_masks(model: str, *, num_seqs: int, num_out: int) -> None:
    """Print what the masks of a step take under random text, with matchers for strings and without."""
    tokenizer = Tokenizer.from_directory(Path(model))
    vocab_size = LLAMA_8B["vocab_size"]
    assert isinstance(vocab_size, int)
    compiler = GrammarCompiler(lambda: (tokenizer, tokenizer.end_token_ids), vocab_size=vocab_size)
    num_threads = max(2, mask_threads())
    rows = RowConstraints(compiler, num_threads=num_threads)
    none: list[list[int]] = [[] for _ in range(num_seqs)]
    table_rows = []
    for name, schema in SCHEMAS.items():
        spec = SamplingSpec(grammar=lower(StructuredOutputsParams(json=schema)))
        for row in range(num_seqs):
            rows.admit(row, spec, [])
        lines = [ConstrainedLine(row, row, rows.constraint(row)) for row in range(num_seqs)]
        alone = [ConstrainedLine(row, row, rows.constraint(row).copy(with_strings=False)) for row in range(num_seqs)]
        chance = np.random.default_rng(0)
        times_ms: list[list[float]] = [[], [], [], []]
        for step in range(num_out):
            tokens: list[list[int]] = []
            for i, each in enumerate((alone, lines)):
                began = time.perf_counter()
                masks = rows.begin_masks(each, none).finish()
                filled = time.perf_counter()
                if not tokens:
                    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little", count=vocab_size)
                    tokens = [[int(chance.choice(np.flatnonzero(row)))] for row in bits]
                told = time.perf_counter()
                rows.advance(each, tokens)
                if step >= num_out // 4:  # lexers find their first states before
                    times_ms[i].append(1e3 * (filled - began))
                    times_ms[2 + i].append(1e3 * (time.perf_counter() - told))
        for row in range(num_seqs):
            rows.release(row)
        table_rows.append([name, *(f"{statistics.mean(some):.2f}" for some in times_ms)])
    heads = ["", "masks, ms: library", "and strings", "telling tokens, ms: library", "and strings"]
    print(f"{num_seqs} sequences, {num_threads} threads")
    print(table(heads, table_rows))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structured", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("model", nargs="?", default="smollm2", help="default smollm2")
    parser.add_argument("--shape", choices=["llama-3.1-8b"], help="random weights of this shape, on a GPU")
    parser.add_argument("--num-seqs", type=int, default=1, metavar="N", help="sequences at once (default 1)")
    parser.add_argument("--num-out", type=int, default=128, metavar="N", help="tokens of an answer (default 128)")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="of each schema (default 3)")
    parser.add_argument(
        "--masks-only", action="store_true", help="with --shape, and on any machine: time the masks alone"
    )
    parser.add_argument("--kwargs", default="{}", help='JSON of engine arguments, e.g. \'{"dtype": "bfloat16"}\'')
    args = parser.parse_args(argv)
    values: dict[str, Any] = {"model": args.model, "max_model_len": 1024, "max_num_seqs": max(8, args.num_seqs)}
    if args.shape:
        values |= {"model": str(write_shape()), "device": "cuda", "load_format": "dummy", "dtype": "bfloat16"}
    else:
        values["num_threads"] = 1
    if args.masks_only and args.shape:
        measure_masks(values["model"], num_seqs=args.num_seqs, num_out=args.num_out)
        return 0
    try:
        from quire.config import EngineConfig
        from quire.engine.llm_engine import LLMEngine

        engine = LLMEngine.from_config(EngineConfig(**(values | json.loads(args.kwargs))))
    except (QuireError, json.JSONDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    while runs_beside_host(engine.core) and engine.core.prepare_more():
        pass  # what is captured while a run is timed would be counted
    runner = Runner(engine, num_seqs=args.num_seqs, num_out=args.num_out)
    print(f"{args.num_seqs} sequences of {args.num_out} tokens, {args.turns} turns")
    measure(runner, args.turns)
    measure_first_token(runner)
    return 0


if __name__ == "__main__":
    sys.exit(main())
