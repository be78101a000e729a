"""Parts of `quire lab tiers`, without its report: what levels below the device are worth.

    python -m benchmarks.tiers --gpu-8b                             # all parts
    python -m benchmarks.tiers --gpu-8b link first-tokens beside    # all but the chats, which take a minute
    python -m benchmarks.tiers --quick                              # on the CPU, with SmolLM2 and a disk

Numbers are printed as they come, seconds and bytes as they were measured.
"""

from __future__ import annotations

import argparse
import json
import time

from quire.lab.context import LabContext, LabSettings
from quire.lab.tiers import PARTS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--gpu-8b", action="store_true", help="on a GPU, with Llama-3.1-8B's shape and random weights")
    parser.add_argument("--quick", action="store_true", help="less of everything, on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    context = LabContext(LabSettings(quick=args.quick, seed=args.seed, gpu_8b=args.gpu_8b), print)
    try:
        for name in args.parts or PARTS:
            started = time.perf_counter()
            found = PARTS[name](context)
            print(f"{name}, {time.perf_counter() - started:.1f} s: {json.dumps(found, indent=2)}", flush=True)
    finally:
        context.close()


if __name__ == "__main__":
    main()
