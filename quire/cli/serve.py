"""quire serve: OpenAI's API over HTTP."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any

from quire import refusals
from quire.cli.options import ENGINE_SWITCHES, MODEL_FLAGS, RUNTIME_FLAGS, SHORT, json_value, metavar_of
from quire.cli.parser import WideHelp, needs_server
from quire.cli.settings_file import (
    Flag,
    Gathered,
    gather,
    read_count,
    read_json,
    read_json_or_text,
    read_number,
    read_text,
)
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.refusals import Refusal
from quire.server.settings import ApiKey, ModelSettings, ServerSettings, make_key, read_key_file
from quire.sizes import read_size

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
    found = gather((*(f for flags in GROUPS.values() for f in flags), *REFUSED_FLAGS), args, environ)
    for one in (found, *found.models):
        check_refused(one)
    of_engine = engine_names()
    models = _several(found, args.positional_models, of_engine)
    if not models:
        _take_positional(found, next(iter(args.positional_models), None))
    values = dict(found.values)
    if shares := values.pop("memory_shares", None):
        raise ConfigError(f"memory_shares divide the memory among several models: {shares} are given for one")
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


# -- the flags: vLLM's names where vLLM has the flag, in the groups that --help shows

# Names that ServerSettings spells with a unit or in the plural.
_FIELDS = {
    "served_model_name": "served_model_names",
    "cors_origin": "cors_origins",
    "header_timeout": "header_timeout_s",
    "body_timeout": "body_timeout_s",
    "keep_alive": "keep_alive_s",
    "default_timeout": "default_timeout_s",
    "max_timeout": "max_timeout_s",
    "drain_timeout": "drain_timeout_s",
    "step_timeout": "step_timeout_s",
    "wake_timeout": "wake_timeout_s",
}
_ALIASES = SHORT | {"quantization": ("-q",), "swap_space_gb": ("--swap-space",), "speculative_config": ("-sc",)}
_READERS: dict[Any, Any] = {int: read_count, float: read_number, str: read_text, json_value: read_json}


def _from_table(table: Mapping[str, tuple[Any, str]]) -> list[Flag]:
    return [
        Flag(name=name, help=text, read=_READERS[kind], metavar=metavar_of(kind), aliases=_ALIASES.get(name, ()))
        for name, (kind, text) in table.items()
    ]


def _seconds(name: str, text: str) -> Flag:
    return Flag(name=name, help=text, read=read_number, metavar="SECONDS")


def _size(name: str, text: str) -> Flag:
    return Flag(name=name, help=text, read=read_size, metavar="SIZE")


def _count(name: str, text: str) -> Flag:
    return Flag(name=name, help=text, read=read_count, metavar="N")


def _path(name: str, text: str, *, is_guard: bool = False) -> Flag:
    return Flag(name=name, help=text, metavar="PATH", is_guard=is_guard)


def _listed(name: str, metavar: str, text: str, **others: Any) -> Flag:
    """A list, of which one flag takes several values."""
    return Flag(name=name, help=text, metavar=metavar, is_list=True, takes_several=True, **others)


def _repeated(name: str, metavar: str, text: str, **others: Any) -> Flag:
    return Flag(name=name, help=f"{text}; may be repeated", metavar=metavar, is_list=True, **others)


def _text(name: str, metavar: str, text: str) -> Flag:
    return Flag(name=name, help=text, metavar=metavar)


def _switch(name: str, text: str) -> Flag:
    return Flag(name=name, help=text, is_switch=True)


_MODEL = [
    _text("model", "MODEL", "alias, directory, GGUF file or hub id, also owner/name:Q4_K_M (default smollm2)"),
    _listed("served_model_name", "NAME", "names under which clients ask for it, or one a model (default: as given)"),
    _listed(
        "lora_modules",
        "ADAPTER",
        "adapters as NAME=PATH or as JSON, each served under its name",
        read=read_json_or_text,
    ),
    _listed(
        "memory_shares",
        "SHARE",
        "what each of several models takes while awake (default: by weights)",
        read=read_number,
    ),
    *_from_table(MODEL_FLAGS),
    Flag(name="hf_overrides", help="values over those of config.json, as JSON", read=read_json, metavar="JSON"),
]
_ENGINE = [
    *_from_table(RUNTIME_FLAGS),
    Flag(
        name="data_parallel_size",
        help="engines behind this server, each with a cache of its own (default 1)",
        read=read_count,
        metavar="N",
        aliases=("-dp",),
    ),
    _listed(
        "roles", "ROLE", "of each of these engines: prefill, decode or both (default: all do both)", aliases=("--role",)
    ),
    _repeated("pinned_prefixes", "TEXT", "text that is computed at start and never evicted"),
    *(_switch(name, text) for name, text in ENGINE_SWITCHES.items()),
]
_HTTP = [
    _text("host", "ADDRESS", "address to listen on; 0.0.0.0 for every one"),
    _count("port", "port to listen on; 0 for any free one"),
    _path("uds", "listen on this Unix socket instead"),
    _path("ssl_certfile", "certificate chain in PEM; makes it https", is_guard=True),
    _path("ssl_keyfile", "its private key, where the certificate's file does not hold it", is_guard=True),
    Flag(name="ssl_keyfile_password", help="the private key's password", metavar="TEXT", is_secret=True, is_guard=True),
    _path("ssl_ca_certs", "clients must show a certificate that one of these signed", is_guard=True),
    _seconds("keep_alive", "how long an idle connection stays open"),
]
_GUARDING = [
    _repeated(
        "api_key", "KEY", "a key that clients must send as Authorization: Bearer KEY", is_secret=True, is_guard=True
    ),
    _path("api_key_file", "keys from a file, one a line, as KEY or NAME:KEY, and admin after it", is_guard=True),
    _switch("share_prefixes_across_keys", "keys find each other's prompts in the cache, and can tell (default: off)"),
    _listed(
        "allowed_hosts", "NAME", "names under which it answers, or * (default: localhost's on 127.0.0.1, else any)"
    ),
    Flag(
        name="cors_origin",
        help="a site whose pages may call this server, or *; may be repeated (default: none)",
        metavar="ORIGIN",
        is_list=True,
    ),
    _size("max_body_bytes", "largest request body"),
    _size("max_header_bytes", "longest request headers"),
    _seconds("header_timeout", "for a request's headers to arrive"),
    _seconds("body_timeout", "for a request's body to arrive"),
]
_LOAD = [
    _count("max_waiting_requests", "requests without output yet; over it, 429 (default: what 1/8 of memory holds)"),
    _count("max_waiting_tokens", "their prompt tokens; over it, 429 (default: what 1/8 of memory holds)"),
    _seconds("wake_timeout", "for a model that sleeps to have its turn"),
    _seconds("default_timeout", "for requests that name none (default: no limit)"),
    _seconds("max_timeout", "the most that a request may name (default: no limit)"),
    _switch("brownout", "serve less, step by step, when KV memory runs out (default: on)"),
    _count("brownout_max_tokens", "longest answer to new requests in a brownout"),
]
_FILES = [
    _path("batch_dir", "folder for /v1/files and /v1/batches (default: none, and they are refused)"),
    _size("batch_dir_bytes", "how much it may hold"),
]
_LIFE = [
    _seconds("drain_timeout", "for running requests to finish after SIGTERM or Ctrl+C"),
    _seconds("step_timeout", "after which a step is stuck: /health says so, and a dump is written"),
    _path("dump_dir", "where such a dump goes (default: the system's temporary directory)"),
    _text("log_format", "FORMAT", "text or json"),
    _text("log_level", "LEVEL", "debug, info, warning or error"),
    _text("otlp_traces_endpoint", "URL", "send a span a request to this OpenTelemetry collector"),
]

GROUPS: dict[str, list[Flag]] = {
    "model": _MODEL,
    "engine": _ENGINE,
    "http": _HTTP,
    "who may ask": _GUARDING,
    "how much may wait": _LOAD,
    "files of requests": _FILES,
    "life and logs": _LIFE,
}

_SHORT = {"compilation_config": ("-cc",), "optimization_level": ("-O",)}


def _refused_flag(name: str, refusal: Refusal) -> Flag:
    is_list = any(isinstance(value, list) for value in refusal.neutral)
    return Flag(
        name=name,
        read=read_json_or_text,
        aliases=_SHORT.get(name, ()),
        is_switch=any(isinstance(value, bool) for value in refusal.neutral),
        is_list=is_list,
        takes_several=is_list,
    )


# vLLM's flags that Quire takes with the values that change nothing, and otherwise refuses by name.
REFUSED: dict[str, Refusal] = {
    name: refusal
    for name, refusal in {**refusals.ENGINE, **refusals.SERVER}.items()
    if name not in {name for flags in GROUPS.values() for flag in flags for name in flag.names}
}
REFUSED_FLAGS = [_refused_flag(name, refusal) for name, refusal in REFUSED.items()]


def check_refused(found: Gathered) -> None:
    """Take what changes nothing out of the values; refuse the rest, with the place where it stands."""
    for name in [name for name in found.values if name in REFUSED]:
        value = found.values.pop(name)
        if not REFUSED[name].takes(value):
            raise ConfigError(REFUSED[name].message(found.sources[name]))


def engine_names() -> set[str]:
    """Flags that are EngineConfig's."""
    return {flag.name for flag in (*_MODEL, *_ENGINE)} - {"served_model_name", "memory_shares", "lora_modules"}


def settings_field(name: str) -> str:
    return _FIELDS.get(name, name)


def help_of(flag: Flag) -> str:
    """A flag's help, with the default that ServerSettings has for it."""
    defaults = {field.name: field.default for field in dataclasses.fields(ServerSettings)}
    default = defaults.get(settings_field(flag.name))
    if "(default" in flag.help or default in (None, dataclasses.MISSING, ()):
        return flag.help
    return f"{flag.help} (default {default:g})" if isinstance(default, float) else f"{flag.help} (default {default})"
