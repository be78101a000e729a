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
from quire.server.settings import ModelSettings, ServerSettings, make_key, read_key_file
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
    keys = [make_key(key, source=found.sources["api_key"]) for key in values.pop("api_key", ())]
    if (key_file := values.pop("api_key_file", None)) is not None:
        keys += read_key_file(key_file)
    server: dict[str, Any] = {
        settings_field(name): tuple(v) if isinstance(v, list) else v for name, v in values.items()
    }
    settings = ServerSettings(**server, api_keys=tuple(keys))
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
        try:
            values["max_model_len"] = read_count(length)
        except ValueError as error:
            raise ConfigError(f"max_model_len must be auto or {error}, got {length!r}") from None
    elif length == "-1":
        values["max_model_len"] = -1
    return EngineConfig(**values)


def _shown(flag: Flag, text: str) -> Flag:
    return dataclasses.replace(flag, help=text.replace("%", "%%"))


# -- the flags: vLLM's names where vLLM has the flag, in the groups that --help shows

_ALIASES = SHORT | {"quantization": ("-q",), "swap_space_gb": ("--swap-space",), "speculative_config": ("-sc",)}
_READERS: dict[Any, Any] = {int: read_count, float: read_number, str: read_text, json_value: read_json}
# Kinds of flags, as further arguments of Flag.
_SECONDS: dict[str, Any] = {"read": read_number, "metavar": "SECONDS"}
_SIZE: dict[str, Any] = {"read": read_size, "metavar": "SIZE"}
_COUNT: dict[str, Any] = {"read": read_count, "metavar": "N"}
_PATH: dict[str, Any] = {"metavar": "PATH"}
_SWITCH: dict[str, Any] = {"is_switch": True}


def _from_table(table: Mapping[str, tuple[Any, str]]) -> list[Flag]:
    return [
        Flag(name, text, read=_READERS[kind], metavar=metavar_of(kind), aliases=_ALIASES.get(name, ()))
        for name, (kind, text) in table.items()
    ]


def _listed(name: str, metavar: str, text: str, **others: Any) -> Flag:
    """A list, of which one flag takes several values."""
    return Flag(name, text, metavar=metavar, is_list=True, takes_several=True, **others)


def _repeated(name: str, metavar: str, text: str, **others: Any) -> Flag:
    return Flag(name, f"{text}; may be repeated", metavar=metavar, is_list=True, **others)


