"""Writes the tables of operations.md and from-vllm.md from the code, so that they stay true.

    python -m docs.make_tables            rewrites what is between <!-- table: NAME --> and <!-- end -->

The prose around the tables is written by hand. A test fails when a table is not what the code says.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import quire
from quire import refusals
from quire.cli import serve
from quire.config import _SPELLINGS, EngineConfig
from quire.engine.brownout import MAX_LEVEL, BrownoutSettings
from quire.params import SamplingParams
from quire.refusals import FIELDS, Refusal
from quire.server.admission import MAX_TOKENS_HEADER
from quire.server.metric_names import NAMES
from quire.server.protocol import NO_EFFECT, ChatBody, CompletionBody, FieldState, GenerationBody, field_states

DOCS = Path(__file__).parent
FILES = ("operations.md", "from-vllm.md")
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)

# Flags of `vllm serve` that Quire has under the same name. Where they differ, how.
VLLM_FLAGS: dict[str, str] = {
    "model": "also as the first argument, as there",
    "served_model_name": "",
    "tokenizer": "",
    "revision": "",
    "download_dir": "aliases are kept there too",
    "load_format": "other values are refused",
    "dtype": "",
    "quantization": "fp8, int8 and gguf; checkpoints in FP8, AWQ, GPTQ or compressed-tensors need no flag",
    "chat_template": "",
    "tool_call_parser": "needed only where the chat template does not show the format",
    "reasoning_parser": "likewise",
    "runner": "",
    "convert": "embed and classify; reward is refused",
    "task": "",
    "pooler_config": "pooling_type and normalize",
    "max_model_len": "auto (or -1), the default: what the model and the cache allow",
    "seed": "",
    "hf_overrides": "",
    "block_size": "any of these on every device",
    "kv_cache_dtype": "",
    "quantization_param_path": 'vLLM\'s older schema, or {"kv_scales": [[k, v], ...]}',
    "kv_cache_memory_bytes": "",
    "num_gpu_blocks_override": "",
    "gpu_memory_utilization": "",
    "swap_space_gb": "vLLM had it as --swap-space, which is taken too",
    "kv_offloading_size": "on a GPU only: on a CPU the KV cache is in host memory already",
    "kv_transfer_config": "kv_connector and kv_connector_extra_config, of a class of Quire's protocol: docs/tiers.md",
    "max_num_seqs": "",
    "max_num_batched_tokens": "",
    "long_prefill_token_threshold": "",
    "speculative_config": ("methods ngram, suffix and draft_model; measured costs decide how many drafts are verified"),
    "spec_method": "",
    "spec_model": "",
    "spec_tokens": "",
    "scheduling_policy": "priorities age, so that no request waits for ever",
    "enable_prefix_caching": "",
    "enable_chunked_prefill": "",
    "calculate_kv_scales": "scales grow to fit the first step's values; not with ranks, replicas or KV stores",
    "enforce_eager": "",
    "enable_sleep_mode": "needed on a GPU only",
    "batch_invariant": "VLLM_BATCH_INVARIANT=1 works too; on a CPU and on a Hopper GPU",
    "logits_processors": "",
    "host": "127.0.0.1 by default, not every address",
    "port": "",
    "uds": "",
    "ssl_certfile": "",
    "ssl_keyfile": "",
    "ssl_ca_certs": "",
    "api_key": "guards every path except /health, /ping and the page's own files; vLLM guards /v1 only",
}
# Paths of vLLM's server that Quire does not have.
VLLM_PATHS_MISSING: dict[str, str] = {
    "/v1/audio/transcriptions, /v1/audio/translations": "text models only",
    "/start_profile, /stop_profile": "see quire:step_seconds_total and quire:host_seconds_total",
    "/invocations": "use the paths above",
}
# Methods of vLLM's classes that people call and Quire has.
VLLM_METHODS: dict[str, tuple[str, ...]] = {
    "LLM": (
        *("from_engine_args", "generate", "chat", "get_metrics", "get_tokenizer", "get_default_sampling_params"),
        *("reset_prefix_cache", "embed", "encode", "classify", "score", "sleep", "wake_up", "is_sleeping"),
    ),
    "AsyncLLM": (
        *(
            "from_engine_args",
            "generate",
            "encode",
            "abort",
            "check_health",
            "get_tokenizer",
            "reset_prefix_cache",
            "shutdown",
        ),
        *("sleep", "wake_up", "is_sleeping"),
    ),
    "LLMEngine": (
        *("from_engine_args", "add_request", "step", "abort_request", "has_unfinished_requests"),
        *("get_num_unfinished_requests", "get_tokenizer", "reset_prefix_cache", "sleep", "wake_up", "is_sleeping"),
    ),
}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def all_flags() -> dict[str, serve.Flag]:
    return {flag.name: flag for flags in serve.GROUPS.values() for flag in flags}


def flags_shared() -> str:
    flags = all_flags()
    assert not set(VLLM_FLAGS) - set(flags), "a flag has gone"
    rows = ([code(flags[name].option), serve.help_of(flags[name]), note] for name, note in VLLM_FLAGS.items())
    return table(("flag", "meaning", "what differs"), rows)


def flags_ours() -> str:
    rows = (
        [code(f"{flag.option} {flag.metavar or ''}".strip()), serve.help_of(flag)]
        for name, flag in all_flags().items()
        if name not in VLLM_FLAGS
    )
    return table(("flag", "meaning"), rows)


def refused(
    names: dict[str, Refusal], spell: Callable[[str], str] = str, show: Callable[[Any], str] = repr
) -> list[list[str]]:
    """A row for each reason, with the names and, behind each, the values that are taken."""
    by_reason: dict[str, list[str]] = {}
    for name, refusal in names.items():
        values = code(*(show(value) for value in refusal.neutral))
        by_reason.setdefault(refusal.why, []).append(code(spell(name)) + (f" ({values})" if values else ""))
    return [[", ".join(cells), why] for why, cells in by_reason.items()]


def arguments_refused() -> str:
    return table(
        ("argument, with the accepted values besides None", "why other values are refused"), refused(refusals.ENGINE)
    )


def flags_refused() -> str:
    own = {name: refusal for name, refusal in refusals.SERVER.items() if name in serve.REFUSED}
    return table(
        ("flag of vLLM, with the accepted values", "why other values are refused"), refused(own, option, json.dumps)
    )


def sampling_refused() -> str:
    return table(
        ("field, with the accepted values besides None", "why other values are refused"), refused(refusals.SAMPLING)
    )


def calls_refused() -> str:
    return table(
        ("argument, with the accepted values besides None", "why other values are refused"), refused(refusals.CALL)
    )


def methods_refused() -> str:
    rows = []
    for owner, methods in refusals.METHODS.items():
        rows += [[f"{code(owner)}: {names}", why] for names, why in refused(methods)]
    return table(("method or class", "why it is refused"), rows + refused(refusals.CLASSES))


def arguments() -> str:
    rows = []
    theirs = {ours: name for name, ours in _SPELLINGS.items()}
    for found in dataclasses.fields(EngineConfig):
        if found.name != "given":
            default = code(repr(found.default))
            other = f"also {code(theirs[found.name])}" if found.name in theirs else ""
            rows.append([code(found.name), default, other])
    return table(("argument", "default", ""), rows)


def sampling() -> str:
    rows = []
    for found in dataclasses.fields(SamplingParams):
        default = found.default.value if hasattr(found.default, "value") else found.default
        rows.append([code(found.name), code(repr(default))])
    return table(("field", "default"), rows)


_BODIES = {"both": GenerationBody, "completions": CompletionBody, "chat": ChatBody}


def _fields(body: Any, state: FieldState) -> list[str]:
    """Its fields in this state, less those that are listed for both."""
    both = GenerationBody.__struct_fields__ if body is not GenerationBody else ()
    return [name for name, found in field_states(body).items() if found is state and name not in both]


def body_fields() -> str:
    rows = ([title, code(*_fields(body, FieldState.SERVED))] for title, body in _BODIES.items())
    return table(("body of", "fields"), rows)


def body_no_effect() -> str:
    rows = [
        [code(name), title, NO_EFFECT[name]]
        for title, body in _BODIES.items()
        for name in _fields(body, FieldState.NO_EFFECT)
    ]
    return table(("field", "body of", "why it changes nothing"), rows)


def body_refused() -> str:
    rows = [
        [code(name), title, code(*map(json.dumps, FIELDS[name].neutral)) or "left out", FIELDS[name].why]
        for title, body in _BODIES.items()
        for name in _fields(body, FieldState.REFUSED)
    ]
    return table(("field", "body of", "accepted values", "why other values are a 400"), rows)


def methods() -> str:
    assert all(hasattr(getattr(quire, name), method) for name, theirs in VLLM_METHODS.items() for method in theirs)
    return table(("class", "as in vLLM"), ([code(name), code(*theirs)] for name, theirs in VLLM_METHODS.items()))


def metrics() -> str:
    rows = []
    for name, known in NAMES.items():
        where = f" (only with {known.only_with})" if known.only_with else ""
        rows.append([code(name), known.kind, code(*known.labels), known.help + where])
    return table(("name", "kind", "further labels", "meaning"), rows)


def paths() -> list[tuple[str, str]]:
    """(method, path) of everything that the server answers."""
    from quire.server.app import routes

    found = []
    of_the_page = ("/favicon.ico", "/static")
    for route in routes(_no_context()):
        methods = getattr(route, "methods", None) or {"GET"}
        path = str(getattr(route, "path", ""))
        if not path.startswith(of_the_page):
            found += [(method, path) for method in sorted(methods - {"HEAD", "OPTIONS"})]
    return found


def _no_context() -> Any:
    """Enough of a context to build the application, with no engine behind it."""
    from types import SimpleNamespace

    from quire.engine.api import EngineHealth, EngineLoad, EngineState
    from quire.server.context import ServedModel, ServerContext
    from quire.server.life import ServerLife
    from quire.server.logs import RequestLog
    from quire.server.settings import ServerSettings

    engine: Any = SimpleNamespace(health=lambda: EngineHealth(EngineState.STARTING), load=EngineLoad)
    settings, life = ServerSettings(), ServerLife()
    return ServerContext(
        models=(ServedModel.of(["none"], engine, settings, life),), settings=settings, logs=RequestLog(), life=life
    )


# What each path is for. A path without an entry here fails the test.
PATH_NOTES: dict[str, str] = {
    "/v1/completions": "as in vLLM",
    "/v1/chat/completions": "as in vLLM",
    "/v1/responses": "OpenAI's Responses; `previous_response_id` within 64 MiB of memory",
    "/v1/responses/{id}": "a stored response",
    "/sleep": "as in vLLM, with `model`; `keep_kv` keeps cached prefixes; level 2 ends the process",
    "/wake_up": "as in vLLM, with `model`, without `tags`; a request wakes a model too",
    "/is_sleeping": "as in vLLM, with `model`",
    "/v1/models/load": "adds a model",
    "/v1/models/unload": "removes a model",
    "/v1/responses/{id}/cancel": "cancels a background response",
    "/v1/messages": "Anthropic's Messages",
    "/v1/messages/count_tokens": "Anthropic's token count",
    "/v1/files": "OpenAI's batch files, with `--batch-dir`",
    "/v1/files/{id}": "one file",
    "/v1/files/{id}/content": "a file's content",
    "/v1/batches": "answers a file's requests beside other traffic",
    "/v1/batches/{id}": "a batch's progress",
    "/v1/batches/{id}/cancel": "cancels a batch; finished answers are kept",
    "/v1/models": "as in vLLM; with `max_model_len` and `root`",
    "/v1/models/{model:path}": "one model",
    "/v1/embeddings": "OpenAI's, for models that embed (embeddings.md)",
    "/v1/rerank": "Jina's and Cohere's format",
    "/v2/rerank": "the same",
    "/rerank": "the same",
    "/v1/score": "as in vLLM",
    "/score": "the same",
    "/v1/classify": "as in vLLM",
    "/classify": "the same",
    "/v1/pooling": "as in vLLM",
    "/pooling": "the same",
    "/v1/load_lora_adapter": (
        "as in vLLM, without an environment variable; for an admin's key, the only key, or a local address"
    ),
    "/v1/unload_lora_adapter": "as in vLLM",
    "/tokenize": "as in vLLM",
    "/detokenize": "as in vLLM",
    "/health": "JSON with a status; 503 with the reason while the server starts, drains, is stuck or dead",
    "/ping": "as `/health`",
    "/version": "as in vLLM",
    "/metrics": "always on; needs the key",
    "/load": "`server_load` as in vLLM, and numbers of the engine",
    "/debug/replicas": "the replicas; POST adds, drains and removes them",
    "/debug/cache": "block hashes that the cache gained and lost, for `quire router`",
    "/debug/cache/hashes": "the block hashes of a prompt",
    "/debug/kv/levels": "KV levels below the device; POST warms, pins or expires a prompt",
    "/docs": "as in vLLM; works without a network",
    "/openapi.json": "as in vLLM",
    "/": "the live page",
    "/live": "the live page's data",
    "/debug/kv": "counts of the KV cache",
    "/debug/kv/map": "every block's state",
    "/debug/kv/requests": "block tables, and each prompt's prefix cache outcome",
    "/debug/kv/sharing": "blocks shared by several requests",
    "/debug/kv/tree": "the prefix tree, with hit counts",
    "/debug/kv/blocks/{block}": "one block: which requests use it, and which text it holds",
}


def endpoints() -> str:
    rows = [[code(path), method, PATH_NOTES.get(path, "")] for method, path in paths()]
    rows += [[code(*path.split(", ")), "", f"not served: {why}"] for path, why in VLLM_PATHS_MISSING.items()]
    return table(("path", "method", ""), rows)


def ladder() -> str:
    """The brownout's levels, in the numbers that rule them."""
    at = BrownoutSettings()
    rows = [
        ["0", "nothing", ""],
        [
            "1",
            f"in steps that also decode, prompts get {at.prefill_share:.0%} of the step's token budget",
            "time to first token rises",
        ],
        [
            "2",
            "also, new requests get at most `--brownout-max-tokens` output tokens",
            f"their responses have the header `{MAX_TOKENS_HEADER}`, and `finish_reason` is `length`",
        ],
        [
            "3",
            "also, new requests are refused",
            "429 with `Retry-After`. This level also needs waiting requests that would by themselves fill "
            f"{at.refusal_backlog:.0%} of the cache",
        ],
    ]
    assert len(rows) == MAX_LEVEL + 1
    return (
        f"Pressure means that running sequences are preempted again and again: within {at.window_s:g} s at least "
        f"{at.min_preemptions} preemptions, at least {at.preempted_share:.0%} of the running sequences, and at least "
        f"{at.preempted_per_finished:.0%} of the number that finished, while requests hold {at.min_kv_usage:.0%} of "
        f"the blocks or more. The level rises by one after {at.rise_s:g} s of pressure and falls by one after "
        f"{at.fall_s:g} s without it, or sooner while requests hold less than {at.low_kv_usage:.0%} of the blocks.\n\n"
    ) + table(("`quire:brownout_level`", "what the server limits", "what clients see"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "ladder": ladder,
    "flags_shared": flags_shared,
    "flags_ours": flags_ours,
    "flags_refused": flags_refused,
    "arguments": arguments,
    "arguments_refused": arguments_refused,
    "sampling_refused": sampling_refused,
    "calls_refused": calls_refused,
    "methods_refused": methods_refused,
    "sampling": sampling,
    "body_fields": body_fields,
    "body_no_effect": body_no_effect,
    "body_refused": body_refused,
    "methods": methods,
    "metrics": metrics,
    "endpoints": endpoints,
}


def filled(text: str) -> str:
    return _MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


if __name__ == "__main__":
    for name in FILES:
        path = DOCS / name
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
