"""Flags that several commands share: the engine's and the sampler's."""

from __future__ import annotations

import argparse
import json
from typing import Any

from quire.config import EngineConfig
from quire.params import SamplingParams


def json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be JSON, got {text!r}") from None


# Flag -> (type, help). Names are EngineConfig's; values stay None unless given, so the config's defaults rule.
MODEL_FLAGS: dict[str, tuple[Any, str]] = {
    "tokenizer": (str, "tokenizer from another model or directory"),
    "revision": (str, "branch, tag or commit of a hub model"),
    "download_dir": (str, "keep fetched models here (default: the hub's cache, QUIRE_HOME)"),
    "load_format": (str, "auto, safetensors, gguf or dummy (random weights)"),
    "dtype": (str, "auto, float32, bfloat16 or float16"),
    "quantization": (str, "fp8 on a GPU or int8 on a CPU; gguf: packed on a GPU, too"),
    "chat_template": (str, "a template or a file that holds one"),
    "tool_call_parser": (str, "format of tool calls, such as hermes (default: read from the chat template)"),
    "reasoning_parser": (str, "format of thinking, such as qwen3 (default: read from the chat template)"),
    "runner": (str, "generate, or pooling for embeddings and scores (default: by the model)"),
    "convert": (str, "how a model pools: embed or classify (default: as the model is made for)"),
    "task": (str, "vLLM's older name for both: generate, embed, classify or score"),
    "pooler_config": (json_value, "how to pool: pooling_type (LAST, MEAN, CLS) and normalize"),
    "max_model_len": (str, "longest sequence; auto takes what model and cache allow"),
    "seed": (int, "makes a run repeatable (default 0)"),
}
RUNTIME_FLAGS: dict[str, tuple[Any, str]] = {
    "device": (str, "auto, cpu or cuda"),
    "num_threads": (int, "CPU threads (default: the physical cores)"),
    "tensor_parallel_size": (int, "split every layer among N processes, each with its own GPU or cores"),
    "pipeline_parallel_size": (int, "split the layers into N stages, each with its own processes"),
    "distributed_executor_backend": (str, "mp: ranks on this machine (default); ray: Ray places them"),
    "max_loras": (int, "adapters in one step (default 1)"),
    "max_lora_rank": (int, "the largest rank of an adapter (default 16)"),
    "max_cpu_loras": (int, "adapters kept in host memory (default: as many as in a step)"),
    "block_size": (int, "tokens per KV block: 4, 8, 16, 32, 64 or 128 (default 16)"),
    "kv_cache_dtype": (str, "auto, float32, bfloat16, float16, or fp8 on a GPU"),
    "quantization_param_path": (str, "JSON file with the scales of a KV cache in fp8 (docs/tuning.md)"),
    "kv_cache_memory_bytes": (str, "size of the KV cache, such as 4GiB (CPU default 1 GiB)"),
    "num_gpu_blocks_override": (int, "size of the KV cache in blocks, on a CPU too"),
    "gpu_memory_utilization": (float, "share of the GPU's memory to use (default 0.92)"),
    "memory_share": (float, "this model's share of the memory (default: all that is free)"),
    "swap_space_gb": (str, "host memory for swapped-out blocks, GiB (default 0)"),
    "kv_offloading_size": (str, "host memory for cached blocks, GiB, on a GPU (default 0)"),
    "kv_disk_path": (str, "directory for cached KV blocks, kept over restarts"),
    "kv_disk_size": (str, "disk space for them, such as 50GiB (default: 1/5 of what is free, up to 100GiB)"),
    "kv_transfer_config": (str, "a store of your own for cached blocks, as JSON (docs/tiers.md)"),
    "watermark": (float, "share of blocks that new requests leave free for running ones (default 0.01)"),
    "max_num_seqs": (int, "sequences that run at once"),
    "max_num_batched_tokens": (int, "tokens computed in one step"),
    "long_prefill_token_threshold": (int, "most tokens of one prompt in a step"),
    "target_step_ms": (float, "limit prompt tokens so that steps with decodes take about N ms (CPU server: 120)"),
    "smooth_prefill_tokens": (int, "prompt tokens in steps that decode, unless many wait (GPU server: up to 320)"),
    "scheduling_policy": (str, "fcfs or priority"),
    "priority_ageing_s": (float, "seconds of waiting that raise a request by one priority (default 10)"),
    "preemption": (str, "auto, recompute or swap"),
    "speculative_config": (json_value, "how to draft tokens: vLLM's keys, such as method and num_speculative_tokens"),
    "logits_processors": (str, "classes that change logits before a token is drawn: module:Class, commas between"),
    "spec_method": (str, "draft tokens and verify them: ngram, suffix or draft_model (default: off)"),
    "spec_model": (str, "the draft model, of the same vocabulary"),
    "spec_tokens": (int, "drafts of a sequence in one step, at most"),
}
ENGINE_SWITCHES: dict[str, str] = {
    "allow_special_tokens_in_content": "read <|im_end|> and the like in messages as control tokens (default: as text)",
    "enable_prefix_caching": "find prompts' blocks in the cache (default: on)",
    "enable_chunked_prefill": "compute long prompts in several steps (default: on)",
    "enforce_eager": "no CUDA graphs",
    "calculate_kv_scales": "measure the scales of a KV cache in fp8 on the first requests",
    "enable_lora": "serve adapters (LoRA) on top of the model (default: off)",
    "enable_sleep_mode": "on a GPU, weights and cache can be given back for a while",
    "batch_invariant": "bitwise the same logits in any batch and at any chunking (default: off)",
}
_SAMPLING: dict[str, tuple[Any, str]] = {
    "temperature": (float, "0 is greedy (default: the model's own, or 1; 0.7 with --chat)"),
    "top_p": (float, "nucleus sampling (default: the model's own, or 1, which is all; 0.95 with --chat)"),
    "top_k": (int, "sample from the k likeliest (default: the model's own, or 0, which is all)"),
    "min_p": (float, "drop tokens below this share of the likeliest (default: the model's own, or 0)"),
    "repetition_penalty": (float, "over 1 discourages repetition (default: the model's own, or 1)"),
}
_CHAT_SAMPLING: dict[str, tuple[Any, str]] = {
    "temperature": (float, "0 is greedy (default: the model's own, or 0.7)"),
    "top_p": (float, "nucleus sampling (default: the model's own, or 0.95; 1 is all)"),
}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default="smollm2",
        metavar="MODEL",
        help="alias, directory, GGUF file or hub id, also owner/name:Q4_K_M (default smollm2)",
    )
    _add(group, MODEL_FLAGS)
    group = parser.add_argument_group("engine")
    _add(group, RUNTIME_FLAGS)
    for name, text in ENGINE_SWITCHES.items():
        group.add_argument(_option(name), action=argparse.BooleanOptionalAction, default=None, help=text)


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int, has_n: bool, is_chat: bool = False) -> None:
    """`max_tokens` is the command's default; `has_n` offers several continuations of a prompt; `is_chat`: what a model
    leaves open is as people talk with it."""
    group = parser.add_argument_group("sampling")
    _add(group, {"max_tokens": (int, f"most tokens to generate (default {max_tokens})")})
    _add(group, _SAMPLING | (_CHAT_SAMPLING if is_chat else {}))
    if has_n:
        _add(group, {"n": (int, "continuations per prompt (default 1)")})
    parser.set_defaults(default_max_tokens=max_tokens)
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop at this text; may be repeated")
    group.add_argument(
        "--sampling-seed", type=int, metavar="N", help="seed of the request itself (default: drawn by --seed)"
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the model's end token")


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--quiet", action="store_true", help="the text and errors, nothing else")
    group.add_argument("-v", "--verbose", action="store_true", help="also where memory and the start-up's time went")


SHORT = {"tensor_parallel_size": ("-tp",), "pipeline_parallel_size": ("-pp",)}


def metavar_of(kind: Any) -> str:
    return {str: "VALUE", json_value: "JSON"}.get(kind, "N")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add(group: argparse._ArgumentGroup, table: dict[str, tuple[Any, str]]) -> None:
    for name, (kind, text) in table.items():
        names = (*SHORT.get(name, ()), _option(name))
        group.add_argument(*names, type=kind, default=None, metavar=metavar_of(kind), help=text)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    names = [*MODEL_FLAGS, *RUNTIME_FLAGS, "model", *ENGINE_SWITCHES]
    values = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    length = values.get("max_model_len")
    if isinstance(length, str) and length.isdigit():
        values["max_model_len"] = int(length)
    return EngineConfig(**values)


def sampling_params(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """The model's own defaults, then what the command chose, then what the user wrote."""
    given = {name: getattr(args, name, None) for name in ("max_tokens", *_SAMPLING, "n", "stop", "ignore_eos")}
    given["seed"] = args.sampling_seed
    chosen = {"max_tokens": args.default_max_tokens}
    return defaults.clone(**(chosen | {k: v for k, v in given.items() if v is not None}))


def check_sampling(args: argparse.Namespace) -> None:
    """Refuse now what would be refused once the model is loaded and its own defaults are known."""
    sampling_params(args, SamplingParams())
