"""What vLLM's users write and Quire does not serve: one table, from which every refusal comes.

`LLM`, `EngineConfig` (which is `EngineArgs`), `SamplingParams`, `generate`, `chat`, the flags of `quire serve`, the
bodies of its requests and the tables of docs/from-vllm.md read it. A name stands under the reason why it is refused,
with the values that change nothing, such as vLLM's default: those are taken, and so is None.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from quire.errors import BadRequestError
from quire.nearest import nearest

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Refusal:
    why: str
    neutral: tuple[Any, ...] = ()  # values that change nothing, besides None

    def takes(self, value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in self.taken)

    @property
    def taken(self) -> tuple[Any, ...]:
        return (None, *self.neutral)

    def message(self, name: str) -> str:
        values = " or ".join(repr(value) for value in self.neutral if value)  # 0 and False are what leaving it out is
        instead = " instead" if self.why.startswith("use ") else ". Leave it out"
        return f"{name} is not supported: {self.why}{instead}" + (f", or set it to {values}" if values else "")


def _table(by_reason: Mapping[str, str]) -> dict[str, Refusal]:
    """From "name name=value name=value|value" under each reason; values are in JSON."""
    table = {}
    for why, names in by_reason.items():
        for word in names.split():
            name, _, values = word.partition("=")
            table[name] = Refusal(why, tuple(json.loads(value) for value in values.split("|")) if values else ())
    return table


_OTHER_SPLITS = "a model is split by tensor_parallel_size and pipeline_parallel_size alone"
_NO_ADAPTERS = "adapters are PEFT's LoRA of a text model, in its own dtype and vocabulary"
_ADAPTERS_BY_USE = "an adapter is read when a request first names it, and the least recently used leaves"
_ONE_GRAMMAR_BACKEND = "one backend compiles every grammar; StructuredOutputsParams say how JSON is written"
_NEW_GRAMMAR_NAME = "vLLM calls it structured_outputs and StructuredOutputsParams now, and so does Quire"
_DRAFTS = 'use speculative_config, e.g. {"method": "suffix"}'
_BEAMS_APART = "it is BeamSearchParams's, for LLM.beam_search"
_NO_REWARDS = "Quire serves no reward models: a classifier's head gives scores, see LLM.classify"
_NO_MEDIA = "Quire reads and writes text only"
_NO_PARSER_PLUGINS = "Quire runs no code from flags: tool_call_parser and reasoning_parser choose among its own"
_NO_EXPERTS = "of several ranks each has a part of every expert, and one set of kernels serves a device"
_NO_STATE = "Quire serves no models with state-space layers"
_NO_OFFLOAD = "Quire does not offload weights"
_NO_TRANSFER = "replicas send each other blocks by themselves: --roles"
_NO_PLUGINS = "Quire runs no code that arguments bring"
_NO_REMOTE_CODE = "Quire runs no code out of a model repository"
_NO_COMPILER = "Quire compiles nothing with torch.compile"
_OWN_KERNELS = "kernels are chosen by device"
_GRAPH_SIZES = "sizes are chosen at start; enforce_eager turns graphs off"
_ONE_LOADER = "Quire has one way to read weights"
_ALWAYS_COUNTED = "statistics are always on and cost nothing"

# Arguments of LLM and EngineArgs; of `serve` too, where it has no such flag of its own.
ENGINE = _table(
    {
        _OTHER_SPLITS: """
            prefill_context_parallel_size=1 decode_context_parallel_size=1 disable_custom_all_reduce=false|true
            data_parallel_rank=0 data_parallel_start_rank=0 data_parallel_size_local=1 data_parallel_address
            data_parallel_rpc_port data_parallel_backend="mp" data_parallel_hybrid_lb=false
            data_parallel_external_lb=false data_parallel_multi_port_external_lb=false master_addr="127.0.0.1"
            master_port nnodes=1 node_rank=0 distributed_timeout_seconds cpu_distributed_timeout_seconds
            dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size=1 cp_kv_cache_interleave_size=1
            dp_sync_interval prefill_schedule_interval=1 disable_nccl_for_dp_synchronization=false|true
            enable_batch_sharded_sampling=false enable_dbo=false ubatch_size=0 dbo_decode_token_threshold
            dbo_prefill_token_threshold max_parallel_loading_workers worker_use_ray=false ray_workers_use_nsight=false
            enable_fault_tolerance=false fault_tolerance_config enable_nccl_comm_suspend=false""",
        "choose the GPU with CUDA_VISIBLE_DEVICES": "device_ids",
        "bind the process with numactl": "numa_bind=false numa_bind_nodes numa_bind_cpus",
        _NO_EXPERTS: """
            enable_expert_parallel=false enable_ep_weight_filter=false enable_elastic_ep=false enable_eplb=false
            eplb_config={} expert_placement_strategy="linear" moe_backend="auto" all2all_backend
            enable_return_routed_experts=false enable_bf16x3_router_gemm=false""",
        _NO_ADAPTERS: """
            lora_dtype="auto" fully_sharded_loras=false
            lora_extra_vocab_size=256 lora_target_modules default_mm_loras={} long_lora_scaling_factors
            enable_lora_bias=false enable_tower_connector_lora=false specialize_active_lora=false
            enable_mixed_moe_lora_format=false enable_moe_shared_loras=false qlora_adapter_name_or_path
            enable_prompt_adapter=false max_prompt_adapters=1 max_prompt_adapter_token=0""",
        _DRAFTS: "speculative_model num_speculative_tokens num_lookahead_slots=0",
        "Quire serves no diffusion models": "diffusion_config={}",
        _ONE_GRAMMAR_BACKEND: """
            structured_outputs_config={} guided_decoding_backend="auto"|"guidance"
            guided_decoding_disable_fallback=false|true guided_decoding_disable_any_whitespace=false
            guided_decoding_disable_additional_properties=false""",
        _NO_PARSER_PLUGINS: 'reasoning_parser_plugin="" reasoning_config={}',
        _NO_MEDIA: """
            limit_mm_per_prompt={} mm_processor_kwargs={} media_io_kwargs={} allowed_local_media_path=""
            allowed_media_domains=[] language_model_only=false|true enable_mm_embeds=false interleave_mm_strings=false
            mm_processor_cache_gb=4 mm_processor_cache_type mm_encoder_only=false mm_encoder_tp_mode="weights"
            mm_encoder_attn_backend skip_mm_profiling=false|true video_pruning_rate disable_chunked_mm_input=false
            disable_mm_preprocessor_cache=false enable_mm_processor_stats=false ec_transfer_config ec_manager_config={}
            io_processor_plugin renderer_num_workers=1 mm_processor_device="auto" mm_tensor_ipc
            mm_shm_cache_max_object_size_mb=128 mm_hasher_algorithm enable_prompt_embeds=false""",
        _NO_STATE: """
            mamba_config={} mamba_cache_dtype="auto" mamba_ssm_cache_dtype="auto" mamba_block_size
            mamba_cache_mode="none" mamba_backend="triton" gdn_prefill_backend kda_prefill_backend""",
        _NO_OFFLOAD: """
            cpu_offload_gb=0|0.0 cpu_offload_params offload_backend="auto" offload_group_size=0 offload_num_in_group=1
            offload_prefetch_step=1 offload_params""",
        "kv_offloading_size has one way to do it": 'kv_offloading_backend="native"',
        _NO_TRANSFER: "kv_events_config={} weight_transfer_config={}",
        "enable_sleep_mode chooses it": "enable_cumem_allocator=false",
        _NO_REMOTE_CODE: "trust_remote_code=false code_revision",
        _NO_PLUGINS: """
            logits_processor_pattern scheduler_cls worker_cls="auto" worker_extension_cls=""
            additional_config={} model_class_overrides={} override_neuron_config={}""",
        _NO_COMPILER: "compilation_config=0|{} optimization_level=0|2 ir_op_priority={}",
        _GRAPH_SIZES: """
            cudagraph_capture_sizes=[] max_cudagraph_capture_size cuda_graph_sizes=[] max_seq_len_to_capture=8192
            max_context_len_to_capture performance_mode="balanced" """,
        _OWN_KERNELS: """
            attention_backend attention_config={} linear_backend="auto" kernel_config={} override_attention_dtype
            disable_cascade_attn=false disable_flashinfer_prefill=false enable_flashinfer_autotune=false|true
            use_fp64_gumbel=false""",
        _ONE_LOADER: """
            model_loader_extra_config={} ignore_patterns=["original/**/*"] use_tqdm_on_load=true
            pt_load_map_location="cpu" safetensors_load_strategy="lazy" safetensors_prefetch_num_threads
            safetensors_prefetch_block_size config_format="auto"|"hf" model_impl="auto"|"vllm" model_weights=""
            quantization_config={} allow_deprecated_quantization=false|true
            kv_cache_dtype_skip_layers=[]""",
        "its config.json stands beside the weights; hf_overrides changes entries": "hf_config_path",
        "use hf_overrides": "rope_scaling={} rope_theta",
        "the tokenizer comes with the model's revision": "tokenizer_revision",
        "Quire has one tokenizer implementation": """
            tokenizer_mode="auto"|"hf" tokenizer_pool_size=0 tokenizer_pool_type="ray"
            tokenizer_pool_extra_config={}""",
        "set HF_TOKEN": "hf_token=true",
        "the model's own generation_config.json is always read; SamplingParams go in front": """
            generation_config="auto" override_generation_config={}""",
        "steps overlap always, where the device can": """
            async_scheduling=true disable_async_output_proc=false num_scheduler_steps=1
            multi_step_stream_outputs=true""",
        "whoever reads decides how much comes at once": "stream_interval=1",
        "use target_step_ms": "scheduler_delay_factor=0|0.0",
        "the token budget of a step is max_num_batched_tokens": "max_num_scheduled_tokens max_num_partial_prefills=1",
        "prompts are admitted when all their blocks are there": "scheduler_reserve_full_isl=true",
        "long prompts have long_prefill_token_threshold": "max_long_partial_prefills=1",
        "blocks are hashed one way, and the least recently used go first": """
            prefix_caching_hash_algo="sha256"|"builtin" prefix_cache_retention_interval prefix_match_unit
            kv_sharing_fast_prefill=false""",
        "there is one block manager": "use_v2_block_manager=true|false disable_hybrid_kv_cache_manager=false|true",
        "windows are the model's own": "disable_sliding_window=false",
        "a call may ask for any number; over HTTP it is 20": "max_logprobs=20",
        "logprobs are of the model's own logits": 'logprobs_mode="raw_logprobs" return_sampling_mask=false',
        _ALWAYS_COUNTED: """
            disable_log_stats=true|false aggregate_engine_logging=false kv_cache_metrics=false|true
            kv_cache_metrics_sample cudagraph_metrics=false|true enable_mfu_metrics=false
            show_hidden_metrics_for_version enable_logging_iteration_details=false
            per_request_spec_decode_metrics="none" """,
        "traces are the server's: quire serve --otlp-traces-endpoint": "otlp_traces_endpoint",
        "a trace has a span a request, and no parts of the model": """
            collect_detailed_traces=[] enable_layerwise_nvtx_tracing=false profiler_config={}
            enable_trace_replay=false jit_monitor_mode="warn" jit_monitor_verbose=false""",
        "only the server logs requests": "disable_log_requests=true|false enable_log_requests=false max_log_len",
        "the queue is the server's: --max-waiting-requests and --max-waiting-tokens": """
            max_num_queued_reqs max_num_queued_tokens""",
        "the server drains: --drain-timeout": "shutdown_timeout=0",
        "an unknown QUIRE_ variable is warned about": "fail_on_environ_validation=false",
        "give token ids as prompts": "tokens_only=false",
        "names are the server's: quire serve --served-model-name": "served_model_name",
    }
)

# Flags of `vllm serve` that are no arguments of its engine.
SERVER = _table(
    {
        "tools are always served where the model's template has them": "enable_auto_tool_choice=false|true",
        _NO_PARSER_PLUGINS: 'tool_parser_plugin="" tool_server',
        "a model is not shown tools that it must not call": "exclude_tools_when_tool_choice_none=true",
        "one process serves HTTP": """
            api_server_count=1 headless=false data_parallel_supervisor_port dp_supervisor_probe_interval_s
            dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold""",
        "use --cors-origin, once for each": "allowed_origins=[]",
        "GET and POST are allowed for every --cors-origin": "allowed_methods=[]",
        "every header is allowed for every --cors-origin": "allowed_headers=[]",
        "keys travel in the Authorization header, never in cookies": "allow_credentials=false",
        "--ssl-ca-certs makes client certificates required": "ssl_cert_reqs=0",
        "the ciphers are those of Python's own defaults": "ssl_ciphers",
        "restart the server for a new certificate": "enable_ssl_refresh=false",
        "let the proxy strip its prefix": 'root_path=""',
        "Quire loads no code from flags": "middleware=[]",
        "use --log-level": 'uvicorn_log_level="info" log_config_file',
        "there is no access log: each request has one line at its end": """
            disable_uvicorn_access_log=true|false disable_access_log_for_endpoints""",
        "use --log-level warning": "disable_log_requests=false",
        "each request has one line at its end, never with its text": """
            enable_log_requests=false enable_log_outputs=false enable_log_deltas=true""",
        "prompts are never logged": "max_log_len",
        "stack traces of our own faults are always logged": "log_error_stack=false|true",
        "Quire finds it from the template": 'chat_template_content_format="auto"',
        "templates come from the operator, not from requests": "trust_request_chat_template=false",
        "requests send chat_template_kwargs": "default_chat_template_kwargs={}",
        "answers have the role assistant": 'response_role="assistant"',
        "a request may ask for it": "return_tokens_as_token_ids=false",
        "usage always has cached_tokens": "enable_prompt_tokens_details=true|false",
        "clients ask for it with stream_options": "enable_force_include_usage=false",
        "timings are in /metrics and in the log": "enable_per_request_metrics=false",
        "/load is always there": "enable_server_load_tracking=true|false",
        "Quire has no /tokenizer_info": "enable_tokenizer_info_endpoint=false",
        "every answer has its x-request-id": "enable_request_id_headers=true|false",
        "/docs is always there, works without a network, and is guarded by the key": """
            disable_fastapi_docs=false enable_offline_docs=true|false""",
        "use --max-header-bytes and --max-body-bytes": "h11_max_incomplete_event_size h11_max_header_count",
        "the fingerprint tells version and model": 'fingerprint_mode="full" fingerprint_value',
    }
)

SAMPLING = _table(
    {
        _NEW_GRAMMAR_NAME: "guided_decoding",
        _BEAMS_APART: "use_beam_search=false length_penalty=1|1.0 early_stopping=false beam_width=1",
        "Quire gives all that it makes: set n to as many": "best_of=1",
        "Quire does not look for repetition": "repetition_detection",
        "logprobs are lists of dicts": "flat_logprobs=false",
        "use logprobs=-1 and pick": "logprob_token_ids=[] prompt_logprob_token_ids=[] prompt_logprob_start=0",
        "whoever reads decides how much comes at once": "stream_interval=1",
        "Quire cuts no prompts: give a shorter one": "truncate_prompt_tokens",
        _NO_EXPERTS: "routed_experts_prompt_start=0",
        "Quire forces no tokens: use allowed_token_ids": "trace_decode_token_ids",
        "params are checked once, and copied": "skip_clone=false|true",
    }
)

# Arguments of BeamSearchParams.
BEAMS = _table(
    {
        "beams are ranked by their logprobs, and nothing is drawn": """
            top_p=1|1.0 top_k=0|-1 min_p=0|0.0 seed presence_penalty=0|0.0 frequency_penalty=0|0.0
            repetition_penalty=1|1.0 logit_bias={} allowed_token_ids=[] bad_words=[] min_tokens=0
            structured_outputs""",
        "an end token is shown with include_stop_str_in_output": """
            skip_special_tokens=true spaces_between_special_tokens=true""",
        "set beam_width": "n best_of",
        "a beam's text may still be given up: use stop_token_ids": "stop=[]",
        "a beam has the logprob of each of its own tokens": "logprobs=0 prompt_logprobs",
        "beams are told at the end": "output_kind",
        "set batch_invariant for the whole engine": "deterministic=false",
    }
)

# Fields of PoolingParams.
POOLING = _table(
    {
        "a pooled prompt is told when it is done": "output_kind",
        _NO_REWARDS: "step_tag_id returned_token_ids",
        "requests bring no code and no data of models' own": "extra_kwargs={} additional_data late_interaction_params",
        "token ids are in the output: prompt_token_ids": "requires_token_ids=false",
    }
)

# Fields of StructuredOutputsParams.
STRUCTURED = _table({"there is one backend, and nothing to fall back to": "disable_fallback=false|true"})

# Arguments of generate, chat and add_request, and keys of a prompt.
CALL = _table(
    {
        _NO_ADAPTERS: "prompt_adapter_request",
        _NEW_GRAMMAR_NAME: "guided_options_request",
        'put them into the prompts: [{"prompt_token_ids": [1, 2]}]': "prompt_token_ids",
        "tokenize with get_tokenizer() and give the token ids": "tokenization_kwargs={}",
        _NO_MEDIA: """
            mm_processor_kwargs={} multi_modal_data={} multi_modal_uuids={} prompt_embeds encoder_prompt
            decoder_prompt""",
        "traces are the server's: quire serve --otlp-traces-endpoint": "trace_headers={}",
        "the replica is chosen by cache and load": "data_parallel_rank=0",
        "a model's own switches go into chat_template_kwargs": """
            reasoning_effort reasoning_ended reasoning_parser_kwargs={}""",
        "the engine runs as many prompts at once as fit": "concurrency_limit",
        "the prompt itself may hold it: {'prompt': text, 'prompt_token_ids': ids}": "prompt_text",
    }
)

# Fields of HTTP requests, OpenAI's, vLLM's and llama.cpp's.
_NO_SAMPLER = "Quire has temperature, top_p, top_k, min_p and the penalties"
FIELDS = {
    name: (SAMPLING | CALL)[name]
    for name in (
        *("truncate_prompt_tokens",),
        *("data_parallel_rank", "mm_processor_kwargs", "prompt_embeds"),
    )
} | _table(
    {
        "the adapter is the request's model": "lora_request",
        _ONE_GRAMMAR_BACKEND: 'guided_decoding_backend="auto"|"guidance"',
        "OpenAI calls them tools and tool_choice now": 'functions=[] function_call="none"|"auto"',
        _NO_MEDIA: 'modalities=["text"] audio media_io_kwargs={}',
        _NO_TRANSFER: "kv_transfer_params",
        "requests bring no code; an operator can: --logits-processors": "logits_processors=[]",
        "the server's own drafter finds what an answer repeats: --speculative-config": "prediction",
        _NO_SAMPLER: """
            typical_p=1|1.0 mirostat=0 dynatemp_range=0|0.0 xtc_probability=0|0.0 dry_multiplier=0|0.0""",
        # SGLang's, which its router puts into every request.
        "include_stop_str_in_output shows stop strings": "no_stop_trim=false",
        "Quire tells tokens and logprobs": "return_hidden_states=false",
        "thinking is told apart, and as it comes": "separate_reasoning=true stream_reasoning=true",
        "Quire keeps no answers": "store=false",
        "there is one tier; see priority": 'service_tier="auto"|"default"',
        "prefixes stay in memory while there is room": 'prompt_cache_retention="in_memory"|"in-memory"',
        "Quire has no slots: prefixes are found by their content": "id_slot=-1",
        "stream_options.continuous_usage_stats counts the tokens of each chunk": "timings_per_token=false",
        "Quire tells no progress of a prompt": "return_progress=false",
        "Quire completes a text at its end only": 'suffix=""',
        "the server's operator chooses it: --chat-template": "chat_template",
        "say it in a message": 'verbosity="medium"',
        "Quire searches nothing": "web_search_options",
        "Quire judges no texts": "moderation",
        "a chat's answer holds the answer alone": "echo=false",
        "put their text into a message": "documents=[]",
    }
)

# Methods by the class that vLLM has them in.
_ENGINE_METHODS = {
    "requests can be aborted, not paused": "pause_generation resume_generation",
    _ADAPTERS_BY_USE: "add_lora remove_lora list_loras pin_lora",
    "see get_metrics()": "start_profile stop_profile",
    "workers take plans and no calls": "collective_rpc apply_model",
}
METHODS = {
    "LLM": _table(
        {
            _NO_REWARDS: "reward",
            "hand all prompts to generate": "enqueue enqueue_chat wait_for_completion",
            "render with get_tokenizer().apply_chat_template": "preprocess_chat",
            "give LLM(tokenizer=...)": "set_tokenizer",
            **_ENGINE_METHODS,
        }
    ),
    "AsyncLLM": _table(_ENGINE_METHODS),
    "LLMEngine": _table({"call add_request with PoolingParams": "encode", **_ENGINE_METHODS}),
}

# Classes that programs import at their top, whether they use them or not.
CLASSES = _table(
    {
        _NEW_GRAMMAR_NAME: "GuidedDecodingParams",
    }
)


def sift(
    given: Mapping[str, Any],
    table: Mapping[str, Refusal],
    known: Collection[str] = (),
    *,
    error: Callable[[str, str], Exception] = lambda name, message: BadRequestError(message, param=name),
) -> dict[str, Any]:
    """The arguments that are known. A refused one, or one that nobody knows, raises `error(name, message)`."""
    left = {}
    for name, value in given.items():
        if name in known:
            left[name] = value
        elif name not in table:
            near = nearest(name, known)
            raise error(name, f"unknown argument {name!r}." + (f" Did you mean {near[0]}?" if near else ""))
        elif not table[name].takes(value):
            raise error(name, table[name].message(name))
    return left


def reads_arguments(read: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[type[T]], type[T]]:
    """A class decorator: what is written reaches `__init__` as `read` has understood it. Tools that complete code and
    check types still see the class's own fields."""

    def decorate(cls: type[T]) -> type[T]:
        made: Callable[..., None] = cls.__init__

        @functools.wraps(made)
        def init(self: T, *args: Any, **given: Any) -> None:
            made(self, *args, **read(given))

        cls.__init__ = init  # type: ignore[assignment]
        return cls

    return decorate


def has_refused_methods(cls: type[T]) -> type[T]:
    """A class decorator: a call of one of METHODS raises, with the reason."""

    def refused(name: str, refusal: Refusal) -> Callable[..., NoReturn]:
        def method(self: T, *args: Any, **kwargs: Any) -> NoReturn:
            raise BadRequestError(f"{cls.__name__}.{name} is not supported: {refusal.why}", param=name)

        method.__name__ = name
        method.__doc__ = f"Refused: {refusal.why}."
        return method

    for name, refusal in METHODS[cls.__name__].items():
        assert not hasattr(cls, name), f"{cls.__name__}.{name} is served and refused"
        setattr(cls, name, refused(name, refusal))
    return cls


@functools.cache
def refused_class(name: str) -> type:
    """One of CLASSES: it can be imported and asked for with isinstance, and making one raises."""

    def init(self: object, *args: Any, **kwargs: Any) -> None:
        raise BadRequestError(f"{name} is not supported: {CLASSES[name].why}", param=name)

    return type(name, (), {"__init__": init, "__doc__": f"Refused: {CLASSES[name].why}."})
