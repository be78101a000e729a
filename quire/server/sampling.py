"""From a body's fields to SamplingParams. What a request leaves out is the model's own default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.beams import BeamSearchParams
from quire.engine.api import EngineInfo, PreparedRequest
from quire.errors import BadRequestError, ContextLengthError
from quire.params import OutputKind, SamplingParams
from quire.server.errors import bad_request
from quire.server.pooled_bodies import PooledBody
from quire.server.protocol import ChatBody, CompletionBody, GenerationBody, ResponseFormat
from quire.structured import StructuredOutputsParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
# Each prompt of a request takes its lists along to the engine. Ids, or characters of words, times prompts.
_MAX_LISTED = 2**20
# Each takes some 60 bytes until the answer is written, and 80 in it.
_MAX_LOGPROBS = 2**19
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
# Fields that SamplingParams have under the same names.
_PLAIN = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop", "seed", "logit_bias", "min_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids", "bad_words", "deterministic"),
)
# Fields that only make sense without beams, or have no meaning for them that Quire serves.
_NOT_FOR_BEAMS = (
    *("structured_outputs", "vllm_xargs", "tools", "functions", "prompt_logprobs", "thinking_token_budget"),
    *_GUIDED,
)
_OF_BEAMS = ("temperature", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "length_penalty")


def completion_params(body: CompletionBody, defaults: SamplingParams) -> SamplingParams | BeamSearchParams:
    """The engine makes at least one token; with max_tokens=0 the caller drops it."""
    check_options(body)
    _check_lists(body)
    if body.use_beam_search:
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        return _beam_params(body, max_tokens=max_tokens, width=body.best_of, logprobs=body.logprobs)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request(
            f"best_of={body.best_of} is not supported: Quire gives every text that it makes, so it must equal "
            f"n={body.n or 1}. Leave it out",
            "best_of",
            "unsupported",
        )
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0:
        if not body.echo:
            raise bad_request("max_tokens=0 asks for nothing: set it to 1 or more, or set echo", "max_tokens")
        if body.min_tokens:
            raise bad_request(f"min_tokens ({body.min_tokens}) must be <= max_tokens (0)", "min_tokens")
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:  # the prompt's come with it
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return _params(
        body, defaults, max_tokens=max(max_tokens, 1), logprobs=body.logprobs, prompt_logprobs=prompt_logprobs
    )


def chat_params(body: ChatBody, defaults: SamplingParams) -> SamplingParams | BeamSearchParams:
    check_options(body)
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    elif body.max_tokens is not None and body.max_tokens != max_tokens:
        raise bad_request(
            f"max_tokens={body.max_tokens} and max_completion_tokens={max_tokens} contradict each other: send one",
            "max_tokens",
        )
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.use_beam_search:
        return _beam_params(body, max_tokens=max_tokens, width=None, logprobs=logprobs)
    params = _params(body, defaults, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs)
    params.thinking_token_budget = None if body.thinking_token_budget == -1 else body.thinking_token_budget
    return params


def has_grammar(params: SamplingParams | BeamSearchParams) -> bool:
    return isinstance(params, SamplingParams) and params.structured_outputs is not None


def check_room(body: CompletionBody | ChatBody, prepared: Sequence[PreparedRequest], max_model_len: int) -> None:
    """A length that was asked for by number must fit behind every prompt. The engine would cut it and say nothing."""
    asked, param = body.max_tokens, "max_tokens"
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        asked, param = body.max_completion_tokens, "max_completion_tokens"
    num_prompt_tokens = max(one.num_prompt_tokens for one in prepared)
    room = max_model_len - num_prompt_tokens
    if asked is not None and asked > room:
        which = "the longest prompt" if len(prepared) > 1 else "the prompt"
        raise ContextLengthError.of(
            max_model_len,
            f"{which} has {num_prompt_tokens}, and {param} asks for {asked} more. Ask for at most {room}",
            param=param,
        )


def check_logprobs(prepared: Sequence[PreparedRequest], max_model_len: int) -> None:
    """Bound the memory that a request's logprobs take, as that of its prompts is bounded."""
    params = prepared[0].params
    num_prompt_tokens = sum(one.num_prompt_tokens for one in prepared)
    num_tokens = params.n * sum(one.request.max_tokens for one in prepared)
    for name, number, advice in (
        ("prompt_logprobs", num_prompt_tokens, "send fewer prompts, or ask for fewer"),
        ("logprobs", num_tokens, "lower max_tokens or n, send fewer prompts, or ask for fewer"),
    ):
        wanted = getattr(params, name)
        # A whole sequence with as many as a position may have is always taken.
        if wanted is not None and number > (limit := max(_MAX_LOGPROBS // (1 + wanted), max_model_len)):
            raise bad_request(
                f"{name} of {number:,} tokens were asked for, and with {wanted} a token at most {limit:,} are given in "
                f"one request: {advice}",
                name,
            )


def priority_of(body: GenerationBody | PooledBody, info: EngineInfo) -> int:
    """The smaller runs first. Refused where the operator chose that it means nothing."""
    if body.priority and info.scheduling_policy == "fcfs":
        raise bad_request(
            f"priority={body.priority} has no effect: this server was started with --scheduling-policy fcfs",
            "priority",
            "unsupported",
        )
    return body.priority or 0


def check_options(body: GenerationBody) -> None:
    """Refuse options that contradict each other, whatever is sampled."""
    if body.stream_options is not None:
        if not body.stream:
            raise bad_request("stream_options needs stream=true", "stream_options")
        if body.stream_options.include_obfuscation:
            raise bad_request(
                "include_obfuscation is not supported: Quire pads no chunks",
                "stream_options.include_obfuscation",
                "unsupported",
            )
    for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
        if not body.use_beam_search and getattr(body, name) not in (None, neutral):
            raise bad_request(f"{name} needs use_beam_search=true", name)
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs are not given in a stream: set stream=false", "prompt_logprobs")


def _check_lists(body: CompletionBody) -> None:
    is_batch = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    num_prompts = len(body.prompt) if is_batch else 1
    sizes = {name: len(getattr(body, name) or ()) for name in ("allowed_token_ids", "logit_bias", "stop_token_ids")}
    sizes["bad_words"] = sum(map(len, body.bad_words or ()))
    if num_prompts > 1:
        for name in ("structured_outputs", "response_format", *_GUIDED):
            if (given := getattr(body, name)) is not None:
                sizes[name] = len(msgspec.json.encode(given))
    longest = max(sizes, key=lambda name: sizes[name])
    if num_prompts * sum(sizes.values()) > _MAX_LISTED:
        raise bad_request(
            f"{longest} has {sizes[longest]:,} entries or characters, and each of the {num_prompts:,} prompts takes "
            f"them along: with it send at most {max(1, _MAX_LISTED // sum(sizes.values())):,} prompts in a request",
            longest,
        )


def _beam_params(
    body: GenerationBody, *, max_tokens: int | None, width: int | None, logprobs: int | None
) -> BeamSearchParams:
    """Parameters of a beam search. n is the number of beams, as in vLLM; the model's own defaults are for sampling."""
    n = body.n or 1
    if body.stream:
        raise bad_request("use_beam_search has no stream: which beam is the best is known at the end", "stream")
    if width is not None and width < n:
        raise bad_request(f"best_of={width} beams are fewer than n={n}: raise best_of, or leave it out", "best_of")
    if body.cache_prompt is False:
        raise bad_request("use_beam_search reads the prefix cache: leave cache_prompt out", "cache_prompt")
    response_format = body.response_format
    is_free = response_format is None or response_format.type == "text"
    for name in _NOT_FOR_BEAMS if is_free else ("response_format",):
        if getattr(body, name, None) is not None:
            raise bad_request(f"{name} is not supported with use_beam_search: leave it out", name, "unsupported")
    if logprobs or getattr(body, "echo", None):
        name = "echo" if not logprobs else "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
        raise bad_request(
            f"{name} is not supported with use_beam_search: a beam has the logprob of each of its own tokens, without "
            f"others. Leave it out" + (", or set it to 0" if logprobs else ""),
            name,
            "unsupported",
        )
    values = {name: getattr(body, name) for name in (*_PLAIN, *_OF_BEAMS) if getattr(body, name) is not None}
    values.pop("n", None)
    if body.early_stopping is not None:
        values["early_stopping"] = body.early_stopping
    if max_tokens is None:
        raise bad_request("use_beam_search needs max_tokens", "max_tokens")
    return BeamSearchParams(beam_width=width or n, max_tokens=max_tokens, **values)


def _params(
    body: GenerationBody,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    values: dict[str, Any] = {name: getattr(defaults, name) for name in _MODEL_DEFAULTS}
    for name in _PLAIN:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    body.allowed_token_ids = None  # the body lives as long as its answer, and SamplingParams hold it compactly
    values["structured_outputs"] = structured_outputs(body)
    if body.vllm_xargs:
        values["extra_args"] = body.vllm_xargs
    if body.cache_prompt is False:
        values["skip_reading_prefix_cache"] = True
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        output_kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
    )


def structured_outputs(body: GenerationBody) -> StructuredOutputsParams | None:
    """The form that the answer must have, from whichever field says so."""
    given: dict[str, dict[str, Any]] = {}  # by field
    if body.structured_outputs is not None:
        given["structured_outputs"] = msgspec.to_builtins(body.structured_outputs)
    for field, name in _GUIDED.items():
        if (value := getattr(body, field)) is not None:
            given[field] = {name: value}
    if body.response_format is not None and (wanted := _of_response_format(body.response_format)):
        given["response_format"] = wanted
    if len(given) > 1:
        raise bad_request(f"{' and '.join(given)} contradict each other: send one", next(iter(given)))
    if body.guided_whitespace_pattern is not None:
        if "guided_json" not in given:
            raise bad_request("guided_whitespace_pattern needs guided_json", "guided_whitespace_pattern")
        given["guided_json"]["whitespace_pattern"] = body.guided_whitespace_pattern
    for values in given.values():
        try:
            return StructuredOutputsParams(**values)
        except BadRequestError as error:
            raise by_own_name(body, error) from None
    return None


def by_own_name(body: GenerationBody, error: BadRequestError) -> BadRequestError:
    """The error with the request's own name of the field, in its message too."""
    name = param_of(body, error.param)
    if error.param is None or name is None or name == error.param:
        return error
    text = str(error)
    return BadRequestError(name + text.removeprefix(error.param) if text.startswith(error.param) else text, param=name)


def param_of(body: GenerationBody, param: str | None) -> str | None:
    """The request's own name of what the engine calls structured_outputs."""
    if param is None or not param.startswith("structured_outputs"):
        return param
    rest = param.removeprefix("structured_outputs").removeprefix(".")
    for field, name in _GUIDED.items():
        if getattr(body, field) is not None:
            return field + rest.removeprefix(name)
    if body.response_format is not None and body.structured_outputs is None:
        if rest.startswith("json") and body.response_format.type == "json_schema":
            return "response_format.json_schema.schema" + rest.removeprefix("json")
        return "response_format"
    return param


def _of_response_format(wanted: ResponseFormat) -> dict[str, Any] | None:
    """The arguments of StructuredOutputsParams for a response_format; None for plain text."""
    is_schema, is_tag = wanted.type == "json_schema", wanted.type == "structural_tag"
    if (wanted.json_schema is not None) != is_schema:
        what = "needs" if is_schema else "has no"
        raise bad_request(f"response_format of type {wanted.type} {what} json_schema", "response_format.json_schema")
    if not is_tag and (wanted.structures is not None or wanted.triggers is not None):
        raise bad_request(f"response_format of type {wanted.type} has no structures or triggers", "response_format")
    if wanted.json_schema is not None:
        schema = wanted.json_schema.schema
        return {"json_object": True} if schema is None else {"json": schema}
    if is_tag:
        return {"structural_tag": {"structures": wanted.structures, "triggers": wanted.triggers}}
    return {"json_object": True} if wanted.type == "json_object" else None
