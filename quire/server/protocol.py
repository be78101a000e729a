"""The bodies that the API takes. What is not declared here is refused by name.

Types are strict ("3" is no number) and limits stand in the types, so that the OpenAPI document shows what the decoder
enforces. `None` means "not given": unmodified clients write null for what they leave out.

Fields that clients know from elsewhere and that Quire does not have are declared as well. `ONLY` says with which
values they mean nothing; those are taken, all others are refused with the reason.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

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
from quire.server.errors import ApiError, bad_request, from_decode_error

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_PROMPTS = 2048
_INT32 = 2**31 - 1

T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, le=_INT32)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32)]
Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: Annotated[
        bool | None, Meta(description="A last chunk with empty choices holds the usage of the whole request.")
    ] = None
    continuous_usage_stats: Annotated[bool | None, Meta(description="Every chunk holds the usage so far.")] = None
    include_obfuscation: Annotated[bool | None, Meta(description="Only false: Quire pads nothing.")] = None


class GenerationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chats have in common."""

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
    user: Annotated[str | None, Meta(description="Whom the caller serves. Does not change the answer.")] = None
    # As vLLM has them.
    top_k: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
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
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[
        Annotated[int, Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)] | None,
        Meta(description="Lower runs first, among one key's own."),
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None,
        Meta(description="Requests share cached prefixes only under the same salt."),
    ] = None
    timeout: Annotated[
        Annotated[float, Meta(gt=0.0, le=1e9)] | None,
        Meta(description="Seconds, after which it is ended with a 504."),
    ] = None
    # See ONLY.
    response_format: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    truncate_prompt_tokens: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    lora_request: Any = None


Prompts = Annotated[
    str | Annotated[list[TokenId | str | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)],
    Meta(description="Text, token ids, or a list of either: then the choices are numbered prompt by prompt."),
]


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    prompt: Prompts
    max_tokens: Annotated[Count | None, Meta(description="16 if left out. 0 with echo: the prompt alone.")] = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int | None, Meta(description="Only as many as n: Quire gives all that it makes.")] = None
    suffix: Any = None
    prompt_embeds: Any = None


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
    max_tokens: Annotated[int, Meta(ge=1, le=_INT32)] | None = None
    max_completion_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=_INT32)] | None, Meta(description="The rest of the context if left out.")
    ] = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Annotated[dict[str, str] | None, Meta(description="The caller's own. Does not change the answer.")] = None
    safety_identifier: Annotated[str | None, Meta(description="As user.")] = None
    prompt_cache_key: Annotated[str | None, Meta(description="A hint that Quire does not need: see cache_salt.")] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="Means nothing without tools.")] = None
    # See ONLY.
    chat_template: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    store: Any = None
    service_tier: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    prompt_cache_retention: Any = None
    echo: Any = None
    documents: Any = None
    include_reasoning: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


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
    chat_template: Any = None
    tools: Any = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[TokenId]


_NO_TOOLS = "Quire has no tool calls yet"
_NO_GRAMMAR = "Quire has no structured output yet"
_NO_MEDIA = "Quire reads and writes text only"
_NO_FLAG = "the server's operator chooses it"

# Field -> (the values with which it means nothing, why it has no others).
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "response_format": ((None, {"type": "text"}), _NO_GRAMMAR),
    "structured_outputs": ((None,), _NO_GRAMMAR),
    "guided_json": ((None,), _NO_GRAMMAR),
    "guided_regex": ((None,), _NO_GRAMMAR),
    "guided_choice": ((None,), _NO_GRAMMAR),
    "guided_grammar": ((None,), _NO_GRAMMAR),
    "use_beam_search": ((None, False), "Quire has no beam search yet"),
    "length_penalty": ((None, 1, 1.0), "it belongs to beam search, which Quire does not have yet"),
    "logits_processors": ((None, []), "Quire runs no code that a request brings"),
    "truncate_prompt_tokens": ((None,), "Quire cuts no prompts: shorten it before sending"),
    "kv_transfer_params": ((None,), "Quire moves no KV between servers"),
    "vllm_xargs": ((None, {}), "it belongs to another engine's plugins"),
    "lora_request": ((None,), "Quire has no LoRA yet"),
    "suffix": ((None, ""), "Quire completes a text at its end only"),
    "prompt_embeds": ((None,), "Quire takes text or token ids"),
    "chat_template": ((None,), f"{_NO_FLAG}: --chat-template"),
    "tools": ((None, []), _NO_TOOLS),
    "tool_choice": ((None, "none", "auto"), _NO_TOOLS),
    "functions": ((None, []), _NO_TOOLS),
    "function_call": ((None, "none", "auto"), _NO_TOOLS),
    "store": ((None, False), "Quire keeps no answers"),
    "service_tier": ((None, "auto", "default"), "there is one tier; see priority"),
    "modalities": ((None, ["text"]), _NO_MEDIA),
    "audio": ((None,), _NO_MEDIA),
    "prediction": ((None,), "Quire has no predicted outputs"),
    "reasoning_effort": ((None,), "a model's own switches go into chat_template_kwargs"),
    "verbosity": ((None, "medium"), "say it in a message"),
    "web_search_options": ((None,), "Quire searches nothing"),
    "prompt_cache_retention": (
        (None, "in_memory", "in-memory"),
        "prefixes stay in memory while there is room",
    ),
    "echo": ((None, False), "a chat's answer holds the answer alone"),
    "documents": ((None, []), "put their text into a message"),
    "include_reasoning": ((None, True), "Quire does not take reasoning apart from the answer"),
    "mm_processor_kwargs": ((None, {}), _NO_MEDIA),
    "media_io_kwargs": ((None, {}), _NO_MEDIA),
}


def only_fields(type_: type[msgspec.Struct]) -> tuple[str, ...]:
    """Those of a body's fields that `ONLY` rules."""
    return tuple(f.name for f in msgspec.structs.fields(type_) if f.type is Any and f.name in ONLY)


class BodyDecoder:
    """From bytes to one kind of body, or to a 400 that names the field."""

    def __init__(self, type_: type[T]) -> None:
        assert issubclass(type_, msgspec.Struct)
        self.type = type_
        self._decoder = msgspec.json.Decoder(type_)
        self._fields = type_.__struct_fields__
        self._only = [(name, *ONLY[name]) for name in only_fields(type_)]

    def decode(self, body: bytes) -> Any:
        try:
            decoded = self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _with_hint(from_decode_error(error, self._fields)) from None
        for name, allowed, why in self._only:
            value = getattr(decoded, name)
            if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
                wanted = " or ".join(msgspec.json.encode(one).decode() for one in allowed)
                raise bad_request(
                    f"{name} is not supported: {why}. Leave it out, or send {wanted}", name, "unsupported"
                )
        return decoded


def _with_hint(error: ApiError) -> ApiError:
    if error.param and error.param.startswith("messages[") and ".content[" in error.param:
        error.message += '. Content is text, or a list of parts like {"type": "text", "text": "..."}'
    return error
