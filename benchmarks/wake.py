"""How soon a sleeping model answers: seconds to fall asleep, to wake, and to the first token after it.

    python -m benchmarks.wake --shape llama-3.1-8b      # on a GPU, with random weights
    python -m benchmarks.wake                           # on the CPU, with the default model
    python -m benchmarks.wake --keep-kv --kwargs '{"gpu_memory_utilization": 0.5}'

The first sleep on a GPU also makes the host's copy of the weights, which stays: the sleeps after it only give memory
back. The first token is of a prompt of 64 tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.gpu import SHAPES
from quire.config import EngineConfig
from quire.errors import QuireError
from quire.lab.context import DEFAULT_MODEL
from quire.params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine

_PROMPT_TOKENS = 64


@dataclass(slots=True, frozen=True)
class Sleep:
    """One sleep. Seconds; the device's free memory in bytes, where there is such a device."""

    sleep_s: float
    wake_s: float
    first_token_s: float
    freed_bytes: int


def first_token_s(engine: LLMEngine) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    engine.add_request("first", {"prompt_token_ids": list(range(10, 10 + _PROMPT_TOKENS))}, params)
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - started


def measure(engine: LLMEngine, *, keep_kv: bool) -> Sleep:
    free = _free_bytes(engine)
    sleep_s = _seconds(lambda: engine.sleep(keep_kv=keep_kv))
    freed = _free_bytes(engine) - free
    return Sleep(sleep_s, _seconds(engine.wake_up), first_token_s(engine), freed)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _free_bytes(engine: LLMEngine) -> int:
    memory = engine.core.executor.device_memory_bytes()  # type: ignore[attr-defined]
    return 0 if memory is None else memory[1] - memory[0]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wake", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, help="on a GPU, with random weights (default: a model on the CPU)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"on the CPU (default {DEFAULT_MODEL})")
    parser.add_argument("--keep-kv", action="store_true", help="what is cached outlives the sleep")
    parser.add_argument("--sleeps", type=int, default=3, metavar="N")
    parser.add_argument("--kwargs", default="{}", help="JSON of engine arguments")
    args = parser.parse_args(argv)
    if args.shape is None:
        values = {"model": args.model, "device": "cpu"}
    else:
        values = {"model": str(SHAPES[args.shape][1]()), "device": "cuda", "load_format": "dummy", "dtype": "bfloat16"}
        values |= {"enable_sleep_mode": True, "max_model_len": 4096, "gpu_memory_utilization": 0.9}
    try:
        from quire.engine.llm_engine import LLMEngine

        engine = LLMEngine.from_config(EngineConfig(**values | json.loads(args.kwargs)))
    except (QuireError, json.JSONDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    first_token_s(engine)
    print(f"awake, first token after {first_token_s(engine) * 1e3:.1f} ms")
    print(f"{'sleep':>6}{'asleep in s':>13}{'freed GiB':>11}{'awake in s':>12}{'first token ms':>16}{'together s':>12}")
    for number in range(1, args.sleeps + 1):
        found = measure(engine, keep_kv=args.keep_kv)
        print(f"{number:>6}{found.sleep_s:>13.3f}{found.freed_bytes / 2**30:>11.1f}{found.wake_s:>12.3f}"
              f"{found.first_token_s * 1e3:>16.1f}{found.wake_s + found.first_token_s:>12.3f}", flush=True)  # fmt: skip
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
