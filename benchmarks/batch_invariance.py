"""What batch_invariant=True costs on a CPU, and what deterministic=True costs where one request of a batch has it: the
same work on engines of one thread, turn by turn, in CPU seconds, so that what else the machine does counts as little as
it can.

python -m benchmarks.batch_invariance
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from quire import LLM, SamplingParams

# Prompts, their length, and tokens out of each.
WORK = {"decode": (8, 16, 24), "mixed": (6, 128, 16), "prompts of 512": (1, 512, 1), "prompts of 2,048": (1, 2048, 1)}


def seconds(llm: LLM, count: int, length: int, num_out: int, turn: int, num_marked: int = 0) -> float:
    prompts = [[(7 * i + 31 * j + 1_000 * turn) % 40_000 + 100 for j in range(length)] for i in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True, detokenize=False)
    of_each = [params.clone(deterministic=True)] * num_marked + [params] * (count - num_marked)
    started = time.process_time()
    llm.generate(prompts, of_each, use_tqdm=False)
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    settings: dict[str, Any] = {
        "device": "cpu",
        "num_threads": 1,
        "kv_cache_memory_bytes": 256 << 20,
        "max_model_len": 2560,
    }
    engines = [LLM(args.model, batch_invariant=on, **settings) for on in (False, True)]
    found = {}
    for name, work in WORK.items():
        ratios: dict[str, list[float]] = {"batch_invariant": [], "one deterministic": []}
        for turn in range(args.repeats + 1):
            off, on = (seconds(llm, *work, 2 * turn) for llm in engines)
            marked = seconds(engines[0], *work, 2 * turn + 1, num_marked=1)
            if turn:  # the first touches memory
                ratios["batch_invariant"].append(on / off)
                ratios["one deterministic"].append(marked / off)
        found[name] = {
            f"time with / without, {kind}": (round(statistics.median(each), 3), [round(r, 3) for r in each])
            for kind, each in ratios.items()
        }
        print(name, found[name], flush=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
