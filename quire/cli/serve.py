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
from quire.server.settings import ApiKey, ModelSettings, ServerSettings, make_key, read_key_file

_EPILOG = """\
Every flag may stand in three places; the first that has it wins:
  command line   --max-num-seqs 64
  environment    QUIRE_MAX_NUM_SEQS=64   (lists with spaces between, switches as true or false)
  --config FILE  max-num-seqs: 64        (YAML; also QUIRE_CONFIG=FILE)

Numbers may end in k, m, g (thousands) or K, M, G (1024s); sizes also in GB or GiB.
A key is safer in a file or a variable than on the command line, which other users of the machine can read.

  quire serve                                 the default model at http://127.0.0.1:8000
  quire serve ./my-model --port 9000 --api-key-file keys.txt
  quire serve ./large ./small --served-model-name large small --memory-shares 0.7 0.3

In the file, models: lists several with settings of their own: model, served-model-name, memory-share, engine flags.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP with OpenAI's API",
        description="Serve a model over HTTP with OpenAI's API, metrics, and a page that shows the KV blocks at work.",
        usage="quire serve [MODEL ...] [flags]",
        epilog=_EPILOG,
        formatter_class=WideHelp,
    )
    parser.set_defaults(run=run)
    # The flags' own module needs the server's: only when they are wanted.
    from quire.cli.serve_flags import GROUPS, REFUSED_FLAGS, help_of

    parser.add_argument("positional_models", nargs="*", metavar="MODEL", help="the model, as --model; or several")
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
    models, settings, warnings = read(args, os.environ)
    for warning in warnings:
        print(f"quire: warning: {warning}", file=sys.stderr)
    return serve(models, settings)


def read(
    args: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[tuple[ModelSettings, ...], ServerSettings, list[str]]:
    """Flags, variables and file, checked and put together; and what deserves a warning."""
    from quire.cli.serve_flags import GROUPS, REFUSED_FLAGS, check_refused, engine_names, settings_field

    found = gather((*(f for flags in GROUPS.values() for f in flags), *REFUSED_FLAGS), args, environ)
    for one in (found, *found.models):
        check_refused(one)
    models = _several(found, args.positional_models, engine_names())
    if not models:
        _take_positional(found, next(iter(args.positional_models), None))
    values = dict(found.values)
    if shares := values.pop("memory_shares", None):
        raise ConfigError(f"memory_shares divide the memory among several models: {shares} are given for one")
    of_engine = engine_names()
    engine = {name: values.pop(name) for name in list(values) if name in of_engine}
    keys = _api_keys(values.pop("api_key", []), values.pop("api_key_file", None), found.sources.get("api_key", ""))
    server: dict[str, Any] = {
        settings_field(name): tuple(v) if isinstance(v, list) else v for name, v in values.items()
    }
    settings = ServerSettings(**server, api_keys=keys)
    wanted = tuple(ModelSettings(_engine_config(engine | one), names) for names, one in models or [((), {})])
    if settings.lora_modules and not any(model.config.enable_lora for model in wanted):
        raise ConfigError(f"{found.sources['lora_modules']} needs --enable-lora")
    return wanted, settings, found.warnings


def _several(found: Gathered, given: list[str], known: set[str]) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """The names and the settings of each of several models, taken out of `found`; empty where there is one."""
    if found.models:
        if given or "model" in found.values:
            raise ConfigError("models are given on the command line and as a list in the file: leave out one of them")
        for name in ("served_model_name", "memory_shares"):
            if name in found.values:
                raise ConfigError(f"{found.sources[name]}: with a list of models, each has its own in the file")
        return [_own_settings(one, known) for one in found.models]
    if len(given) < 2:
        return []
    if found.sources.get("model") == "--model":
        raise ConfigError(f"models are given twice: {', '.join(given)} and --model {found.values['model']}")
    found.values.pop("model", None)
    names, shares = (found.values.pop(name, None) for name in ("served_model_name", "memory_shares"))
    for what, values in (("served_model_name", names), ("memory_shares", shares)):
        if values is not None and len(values) != len(given):
            raise ConfigError(f"{what} has {len(values)} values for {len(given)} models: give one for each")
    return [
        ((names[i],) if names else (), {"model": model} | ({"memory_share": shares[i]} if shares else {}))
        for i, model in enumerate(given)
    ]


def _own_settings(found: Gathered, known: set[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    values = dict(found.values)
    names = tuple(values.pop("served_model_name", ()))
    for name in values:
        if name not in known:
            raise ConfigError(f"{found.sources[name]} is a setting of the server: put it beside models")
    if "model" not in values:
        raise ConfigError("an entry of models in the file names no model: begin it with `- model: ./my-model`")
    return names, values


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
    keys = [make_key(key, source=source) for key in given]
    if path is not None:
        keys += read_key_file(path)
    return tuple(keys)


def _shown(flag: Flag, text: str) -> Flag:
    import dataclasses

    return dataclasses.replace(flag, help=text.replace("%", "%%"))