_MODEL = [
    Flag("model", "alias, directory, GGUF file or hub id, also owner/name:Q4_K_M (default smollm2)", metavar="MODEL"),
    _listed("served_model_name", "NAME", "names of the model for clients, or one for each model (default: as given)"),
    _listed(
        "lora_modules",
        "ADAPTER",
        "adapters to load at start, as NAME=PATH or JSON, each served under its name",
        read=read_json_or_text,
    ),
    _listed(
        "memory_shares",
        "SHARE",
        "memory share of each of several models while awake (default: by weights)",
        read=read_number,
    ),
    *_from_table(MODEL_FLAGS),
    Flag("hf_overrides", "values over those of config.json, as JSON", read=read_json, metavar="JSON"),
]
_ENGINE = [
    *_from_table(RUNTIME_FLAGS),
    Flag(
        "data_parallel_size",
        "replicas behind this server, each with its own KV cache (default 1)",
        read=read_count,
        metavar="N",
        aliases=("-dp",),
    ),
    _listed(
        "roles", "ROLE", "role of each replica: prefill, decode or both (default: all do both)", aliases=("--role",)
    ),
    _repeated("pinned_prefixes", "TEXT", "text that is computed at start and never evicted"),
    *(Flag(name, text, **_SWITCH) for name, text in ENGINE_SWITCHES.items()),
]
_HTTP = [
    Flag("host", "address to listen on; 0.0.0.0 for every one", metavar="ADDRESS"),
    Flag("port", "port to listen on; 0 for any free one", **_COUNT),
    Flag("uds", "listen on this Unix socket instead", **_PATH),
    Flag("ssl_certfile", "certificate chain in PEM; makes it https", **_PATH, is_guard=True),
    Flag("ssl_keyfile", "its private key, where the certificate's file does not hold it", **_PATH, is_guard=True),
    Flag("ssl_keyfile_password", "the private key's password", metavar="TEXT", is_secret=True, is_guard=True),
    Flag("ssl_ca_certs", "clients must show a certificate that one of these signed", **_PATH, is_guard=True),
    Flag("keep_alive", "how long an idle connection stays open", **_SECONDS),
]
_GUARDING = [
    _repeated(
        "api_key", "KEY", "a key that clients must send as Authorization: Bearer KEY", is_secret=True, is_guard=True
    ),
    Flag(
        "api_key_file",
        "file of keys, one a line, as KEY or NAME:KEY, with admin after an admin's",
        **_PATH,
        is_guard=True,
    ),
    Flag(
        "share_prefixes_across_keys",
        "keys share cached prefixes, and can notice each other's (default: off)",
        **_SWITCH,
    ),
    _listed("allowed_hosts", "NAME", "host names it answers to, or * (default: loopback names on 127.0.0.1, else any)"),
    Flag(
        "cors_origin",
        "a site whose pages may call this server, or *; may be repeated (default: none)",
        metavar="ORIGIN",
        is_list=True,
    ),
    Flag("max_body_bytes", "largest request body", **_SIZE),
    Flag("max_header_bytes", "longest request headers", **_SIZE),
    Flag("header_timeout", "time for a request's headers to arrive", **_SECONDS),
    Flag("body_timeout", "time for a request's body to arrive", **_SECONDS),
]
_LOAD = [
    Flag(
        "max_waiting_requests",
        "requests without output yet; above it, 429 (default: what 1/8 of memory holds)",
        **_COUNT,
    ),
    Flag(
        "max_waiting_tokens",
        "prompt tokens of these requests; above, 429 (default: what 1/8 of memory holds)",
        **_COUNT,
    ),
    Flag("wake_timeout", "how long a request waits for a sleeping model", **_SECONDS),
    Flag("default_timeout", "deadline of requests that set none (default: no limit)", **_SECONDS),
    Flag("max_timeout", "longest deadline that a request may set (default: no limit)", **_SECONDS),
    Flag("brownout", "serve less, step by step, when KV memory runs out (default: on)", **_SWITCH),
    Flag("brownout_max_tokens", "output tokens of new requests in a brownout", **_COUNT),
]
_FILES = [
    Flag("batch_dir", "folder for /v1/files and /v1/batches (default: none, and they are refused)", **_PATH),
    Flag("batch_dir_bytes", "largest size of that folder", **_SIZE),
]
_LIFE = [
    Flag("drain_timeout", "time for running requests to finish after SIGTERM or Ctrl+C", **_SECONDS),
    Flag("step_timeout", "a longer step is stuck: /health says so, and a dump is written", **_SECONDS),
    Flag("dump_dir", "folder for dumps of stuck steps (default: the system's temporary directory)", **_PATH),
    Flag("log_format", "text or json", metavar="FORMAT"),
    Flag("log_level", "debug, info, warning or error", metavar="LEVEL"),
    Flag("otlp_traces_endpoint", "send a span a request to this OpenTelemetry collector", metavar="URL"),
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
    """The field of ServerSettings, which may have the unit or the plural in its name."""
    known = {field.name for field in dataclasses.fields(ServerSettings)}
    return next((field for field in (name, f"{name}_s", f"{name}s") if field in known), name)


def help_of(flag: Flag) -> str:
    """A flag's help, with the default that ServerSettings has for it."""
    defaults = {field.name: field.default for field in dataclasses.fields(ServerSettings)}
    default = defaults.get(settings_field(flag.name))
    if "(default" in flag.help or default in (None, dataclasses.MISSING, ()):
        return flag.help
    return f"{flag.help} (default {default:g})" if isinstance(default, float) else f"{flag.help} (default {default})"
