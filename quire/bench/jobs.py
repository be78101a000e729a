"""From a command line to workloads: what to run, what to warm up with, when requests arrive, and the points of a
sweep."""

from __future__ import annotations

import argparse
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.bench.dataset import dataset_workload, read_exchanges
from quire.bench.workloads import WORKLOADS, Workload, arrival_times, burst_times, make_workload, usable_vocab
from quire.errors import ConfigError

_WARM_SEED = 100_000  # other prompts of the same kind: nothing of the run is in the prefix cache
_DEFAULT_DATASET_PROMPTS = 100


@dataclass(slots=True)
class Job:
    """One workload, ready to run."""

    name: str
    workload: Workload
    warm: Workload
    parameters: dict[str, Any] = field(default_factory=dict)
    arrivals: list[float] | None = None  # None: all at once


def add_workload_flags(parser: argparse.ArgumentParser, *, default: str) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "workloads",
        nargs="*",
        metavar="WORKLOAD",
        help=f"one or more of {', '.join(sorted(WORKLOADS))} (default {default}; fixed where lengths are given)",
    )
    group.add_argument("--dataset-name", metavar="WORKLOAD", help="the same, as one name")
    group.add_argument(
        "--dataset", "--dataset-path", metavar="FILE", help="ShareGPT-style JSON: real prompts and answer lengths"
    )
    group.add_argument("--num-prompts", type=int, metavar="N", help="requests")
    group.add_argument("--input-len", "--random-input-len", type=int, metavar="N", help="tokens of a prompt")
    group.add_argument("--output-len", "--random-output-len", type=int, metavar="N", help="tokens of an answer")
    group.add_argument(
        "--range-ratio",
        "--random-range-ratio",
        type=float,
        metavar="R",
        help="workload random: lengths are ± this share (default 0.5, and 0 where lengths are given)",
    )
    group.add_argument("--prefix-len", type=int, metavar="N", help="tokens that all prompts share (shared workloads)")
    group.add_argument("--request-rate", type=float, metavar="R", help="arrivals per second (default inf: at once)")
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="1: Poisson arrivals; below 1: bursts; inf: evenly (default 1)",
    )
    group.set_defaults(default_workload=default)


def workload_names(args: argparse.Namespace) -> list[str]:
    """The workloads that the flags name, checked before anything is loaded."""
    names = list(args.workloads)
    if args.dataset_name is not None:
        names.append(args.dataset_name)
    for name in names:
        if name not in WORKLOADS:
            raise ConfigError(f"unknown workload {name!r}: there are {', '.join(sorted(WORKLOADS))}")
    if args.dataset is not None:
        # vLLM's users write both: --dataset-name sharegpt --dataset-path FILE.
        if any(name != "sharegpt" for name in names):
            raise ConfigError(f"--dataset brings its own prompts: leave {names[0]!r} out")
        return []
    if names:
        return names
    if args.default_workload == "random" and _wants_exact_lengths(args):
        return ["fixed"]
    given = {key for key, value in _parameters(args, args.default_workload).items() if value is not None}
    if given <= set(inspect.signature(WORKLOADS[args.default_workload]).parameters):
        return [args.default_workload]
    return ["fixed" if args.range_ratio is None else "random"]


def check_workload_flags(args: argparse.Namespace) -> None:
    """Refuse whatever can be found wrong without a model."""
    for name in workload_names(args):
        make_workload(name, 1000, **_parameters(args, name))
    if args.dataset is not None:
        read_exchanges(args.dataset)
        for flag in ("range_ratio", "prefix_len", "input_len"):
            if getattr(args, flag) is not None:
                raise ConfigError(
                    f"--{flag.replace('_', '-')} does not go with --dataset, whose prompts are as they are"
                )
        if args.num_prompts is not None and args.num_prompts < 1:
            raise ConfigError(f"--num-prompts must be at least 1, got {args.num_prompts}")
    _arrivals(args, "", 1)


