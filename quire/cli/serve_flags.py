"""The flags of `quire serve`: vLLM's names where vLLM has the flag, in the groups that --help shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from quire.cli.options import ENGINE_SWITCHES, MODEL_FLAGS, RUNTIME_FLAGS, metavar_of
from quire.cli.settings_file import Flag, read_count, read_json, read_number, read_text
from quire.server.settings import ServerSettings

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
}
_ALIASES = {"quantization": ("-q",), "swap_space_gb": ("--swap-space",)}
_READERS: dict[Any, Any] = {int: read_count, float: read_number, str: read_text}


def _from_table(table: Mapping[str, tuple[Any, str]]) -> list[Flag]:
    return [
        Flag(name=name, help=text, read=_READERS[kind], metavar=metavar_of(kind), aliases=_ALIASES.get(name, ()))
        for name, (kind, text) in table.items()
    ]


def _seconds(name: str, text: str) -> Flag:
    return Flag(name=name, help=text, read=read_number, metavar="SECONDS")


def _count(name: str, text: str) -> Flag:
    return Flag(name=name, help=text, read=read_count, metavar="N")


def _path(name: str, text: str, *, is_guard: bool = False) -> Flag:
    return Flag(name=name, help=text, metavar="PATH", is_guard=is_guard)


_MODEL = [
    Flag(name="model", help="alias, directory, GGUF file or hub id (default smollm2)", metavar="MODEL"),
    Flag(
        name="served_model_name",
        help="name or names under which clients ask for it (default: as given)",
        metavar="NAME",
        is_list=True,
        takes_several=True,
    ),
    *_from_table(MODEL_FLAGS),
    Flag(name="hf_overrides", help="values over those of config.json, as JSON", read=read_json, metavar="JSON"),
]
_ENGINE = [
    *_from_table(RUNTIME_FLAGS),
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
    _path("api_key_file", "keys from a file, one a line, as KEY or NAME:KEY", is_guard=True),
    Flag(
        name="share_prefixes_across_keys",
        help="keys find each other's prompts in the cache, and can tell (default: off)",
        is_switch=True,
    ),
    Flag(
        name="cors_origin",
        help="a site whose pages may call this server, or *; may be repeated (default: none)",
        metavar="ORIGIN",
        is_list=True,
    ),
    _count("max_body_bytes", "largest request body"),
    _count("max_header_bytes", "longest request headers"),
    _seconds("header_timeout", "for a request's headers to arrive"),
    _seconds("body_timeout", "for a request's body to arrive"),
]
_LOAD = [
    _count("max_waiting_requests", "requests without output yet; over it, 429 (default: four full batches)"),
    _count("max_waiting_tokens", "their prompt tokens; over it, 429 (default: 512 for each of them)"),
    _seconds("default_timeout", "for requests that name none (default: no limit)"),
    _seconds("max_timeout", "the most that a request may name (default: no limit)"),
    Flag(name="brownout", help="serve less, step by step, when KV memory runs out (default: on)", is_switch=True),
    _count("brownout_max_tokens", "longest answer to new requests in a brownout"),
]
_LIFE = [
    _seconds("drain_timeout", "for running requests to finish after SIGTERM or Ctrl+C"),
    _seconds("step_timeout", "after which a step is stuck: /health says so, and a dump is written"),
    _path("dump_dir", "where such a dump goes (default: the system's temporary directory)"),
    Flag(name="log_format", help="text or json", metavar="FORMAT"),
    Flag(name="log_level", help="debug, info, warning or error", metavar="LEVEL"),
]

GROUPS: dict[str, list[Flag]] = {
    "model": _MODEL,
    "engine": _ENGINE,
    "http": _HTTP,
    "who may ask": _GUARDING,
    "how much may wait": _LOAD,
    "life and logs": _LIFE,
}

# vLLM's flags that EngineConfig takes with one value only, and refuses by name with any other.
ONLY_ONE_VALUE = [
    Flag(name="tensor_parallel_size", read=read_count, aliases=("-tp",)),
    Flag(name="pipeline_parallel_size", read=read_count, aliases=("-pp",)),
    Flag(name="data_parallel_size", read=read_count, aliases=("-dp",)),
    Flag(name="cpu_offload_gb", read=read_number),
    Flag(name="tokenizer_mode"),
    Flag(name="tokenizer_revision"),
    Flag(name="trust_remote_code", is_switch=True),
    Flag(name="enable_lora", is_switch=True),
    Flag(name="disable_log_stats", is_switch=True),
    Flag(name="speculative_config"),
    Flag(name="compilation_config", aliases=("-O", "-cc")),
    Flag(name="kv_transfer_config"),
]

_NO_TOOLS = "Quire parses no tool calls or reasoning yet"
# vLLM's flags that Quire has not, by name: why, or what to use.
REFUSED: dict[str, str] = {
    "lora_modules": "Quire has no LoRA yet",
    "max_loras": "Quire has no LoRA yet",
    "max_lora_rank": "Quire has no LoRA yet",
    "tool_call_parser": _NO_TOOLS,
    "enable_auto_tool_choice": _NO_TOOLS,
    "reasoning_parser": _NO_TOOLS,
    "kv_offloading_size": "use --swap-space-gb for host memory",
    "attention_backend": "the backend is chosen by device",
    "guided_decoding_backend": "Quire has no structured output yet",
    "structured_outputs_config": "Quire has no structured output yet",
    "limit_mm_per_prompt": "Quire serves text models",
    "task": "Quire generates text only",
    "runner": "Quire generates text only",
    "convert": "Quire generates text only",
    "download_dir": "set QUIRE_HOME to where models are kept",
    "generation_config": "the model's own generation_config.json is always read",
    "num_gpu_blocks_override": "use --kv-cache-memory-bytes",
    "max_seq_len_to_capture": "sizes are chosen at start",
    "cuda_graph_sizes": "sizes are chosen at start",
    "async_scheduling": "steps overlap always, where the device can",
    "distributed_executor_backend": "Quire runs on one device for now",
    "enable_expert_parallel": "Quire runs on one device for now",
    "api_server_count": "one process serves HTTP",
    "allowed_origins": "use --cors-origin, once for each",
    "allowed_methods": "GET and POST are allowed for every --cors-origin",
    "allowed_headers": "every header is allowed for every --cors-origin",
    "allow_credentials": "keys travel in the Authorization header, never in cookies",
    "ssl_cert_reqs": "--ssl-ca-certs makes client certificates required",
    "enable_ssl_refresh": "restart the server for a new certificate",
    "root_path": "let the proxy strip its prefix",
    "middleware": "Quire loads no code from flags",
    "uvicorn_log_level": "use --log-level",
    "disable_uvicorn_access_log": "there is no access log: each request has one line at its end",
    "disable_log_requests": "use --log-level warning",
    "enable_log_requests": "each request has one line at its end, never with its text",
    "max_log_len": "prompts are never logged",
    "chat_template_content_format": "Quire finds it from the template",
    "response_role": "answers have the role assistant",
    "enable_prompt_tokens_details": "usage always has cached_tokens",
    "enable_sleep_mode": "Quire does not sleep",
    "otlp_traces_endpoint": "Quire sends no traces yet",
    "headless": "one process serves HTTP",
}


def engine_names() -> set[str]:
    """Flags that are EngineConfig's."""
    shown = {flag.name for flag in (*_MODEL, *_ENGINE)} - {"served_model_name"}
    return shown | {flag.name for flag in ONLY_ONE_VALUE}


def settings_field(name: str) -> str:
    return _FIELDS.get(name, name)


def help_of(flag: Flag) -> str:
    """Its help, with the default that ServerSettings has for it."""
    defaults = {field.name: field.default for field in dataclasses.fields(ServerSettings)}
    default = defaults.get(settings_field(flag.name))
    if "(default" in flag.help or default in (None, dataclasses.MISSING, ()):
        return flag.help
    return f"{flag.help} (default {default:g})" if isinstance(default, float) else f"{flag.help} (default {default})"
