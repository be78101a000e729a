"""quire env: what is installed and what the machine offers, for bug reports."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import Any

import quire
from quire.bench.machine import cpu_name, num_usable_cpus, package_version

_PACKAGES = (
    *("torch", "triton", "numpy", "tokenizers", "safetensors", "huggingface_hub", "gguf", "jinja2"),
    "transformers",
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("env", help="show versions, hardware and kernel backends")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    for name, value in facts.items():
        print(f"{name:<18}{'none' if value is None else value}")
    return 0


def collect() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "quire": quire.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
    }
    facts |= {package: package_version(package) for package in _PACKAGES}
    facts["cpu"] = cpu_name()
    facts["cpus usable"] = num_usable_cpus()
    from quire.executor.memory import available_host_bytes

    free = available_host_bytes()
    facts["memory free"] = None if free is None else f"{free / (1 << 30):.1f} GiB"
    facts["native kernels"] = _native()
    facts["gpu"] = _gpu()
    from quire.weights import quire_home

    facts["QUIRE_HOME"] = str(quire_home())
    return facts


def _native() -> str:
    from quire.kernels import cpu
    from quire.kernels.cpu.library import available_isas

    reason = cpu.unavailable_reason()
    return f"not used: {reason}" if reason else f"{', '.join(available_isas())} (the first is used)"


def _gpu() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return f"{torch.cuda.get_device_name()}, {free / (1 << 30):.1f} of {total / (1 << 30):.1f} GiB free"
