"""A prompt's blocks on their way to another engine: how much is still to come when the prompt is computed.

    python -m benchmarks.sends                            # two engines on the CPU, with the default model
    python -m benchmarks.sends --shape llama-3.1-8b       # two on one GPU, with random weights
    python -m benchmarks.sends --tokens 512 2048 --kwargs '{"max_num_batched_tokens": 512}'

Blocks go with the steps that fill them, a few layers at a time, or, in turn with that, as whole blocks behind them.
Both engines are in this process; the second only takes what comes. Bytes are those that it has when the prompt's first
token is there.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import SHAPES
from quire.config import EngineConfig
from quire.errors import QuireError
from quire.lab.context import DEFAULT_MODEL
from quire.params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine
    from quire.tiers.sealed import SealedStore

_WITHIN_S = 60.0


@dataclass(slots=True, frozen=True)
class Sent:
    """One prompt. Bytes of its full blocks: all, and those that were not there when it was computed."""

    num_steps: int
    num_bytes: int
    num_left: int
    first_token_s: float
    rest_s: float  # from then on until the other engine had all of it


def measure(here: LLMEngine, there: LLMEngine, prompt: list[int], *, with_steps: bool) -> Sent:
    from quire.executor.stores import address_of

    scheduler, inbox = here.core.scheduler, there.core.executor.stores[-1]  # type: ignore[attr-defined]
    plan_filled = scheduler.traffic.plan_filled
    if not with_steps:
        scheduler.traffic.plan_filled = lambda step: None  # type: ignore[method-assign]
    num_blocks = len(prompt) // here.core.kv.block_size * len(here.core.kv.windows)
    num_before = _num_received(inbox)
    params = SamplingParams(temperature=0.0, max_tokens=4096, ignore_eos=True, detokenize=False)
    here.add_request("sent", {"prompt_token_ids": prompt}, params)
    scheduler.traffic.send(scheduler.requests["sent"], address_of([inbox]) or "")
    started, num_steps = time.perf_counter(), scheduler.stats.num_steps
    while not any(output.outputs[0].token_ids for output in here.step()):
        pass
    first_s, num_steps = time.perf_counter(), scheduler.stats.num_steps - num_steps
    num_left = (num_blocks - (_num_received(inbox) - num_before)) * inbox.block_bytes
    while _num_received(inbox) - num_before < num_blocks:
        here.step()
        if time.perf_counter() - first_s > _WITHIN_S:
            raise QuireError(f"the blocks of {len(prompt)} tokens did not arrive in {_WITHIN_S:g} s")
    rest_s = time.perf_counter() - first_s
    here.abort_request("sent")
    here.core.settle(_WITHIN_S)
    scheduler.traffic.plan_filled = plan_filled  # type: ignore[method-assign]
    there.core.kv.expire(prompt)
    return Sent(num_steps, num_blocks * inbox.block_bytes, round(num_left), first_s - started, rest_s)


def _num_received(inbox: SealedStore) -> float:
    """Blocks, and parts of blocks by their bytes."""
    usage = inbox.usage()
    return usage["num_received"] + usage["incomplete_bytes"] / inbox.block_bytes


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sends", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, help="on a GPU, with random weights (default: a model on the CPU)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"on the CPU (default {DEFAULT_MODEL})")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048], metavar="N", help="of prompts")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--kwargs", default="{}", help="JSON of engine arguments")
    args = parser.parse_args(argv)
    values: dict[str, Any] = {"model": args.model, "device": "cpu", "kv_cache_memory_bytes": 2 << 30}
    if args.shape is not None:
        values = {"model": str(SHAPES[args.shape][1]()), "device": "cuda", "load_format": "dummy", "dtype": "bfloat16"}
        values |= {"kv_cache_memory_bytes": 8 << 30}
    try:
        values |= {"max_model_len": max(args.tokens) + 4096} | json.loads(args.kwargs)
        with tempfile.TemporaryDirectory(prefix="quire-sends-") as folder:
            run([EngineConfig(**values, kv_listen=f"{folder}/{name}") for name in "ab"], args.tokens, args.rounds)
    except (QuireError, json.JSONDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(configs: list[EngineConfig], lengths: list[int], num_rounds: int) -> None:
    from quire.engine.llm_engine import LLMEngine

    here, there = map(LLMEngine.from_config, configs)
    rng = random.Random(0)
    print(
        f"{'tokens':>7}  {'blocks go':<15}{'steps':>6}{'MB':>8}{'MB left':>9}{'%':>6}{'computed s':>12}{'rest ms':>9}"
    )
    for num_tokens in lengths:
        for number in range(1 + num_rounds):
            for with_steps in (False, True):
                prompt = [rng.randrange(10, 250) for _ in range(num_tokens)]
                found = measure(here, there, prompt, with_steps=with_steps)
                if number:  # in the first, connections are made and pages touched
                    how = "with their step" if with_steps else "behind it"
                    print(f"{num_tokens:>7}  {how:<15}{found.num_steps:>6}{found.num_bytes / 1e6:>8.1f}"
                          f"{found.num_left / 1e6:>9.1f}{100 * found.num_left / found.num_bytes:>6.1f}"
                          f"{found.first_token_s:>12.3f}{found.rest_s * 1e3:>9.1f}", flush=True)  # fmt: skip
    for engine in (here, there):
        engine.close()


if __name__ == "__main__":
    sys.exit(main())
