"""The flags of `quire serve`: vLLM's names where vLLM has the flag, in the groups that --help shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from quire import refusals
from quire.cli.options import ENGINE_SWITCHES, MODEL_FLAGS, RUNTIME_FLAGS, SHORT, json_value, metavar_of
from quire.cli.settings_file import Flag, Gathered, read_count, read_json, read_json_or_text, read_number, read_text
from quire.errors import ConfigError
from quire.refusals import Refusal
from quire.server.settings import ServerSettings
from quire.sizes import read_size

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


_MODEL = [
    Flag(
        name="model",
        help="alias, directory, GGUF file or hub id, also owner/name:Q4_K_M (default smollm2)",
        metavar="MODEL",
    ),
    Flag(
        name="served_model_name",
        help="names under which clients ask for it, or one a model (default: as given)",
        metavar="NAME",
        is_list=True,
        takes_several=True,
    ),
    Flag(
        name="lora_modules",
        help="adapters as NAME=PATH or as JSON, each served under its name",
        read=read_json_or_text,
        metavar="ADAPTER",
        is_list=True,
        takes_several=True,
    ),
    Flag(
        name="memory_shares",
        help="what each of several models takes while awake (default: by weights)",
        read=read_number,
        metavar="SHARE",
        is_list=True,
        takes_several=True,
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
    Flag(
        name="roles",
        help="of each of these engines: prefill, decode or both (default: all do both)",
        metavar="ROLE",
        aliases=("--role",),
        is_list=True,
        takes_several=True,
    ),
    Flag(
        name="pinned_prefixes",
        help="text that is computed at start and never evicted; may be repeated",
        metavar="TEXT",
        is_list=True,
    ),
    *(Flag(name=name, help=text, is_switch=True) for name, text in ENGINE_SWITCHES.items()),
]
_HTTP = [
    Flag(name="host", help="address to listen on; 0.0.0.0 for every one", metavar="ADDRESS"),
    Flag(name="port", help="port to listen on; 0 for any free one", read=read_count, metavar="N"),
    Flag(name="uds", help="listen on this Unix socket instead", metavar="PATH"),
    _path("ssl_certfile", "certificate chain in PEM; makes it https", is_guard=True),
    _path("ssl_keyfile", "its private key, where the certificate's file does not hold it", is_guard=True),
    Flag(name="ssl_keyfile_password", help="the private key's password", metavar="TEXT", is_secret=True, is_guard=True),
    _path("ssl_ca_certs", "clients must show a certificate that one of these signed", is_guard=True),
    _seconds("keep_alive", "how long an idle connection stays open"),
]
_GUARDING = [
    Flag(
        name="api_key",
        help="a key that clients must send as Authorization: Bearer KEY; may be repeated",
        metavar="KEY",
        is_list=True,
        is_secret=True,
        is_guard=True,
    ),
    _path("api_key_file", "keys from a file, one a line, as KEY or NAME:KEY, and admin after it", is_guard=True),
    Flag(
        name="share_prefixes_across_keys",
        help="keys find each other's prompts in the cache, and can tell (default: off)",
        is_switch=True,
    ),
    Flag(
        name="allowed_hosts",
        help="names under which it answers, or * (default: localhost's on 127.0.0.1, else any)",
        metavar="NAME",
        is_list=True,
        takes_several=True,
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
    Flag(name="brownout", help="serve less, step by step, when KV memory runs out (default: on)", is_switch=True),
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
    Flag(name="log_format", help="text or json", metavar="FORMAT"),
    Flag(name="log_level", help="debug, info, warning or error", metavar="LEVEL"),
    Flag(name="otlp_traces_endpoint", help="send a span a request to this OpenTelemetry collector", metavar="URL"),
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

_SHORT = {
    "compilation_config": ("-cc",),
    "optimization_level": ("-O",),
}


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
