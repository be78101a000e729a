"""`quire lab`: the PagedAttention experiments on this machine, and a report of them."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from quire.cli.parser import WideHelp
from quire.errors import ConfigError

_DEFAULT_FOLDER = "quire-lab"


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "lab",
        help="run the PagedAttention experiments and write a report",
        description="Runs the experiments one after the other on this machine and writes a report with charts, tables, "
        "what was\nexpected and what was seen (report.html), and every number behind it (report.json). Each experiment "
        "is saved\nwhen it is done: after Ctrl-C the same command goes on with those that are missing.",
        usage="quire lab [EXPERIMENT ...] [flags]",
        epilog="examples:\n"
        "  quire lab --quick\n"
        "  quire lab --output-dir my-machine\n"
        "  quire lab batch-width pressure\n"
        "  quire lab --gpu-8b --output-dir h200",
        formatter_class=WideHelp,
    )
    parser.add_argument(
        "experiments", nargs="*", metavar="EXPERIMENT", help="some of them, by key or number; --list shows them"
    )
    parser.add_argument("--quick", action="store_true", help="less of everything: under 3 minutes on two cores")
    parser.add_argument("--only", metavar="KEY,...", help="the same, with commas between")
    parser.add_argument("--list", action="store_true", help="list the experiments and end")
    parser.add_argument(
        "--output-dir",
        metavar="DIR",
        default=_DEFAULT_FOLDER,
        help=f"where the report goes (default {_DEFAULT_FOLDER})",
    )
    parser.add_argument("--fresh", action="store_true", help="do again what is done already")
    parser.add_argument("--retell", action="store_true", help="write a report's page and words anew from its numbers")
    parser.add_argument(
        "--gpu-8b", action="store_true", help="on a GPU, with Llama-3.1-8B's shape and random weights (needs 60 GiB)"
    )
    parser.add_argument("--model", metavar="M", help="on the CPU, another model than the default (smollm2)")
    parser.add_argument("--load-format", metavar="FORMAT", help="of --model: auto, safetensors, gguf or dummy")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths, prompts and arrivals (default 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from quire.lab.experiments import EXPERIMENTS, choose
    from quire.lab.store import HTML_NAME, JSON_NAME, open_report, read_report, run_lab

    if args.list:
        for number, each in enumerate(EXPERIMENTS, 1):
            print(f"{number:3}  {each.key:16} {each.title}")
        return 0
    folder = Path(args.output_dir)
    if args.retell:
        read_report(folder / JSON_NAME).write(folder)
        return 0
    keys = _keys(args)
    chosen = choose(keys)
    settings = _settings(args)
    report = open_report(folder, settings, fresh=args.fresh and keys is None)
    _check_device(args)
    screen = _Screen(len(chosen), [each.key for each in chosen])
    is_whole = run_lab(report, folder, chosen, screen.say, fresh=args.fresh)
    screen.end()
    print(f"report: {folder / HTML_NAME}")
    if not is_whole:
        print("quire: interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    failed = [each.key for each in chosen if report.entries[each.key].status == "failed"]
    if failed:
        print(f"quire: failed: {', '.join(failed)}; the report says why", file=sys.stderr)
    return 1 if failed else 0


def _keys(args: argparse.Namespace) -> list[str] | None:
    """The experiments that were named, here or there; None for all of them."""
    words = [*args.experiments, *([] if args.only is None else [args.only])]
    return [key.strip() for word in words for key in word.split(",") if key.strip()] if words else None


def _settings(args: argparse.Namespace) -> Any:
    from quire.config import EngineConfig
    from quire.lab.context import DEFAULT_MODEL, LabSettings

    if args.gpu_8b and (args.model is not None or args.load_format is not None):
        raise ConfigError("--gpu-8b brings its own model: leave --model and --load-format out")
    model, load_format = args.model or DEFAULT_MODEL, args.load_format or "auto"
    EngineConfig(model=model, load_format=load_format, seed=args.seed)  # a mistake should be told now
    return LabSettings(args.quick, args.seed, model, load_format, args.gpu_8b)


def _check_device(args: argparse.Namespace) -> None:
    if not args.gpu_8b:
        from quire.weights import resolve_model

        resolve_model(args.model or "smollm2", load_format=args.load_format or "auto")
        return
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("--gpu-8b needs a CUDA GPU, and there is none: leave it out to run on the CPU")


class _Screen:
    """Progress: one line that changes on a terminal, and a line for each experiment that ends."""

    def __init__(self, num_chosen: int, keys: list[str]) -> None:
        self._numbers = {key: f"{at}/{num_chosen}" for at, key in enumerate(keys, 1)}
        self._started_s = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def say(self, key: str, text: str) -> None:
        line = f"{self._elapsed()}  {self._numbers.get(key, '')} {key}: {text}"
        is_ending = text.startswith(("done", "failed", "skipped"))
        if not self._is_terminal:
            print(line, file=sys.stderr, flush=True)
            return
        sys.stderr.write("\r\x1b[K" + (line + "\n" if is_ending else line[:110]))
        sys.stderr.flush()

    def end(self) -> None:
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._started_s)
        return f"{seconds // 60:2}:{seconds % 60:02}"