def make_jobs(
    args: argparse.Namespace, *, vocab_size: int, max_model_len: int, encode: Callable[[str], list[int]] | None
) -> Iterator[Job]:
    """The workloads that the flags name, one at a time. `encode` is only needed for a dataset."""
    vocab = usable_vocab(vocab_size)
    for name in workload_names(args):
        parameters = _parameters(args, name)
        workload = make_workload(name, vocab, **parameters)
        warm = make_workload(name, vocab, **(parameters | {"seed": _WARM_SEED + (args.seed or 0)}))
        yield _job(args, name, workload, warm, {k: v for k, v in parameters.items() if v is not None})
    if args.dataset is not None:
        if encode is None:
            raise ConfigError("a dataset needs a tokenizer to count its tokens")
        exchanges = read_exchanges(args.dataset)
        num, seed = args.num_prompts or _DEFAULT_DATASET_PROMPTS, args.seed or 0
        options: dict[str, Any] = {"num": num, "max_len": max_model_len, "seed": seed, "num_out": args.output_len}
        workload = dataset_workload(exchanges, encode, **options)
        warm = dataset_workload(exchanges, encode, skip=num, **options)
        parameters = {"dataset": str(args.dataset), "num": num, "seed": seed}
        yield _job(args, Path(args.dataset).stem, workload, warm, parameters)


def _job(args: argparse.Namespace, name: str, workload: Workload, warm: Workload, parameters: dict[str, Any]) -> Job:
    if args.request_rate is not None and math.isfinite(args.request_rate):
        parameters |= {"request_rate": args.request_rate, "burstiness": args.burstiness}
    return Job(name, workload, warm, parameters, _arrivals(args, name, len(workload)))


def _arrivals(args: argparse.Namespace, name: str, num: int) -> list[float] | None:
    if args.request_rate is not None:
        times = arrival_times(num, args.request_rate, burstiness=args.burstiness, seed=args.seed or 0)
        return None if math.isinf(args.request_rate) else times
    if args.burstiness != 1.0:
        raise ConfigError("--burstiness says how requests are spread in time: give --request-rate too")
    return burst_times(num) if name == "burst" else None


def _wants_exact_lengths(args: argparse.Namespace) -> bool:
    """A length that is given is meant, unless a range around it is asked for, as with vLLM."""
    return args.range_ratio is None and (args.input_len is not None or args.output_len is not None)


def _parameters(args: argparse.Namespace, name: str) -> dict[str, Any]:
    known = inspect.signature(WORKLOADS[name]).parameters
    # A shared workload's input length is what each prompt has for itself.
    in_name = "suffix" if "suffix" in known else "num_in"
    is_exact = name == "random" and _wants_exact_lengths(args)
    return {
        "seed": args.seed,
        "num": args.num_prompts,
        in_name: args.input_len,
        "num_out": args.output_len,
        "range_ratio": 0.0 if is_exact else args.range_ratio,
        "prefix": args.prefix_len,
    }


# -- a sweep: any flag over a list of values, with any command inside

# Switches have no value: what to write for on and for off.
_SWITCHES = {
    "enable-prefix-caching": ([], ["--no-enable-prefix-caching"]),
    "enable-chunked-prefill": ([], ["--no-enable-chunked-prefill"]),
    "enforce-eager": (["--enforce-eager"], []),
    "ignore-eos": ([], ["--no-ignore-eos"]),
}
_ON, _OFF = {"on", "true", "yes", "1"}, {"off", "false", "no", "0"}

Point = dict[str, str]


def parse_axes(texts: Sequence[str]) -> dict[str, list[str]]:
    """ "block-size=8,16" -> {"block-size": ["8", "16"]}; underscores and leading dashes are fine too."""
    axes: dict[str, list[str]] = {}
    for text in texts:
        flag, equals, values = text.partition("=")
        flag = flag.lstrip("-").replace("_", "-")
        chosen = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not flag or not chosen:
            raise ConfigError(f"--vary {text!r}: write a flag and its values, as in block-size=8,16,32")
        if flag in axes:
            raise ConfigError(f"--vary names {flag} twice: give all its values at once")
        axes[flag] = chosen
    return axes


def points(axes: dict[str, list[str]]) -> list[Point]:
    """Every combination; the first flag changes slowest."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def point_arguments(point: Point) -> list[str]:
    """What a point adds to the command line."""
    arguments: list[str] = []
    for flag, value in point.items():
        if flag in _SWITCHES:
            on, off = _SWITCHES[flag]
            if value.lower() not in _ON | _OFF:
                raise ConfigError(f"--vary {flag}={value}: it is a switch, its values are on and off")
            arguments += on if value.lower() in _ON else off
        else:
            name = "dataset-name" if flag == "workload" else flag
            arguments.append(f"--{name}={value}")
    return arguments
