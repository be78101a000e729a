"""The bodies that the API takes. Fields that are not declared here are refused by name.

Types are strict ("3" is no number) and limits stand in the types, so that the OpenAPI document shows what the decoder
enforces. `None` means "not given": unmodified clients write null for what they leave out.

A field is in one of three states, which the tables of docs/from-vllm.md are made from:

    served              it does what it says
    without effect      `NO_EFFECT` says why it cannot change an answer; taken with any value of its type
    refused             `refusals.FIELDS` says why; taken with the values that mean nothing
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, inspect

from quire.agents.tools import MAX_TOOLS
from quire.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARS,
    MAX_LOGIT_BIAS,
    MAX_PRIORITY,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MIN_PRIORITY,
)
from quire.refusals import FIELDS
from quire.server.errors import ApiError, bad_request, from_decode_error
from quire.structured import MAX_CHOICES as MAX_GRAMMAR_CHOICES

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_ANSWERS = 2048  # to one request: prompts times n
MAX_INT32 = 2**31 - 1
_LEFT_OUT: Any = None
LONG_BODY_BYTES = 1 << 18  # decoded in 20 ms whatever it holds
_MAX_WEIGHT = 300_000  # the summed weight of a body's parts: decoded in 20 ms as well
_TEXT_WEIGHT, _HOLDER_WEIGHT = 3, 10
_INDEX = re.compile(r"\[[^\]]*\]")  # in the path of a field, like tools[0].type
_STEP = re.compile(r"\[\]|[^.\[\]]+")
_MAX_NEUTRAL_BYTES = 256  # no value of `refusals.FIELDS` is as long

T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INT32)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Priority = Annotated[int, Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_SALT_CHARS)]
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
Seconds = Annotated[float, Meta(gt=0.0, le=1e9)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: Annotated[
        bool | None, Meta(description="A last chunk with empty choices holds the usage of the whole request.")
    ] = None
    continuous_usage_stats: Annotated[bool | None, Meta(description="Every chunk holds the usage so far.")] = None
    include_obfuscation: Annotated[bool | None, Meta(description="Only false: Quire pads nothing.")] = None


Schema = dict[str, Any] | str | bool


class StructuredOutputsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the answer must look like: exactly one of json, regex, choice, grammar, json_object, structural_tag."""

    json: Annotated[Schema | None, Meta(description="A JSON schema.")] = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(max_length=MAX_GRAMMAR_CHOICES)] | None = None
    grammar: Annotated[str | None, Meta(description="Lark, GBNF or EBNF.")] = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    disable_fallback: Annotated[bool, Meta(description="Either: there is one backend.")] = False


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    schema: Annotated[dict[str, Any] | bool | None, Meta(description="Any object if left out.")] = None
    strict: Annotated[bool | None, Meta(description="Either: every answer is held to the schema.")] = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class GenerationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chats have in common."""

    model: Annotated[str | None, Meta(description="One of GET /v1/models; the first of them if left out.")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: Annotated[
        Annotated[dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=MAX_LOGIT_BIAS)] | None,
        Meta(description="By token id."),
    ] = None
    # As vLLM has them.
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None
    min_p: Unit | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    use_beam_search: Annotated[
        bool | None, Meta(description="The n likeliest answers instead of n that are drawn. Not in a stream.")
    ] = None
    length_penalty: Annotated[
        Annotated[float, Meta(ge=-10.0, le=10.0)] | None,
        Meta(description="Beams are compared by their logprob divided by their length raised to this; 1 if left out."),
    ] = None
    early_stopping: bool | Literal["never"] | None = None
    vllm_xargs: Annotated[
        dict[str, Any] | None, Meta(description="For logits processors that the server was started with.")
    ] = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[Priority | None, Meta(description="Lower runs first, among one key's own.")] = None
    cache_salt: Annotated[
        CacheSalt | None, Meta(description="Requests share cached prefixes only under the same salt.")
    ] = None
    timeout: Annotated[Seconds | None, Meta(description="Seconds, after which it is ended with a 504.")] = None
    request_id: Annotated[RequestId | None, Meta(description="As the header x-request-id, which goes first.")] = None
    cache_prompt: Annotated[bool | None, Meta(description="false: find nothing in the prefix cache.")] = None
    deterministic: Annotated[
        bool | None, Meta(description="true: bitwise the same logprobs whatever runs beside it (on a CPU).")
    ] = None
    continued_token_ids: Annotated[
        list[TokenId] | None,
        Meta(description="Tokens of the answer that the client has: the stream goes on after them. With their seed."),
    ] = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    # As vLLM had them before structured_outputs.
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(max_length=MAX_GRAMMAR_CHOICES)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    # See NO_EFFECT.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # See refusals.FIELDS.
    logits_processors: Raw = _LEFT_OUT
    truncate_prompt_tokens: Raw = _LEFT_OUT
    kv_transfer_params: Raw = _LEFT_OUT
    lora_request: Raw = _LEFT_OUT
    guided_decoding_backend: Raw = _LEFT_OUT
    data_parallel_rank: Raw = _LEFT_OUT
    store: Raw = _LEFT_OUT
    service_tier: Raw = _LEFT_OUT
    prompt_cache_retention: Raw = _LEFT_OUT
    id_slot: Raw = _LEFT_OUT
    timings_per_token: Raw = _LEFT_OUT
    return_progress: Raw = _LEFT_OUT
    typical_p: Raw = _LEFT_OUT
    mirostat: Raw = _LEFT_OUT
    dynatemp_range: Raw = _LEFT_OUT
    xtc_probability: Raw = _LEFT_OUT
    dry_multiplier: Raw = _LEFT_OUT
    no_stop_trim: Raw = _LEFT_OUT
    return_hidden_states: Raw = _LEFT_OUT
    separate_reasoning: Raw = _LEFT_OUT
    stream_reasoning: Raw = _LEFT_OUT


Prompts = Annotated[
    str | Annotated[list[TokenId | str | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)],
    Meta(description="Text, token ids, or a list of either: then the choices are numbered prompt by prompt."),
]


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    prompt: Prompts
    max_tokens: Annotated[Count | None, Meta(description="16 if left out. 0 with echo: the prompt alone.")] = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[
        int | None, Meta(description="As many as n; with use_beam_search the number of beams, of which n are given.")
    ] = None
    suffix: Raw = _LEFT_OUT
    prompt_embeds: Raw = _LEFT_OUT


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class FunctionCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: Annotated[str, Meta(description="JSON, as text.")]


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn, handed to the model's chat template as it is."""

    role: Annotated[str, Meta(min_length=1)]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    # An answer that is sent back as it came has these, without a value.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ChatBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Annotated[Positive | None, Meta(description="The rest of the context if left out.")] = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Meta(description='"auto", "none", "required", or {"type": "function", "function": {"name": ...}}.'),
    ] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="false: at most one call where calls are forced.")] = (
        None
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_token_budget: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None,
        Meta(description="Tokens of thinking, after which the thought is closed."),
    ] = None
    include_reasoning: Annotated[bool | None, Meta(description="false: thinking is left out of the answer.")] = None
    # See refusals.FIELDS.
    chat_template: Raw = _LEFT_OUT
    functions: Raw = _LEFT_OUT
    function_call: Raw = _LEFT_OUT
    modalities: Raw = _LEFT_OUT
    audio: Raw = _LEFT_OUT
    prediction: Raw = _LEFT_OUT
    verbosity: Raw = _LEFT_OUT
    moderation: Raw = _LEFT_OUT
    web_search_options: Raw = _LEFT_OUT
    echo: Raw = _LEFT_OUT
    documents: Raw = _LEFT_OUT
    mm_processor_kwargs: Raw = _LEFT_OUT
    media_io_kwargs: Raw = _LEFT_OUT


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text or a chat, not both."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: Annotated[bool | None, Meta(description="If left out, true for a text only.")] = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template: Raw = _LEFT_OUT


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[TokenId]


