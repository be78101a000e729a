"""`quire pull`: fetch a model now, so that everything later works offline."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from quire.log import get_logger
from quire.weights.aliases import ALIASES
from quire.weights.open import DEFAULT_MODEL, resolve_model
from quire.weights.progress import ProgressBar, format_bytes
from quire.weights.pull import pull_alias


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "pull",
        help="fetch a model",
        description="Fetch a model, check it, and say where it lies. A model that is there already is checked again.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"an alias (see quire models), owner/name, or owner/name:Q4_K_M for GGUF; default: {DEFAULT_MODEL}",
    )
    parser.add_argument("--revision", help="a branch, tag or commit of a hub id")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    get_logger()  # from here on the log's lines are seen: what is fetched, and when another process is waited for
    alias = ALIASES.get(args.model)
    if alias is not None and args.revision is None:
        with ProgressBar(f"pulling {args.model}") as bar:
            path = pull_alias(alias, on_progress=bar, verify=True)
    else:
        path = resolve_model(args.model, revision=args.revision)
    num_bytes = bytes_of(path)
    if args.json:
        print(json.dumps({"model": args.model, "path": str(path), "bytes": num_bytes}))
    else:
        print(f"{args.model}: {format_bytes(num_bytes)} in {path}")
    return 0


def bytes_of(path: Path) -> int:
    """The size of a file, or of the files right in a directory."""
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
