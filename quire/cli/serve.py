"""quire serve: OpenAI's API over HTTP."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

from quire.cli.parser import WideHelp, needs_server
from quire.cli.settings_file import Flag, Gathered, gather
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.server.settings import ApiKey, ServerSettings

_EPILOG = """\
Every flag may stand in three places; the first that has it wins:
  command line   --max-num-seqs 64
  environment    QUIRE_MAX_NUM_SEQS=64   (lists with spaces between, switches as true or false)
  --config FILE  max-num-seqs: 64        (YAML; also QUIRE_CONFIG=FILE)

Numbers may end in k, m, g (thousands) or K, M, G (1024s); sizes also in GB or GiB.
A key is safer in a file or a variable than on the command line, which other users of the machine can read.

  quire serve                                 the default model at http://127.0.0.1:8000
  quire serve ./my-model --port 9000 --api-key-file keys.txt
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP with OpenAI's API",
        description="Serve a model over HTTP with OpenAI's API, metrics, and a page that shows the KV blocks at work.",
        usage="quire serve [MODEL] [flags]",
        epilog=_EPILOG,
        formatter_class=WideHelp,
    )
    parser.set_defaults(run=run)
    # The flags' own module needs the server's: only when they are wanted.
    from quire.cli.serve_flags import GROUPS, REFUSED_FLAGS, help_of

    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the model; the same as --model")
    parser.add_argument("--config", metavar="FILE", help="a YAML file with any of these flags")
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _shown(flag, help_of(flag)).add_to(group)
    hidden = parser.add_argument_group()
    for flag in REFUSED_FLAGS:
        flag.add_to(hidden)


def run(args: argparse.Namespace) -> int:
    with needs_server("quire serve"):
        from quire.server.run import serve
    config, settings, warnings = read(args, os.environ)
    for warning in warnings:
        print(f"quire: warning: {warning}", file=sys.stderr)
    return serve(config, settings)


def read(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[EngineConfig, ServerSettings, list[str]]:
    """Flags, variables and file, checked and put together; and what deserves a warning."""
    from quire.cli.serve_flags import GROUPS, REFUSED_FLAGS, check_refused, engine_names, settings_field

    found = gather((*(f for flags in GROUPS.values() for f in flags), *REFUSED_FLAGS), args, environ)
    check_refused(found)
    _take_positional(found, args.positional_model)
    values = dict(found.values)
    of_engine = engine_names()
    engine = {name: values.pop(name) for name in list(values) if name in of_engine}
    keys = _api_keys(values.pop("api_key", []), values.pop("api_key_file", None), found.sources.get("api_key", ""))
    server: dict[str, Any] = {
        settings_field(name): tuple(v) if isinstance(v, list) else v for name, v in values.items()
    }
    return _engine_config(engine), ServerSettings(**server, api_keys=keys), found.warnings


def _take_positional(found: Gathered, model: str | None) -> None:
    if model is None:
        return
    if found.sources.get("model") == "--model" and found.values["model"] != model:
        raise ConfigError(f"two models are given, {model} and --model {found.values['model']}: give one")
    found.values["model"] = model


def _engine_config(values: dict[str, Any]) -> EngineConfig:
    length = values.get("max_model_len")
    if isinstance(length, str) and length not in ("auto", "-1"):
        from quire.cli.settings_file import read_count

        try:
            values["max_model_len"] = read_count(length)
        except ValueError as error:
            raise ConfigError(f"max_model_len must be auto or {error}, got {length!r}") from None
    elif length == "-1":
        values["max_model_len"] = -1
    return EngineConfig(**values)


def _api_keys(given: list[str], path: str | None, source: str) -> tuple[ApiKey, ...]:
    from quire.server.auth import make_key, read_key_file

    keys = [make_key(key, source=source) for key in given]
    if path is not None:
        keys += read_key_file(path)
    return tuple(keys)


def _shown(flag: Flag, text: str) -> Flag:
    import dataclasses

    return dataclasses.replace(flag, help=text.replace("%", "%%"))