# Field -> why no value of it can change an answer.
NO_EFFECT: dict[str, str] = {
    "user": "whom the caller serves; Quire keeps no accounts of them",
    "metadata": "the caller's own notes; Quire keeps no answers",
    "safety_identifier": "as user",
    "prompt_cache_key": "a hint that Quire's prefix cache does not need; cache_salt keeps prefixes apart",
    "prompt_cache_options": "as prompt_cache_key: every whole block of a prompt is cached",
}

# Tools that must not be called are never seen: no answer differs.
_UNUSED_TOOLS = {"functions": "function_call"}


class FieldState(StrEnum):
    SERVED = "served"
    NO_EFFECT = "without effect"
    REFUSED = "refused"


def field_states(type_: type[msgspec.Struct]) -> dict[str, FieldState]:
    """The state of each of a body's fields."""
    states = dict.fromkeys(type_.__struct_fields__, FieldState.SERVED)
    for field in msgspec.structs.fields(type_):
        if field.type is Raw:
            states[field.name] = FieldState.REFUSED
        elif field.name in NO_EFFECT:
            states[field.name] = FieldState.NO_EFFECT
    return states


def refused_fields(type_: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(name for name, state in field_states(type_).items() if state is FieldState.REFUSED)


def check_shape(body: bytes) -> None:
    """Refuse a body of very many small parts: decoding holds up every other request, for some 30 ns a number, 80 ns a
    text and 300 ns a list, an object or a field. Text itself is quick, whatever its length and whatever it says."""
    if _text_weight(body) + _weight(body) <= _MAX_WEIGHT:
        return  # even with what stands in texts, which is none
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    weight = _text_weight(bare)
    if weight <= _MAX_WEIGHT:
        weight += _weight(b"".join(bare.split(b'"')[::2]))
    if weight > _MAX_WEIGHT:
        raise bad_request(
            f"the body has too many parts: a number counts as 1, a text as {_TEXT_WEIGHT}, a list, an object or a "
            f"field as {_HOLDER_WEIGHT}, and all together they may be {_MAX_WEIGHT:,}. Send fewer messages, prompts or "
            f"token ids in a request",
            code="too_many_parts",
        )


def _text_weight(text: bytes) -> int:
    return _TEXT_WEIGHT * (text.count(b'"') // 2)


def _weight(text: bytes) -> int:
    return text.count(b",") + _HOLDER_WEIGHT * sum(map(text.count, (b"[", b"{", b":")))


class BodyDecoder:
    """Decodes one kind of body, or raises a 400 that names the field."""

    def __init__(self, type_: type[T]) -> None:
        assert issubclass(type_, msgspec.Struct)
        self.type = type_
        self._decoder = msgspec.json.Decoder(type_)
        self._fields = type_.__struct_fields__
        self._refused = refused_fields(type_)

    def decode(self, body: bytes) -> Any:
        try:
            decoded = self._decoder.decode(body)
            given = [name for name in self._refused if getattr(decoded, name)]
            for name in given:  # decoded only now, so that here, too, it may turn out to be no JSON
                if bytes(getattr(decoded, _UNUSED_TOOLS.get(name, ""), None) or b"") != b'"none"':
                    _check_refused(name, getattr(decoded, name))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _with_hint(from_decode_error(error, self._fields), self.type) from None
        for name in given:
            setattr(decoded, name, _LEFT_OUT)  # it is a view of the whole body, which would live as long as this
        return decoded


def _check_refused(name: str, given: Raw) -> None:
    refusal = FIELDS[name]
    if len(bytes(given)) <= _MAX_NEUTRAL_BYTES and refusal.takes(msgspec.json.decode(given)):
        return
    wanted = " or ".join(msgspec.json.encode(one).decode() for one in refusal.taken)
    raise bad_request(f"{name} is not supported: {refusal.why}. Leave it out, or send {wanted}", name, "unsupported")


def _with_hint(error: ApiError, type_: type[msgspec.Struct]) -> ApiError:
    if error.param and "enum value" in error.message and (names := _choices(type_, _INDEX.sub("[]", error.param))):
        error.message += f": it must be {'one of ' if len(names) > 1 else ''}{', '.join(names)}"
    if error.param and error.param.startswith("messages[") and ".content[" in error.param:
        if error.param.endswith(("].type", "].image_url", "].input_audio", "].video_url", "].audio_url", "].file")):
            error.message = f"{error.param}: this model reads text only"
        error.message += '. Content is text, or a list of parts like {"type": "text", "text": "..."}'
    return error


@lru_cache(maxsize=256)
def _choices(type_: type[msgspec.Struct], path: str) -> list[str]:
    """What a field that takes certain texts takes. The path is like tools[].type."""
    found = [inspect.type_info(type_)]
    for step in _STEP.findall(path):
        inner: list[inspect.Type] = []
        for one in _members(found):
            if step == "[]" and isinstance(one, inspect.ListType | inspect.DictType):
                inner.append(one.item_type if isinstance(one, inspect.ListType) else one.value_type)
            elif isinstance(one, inspect.StructType):
                inner += [field.type for field in one.fields if field.encode_name == step]
        found = inner
    values = [value for one in _members(found) if isinstance(one, inspect.LiteralType) for value in one.values]
    return list(dict.fromkeys(map(str, values)))


def _members(types: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    for one in types:
        if isinstance(one, inspect.UnionType):
            yield from _members(one.types)
        else:
            yield one.type if isinstance(one, inspect.Metadata) else one
