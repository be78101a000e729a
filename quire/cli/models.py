"""`quire models`: which models there are by short name, and what is on this machine."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import asdict, dataclass
from typing import Any

from quire.weights.aliases import ALIASES
from quire.weights.hub import cached_repos
from quire.weights.progress import format_bytes

_HEADINGS = ("MODEL", "SIZE", "LICENCE", "CACHED", "WHERE")


@dataclass(slots=True, frozen=True)
class ModelRow:
    """One model as `quire models` lists it."""

    model: str
    bytes: int
    licence: str | None  # None: see the model's page
    cached: bool
    path: str | None
    source: str


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "models",
        help="list models",
        description="List the models that have a short name, and the hub's models in the local cache.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows = list_models()
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    cells = [
        (row.model, format_bytes(row.bytes), row.licence or "see hub", "yes" if row.cached else "no", _where(row))
        for row in rows
    ]
    widths = [max(len(line[i]) for line in (_HEADINGS, *cells)) for i in range(len(_HEADINGS) - 1)]
    # On a terminal lines are cut to its width; a pipe gets them whole.
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in (_HEADINGS, *cells):
        padded = [cell.ljust(width) for cell, width in zip(line[:-1], widths, strict=True)]
        print("  ".join([*padded, line[-1]])[:columns])
    return 0


def list_models() -> list[ModelRow]:
    rows = []
    for alias in ALIASES.values():
        cached = alias.is_cached()
        path = str(alias.path()) if cached else None
        rows.append(ModelRow(alias.name, alias.member_bytes, alias.licence, cached, path, alias.requirement))
    for repo in cached_repos():
        rows.append(ModelRow(repo.name, repo.num_bytes, None, True, str(repo.path), "hub"))
    return rows


def _where(row: ModelRow) -> str:
    return row.path or f"fetched at first use, or by: quire pull {row.model}"
