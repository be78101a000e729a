"""Fuzz for longer than the tests do, or try one file again:

make fuzz TARGETS='http_body yaml_settings' SECONDS=600
PYTHONPATH=.:tests python -m fuzz http_body --seconds 600 --seed 1
PYTHONPATH=.:tests python -m fuzz http_body --file finding-http_body
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from fuzz.harness import Finding, check, fuzz
from fuzz.targets import load_target, target_names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(target_names())} (default: all)")
    parser.add_argument("--seconds", type=float, default=60, help="CPU time for each target (default 60)")
    parser.add_argument("--seed", type=int, help="the same seed tries the same inputs (default: the clock)")
    parser.add_argument("--file", type=Path, help="try this input alone")
    args = parser.parse_args()
    if unknown := set(args.targets) - set(target_names()):
        parser.error(f"there is no target {', '.join(sorted(unknown))}: use {', '.join(target_names())}")
    seed = int(time.time()) if args.seed is None else args.seed
    num_findings = 0
    for name in args.targets or target_names():
        target = load_target(name)
        try:
            if args.file is not None:
                check(target, args.file.read_bytes())
                print(f"{name}: held for {args.file}")
            else:
                print(f"{name}: held for {fuzz(target, seconds=args.seconds, seed=seed)} inputs (seed {seed})")
        except Finding as finding:
            num_findings += 1
            path = Path(f"finding-{name}")
            path.write_bytes(finding.data)
            print(f"{finding}\n  the input is in {path}; try it again with --file {path}", file=sys.stderr)
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
