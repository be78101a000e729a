"""The text side of an engine: tokenizer, chat template, sampling defaults. Needs no torch, so that a server's own
process is up at once while the tokens' side loads elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from quire.agents import find_dialect
from quire.config import EngineConfig
from quire.engine.inputs import InputProcessor
from quire.engine.outputs import OutputProcessor
from quire.errors import BadRequestError, TokenizerError
from quire.executor.sizing import weight_bytes
from quire.grammar import GrammarCompiler, end_token_ids, open_tokenizer
from quire.log import get_logger
from quire.params import SamplingParams
from quire.text import ChatTemplate, read_chat_template
from quire.weights.model import OpenedModel as OpenedModel
from quire.weights.model import open_model as open_model

# Fields of generation_config.json that set a model's own sampling defaults, and what they are called here.
_GENERATION_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}

_NUM_KEPT_TEMPLATES = 8


def num_weight_bytes(config: EngineConfig) -> int:
    """About how many bytes a model's weights take: what its files hold, or would."""
    opened = open_model(config)
    entries = opened.checkpoint.tensors()
    if entries is None:
        return weight_bytes(opened.spec, "bfloat16", max_position=0)
    return sum(entry.num_bytes for entry in entries if entry.view is None)


class TextSide:
    """Everything that turns text into tokens and back. Any thread may use it."""

    def __init__(self, config: EngineConfig, opened: OpenedModel) -> None:
        self.config = config
        self.spec = opened.spec
        self.tokenizer = open_tokenizer(config, opened.checkpoint, opened.spec)
        # The user's own; without it the tokenizer's.
        self.chat_template = config.chat_template and read_chat_template(config.chat_template)
        source = self.chat_template or (self.tokenizer.chat_template if self.tokenizer is not None else None)
        self.dialect = find_dialect(source, config.tool_call_parser, config.reasoning_parser)
        self.default_sampling = _default_sampling(opened.checkpoint.generation_config)
        self.eos_token_ids = frozenset(end_token_ids(opened.checkpoint, opened.spec, self.tokenizer))
        self.grammars = GrammarCompiler(lambda: (self.tokenizer, self.eos_token_ids), vocab_size=opened.spec.vocab_size)
        self._template = lru_cache(_NUM_KEPT_TEMPLATES)(self._compile)

    def make_inputs(
        self, max_model_len: int, max_num_seqs: int | None = None, serves_determinism: bool = False
    ) -> InputProcessor:
        """Only the tokens' side knows the arguments: max_model_len is the length that the KV cache can serve."""
        return InputProcessor(
            self.tokenizer,
            vocab_size=self.spec.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=self.eos_token_ids,
            seed=self.config.seed,
            max_num_seqs=max_num_seqs,
            has_plugins=bool(self.config.logits_processors),
            is_split=self.config.num_ranks > 1,
            nondeterminism=_nondeterminism(self.config, serves_determinism),
            grammars=self.grammars,
            thinking=self.dialect.thinking,
            pooler=self.spec.pooler,
            hidden_size=self.spec.hidden_size,
        )

    def make_outputs(self) -> OutputProcessor:
        cached_block_size = self.config.block_size if self.config.enable_prefix_caching else None
        return OutputProcessor(self.tokenizer, cached_block_size=cached_block_size)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """A conversation as a prompt: its text and its tokens. `kwargs` are those of `ChatTemplate.encode`."""
        if self.tokenizer is None:
            raise BadRequestError("a chat needs a tokenizer, and skip_tokenizer_init=True was set", param="messages")
        at_most = self.config.max_model_len or self.spec.max_position
        if len(messages) > at_most:
            raise BadRequestError(
                f"there are {len(messages):,} messages, and at most {at_most:,} tokens fit: send fewer",
                param="messages",
            )
        if kwargs.get("allow_special_tokens") is None:
            kwargs["allow_special_tokens"] = self.config.allow_special_tokens_in_content
        text, token_ids = self._template(chat_template).encode(messages, at_most=at_most, **kwargs)
        return {"prompt": text, "prompt_token_ids": token_ids, "is_chat": True}

    def compile_template(self) -> None:
        """Compile the chat template before the first chat needs it, to find out at start what is wrong with it."""
        if self.tokenizer is not None and (self.chat_template or self.tokenizer.chat_template):
            try:
                self._template(None).try_out()
            except TokenizerError as error:
                get_logger().warning("chats will be refused: %s", error)

    def _compile(self, given: str | None) -> ChatTemplate:
        assert self.tokenizer is not None
        return ChatTemplate(self.chat_template if given is None else given, self.tokenizer)


def _nondeterminism(config: EngineConfig, serves_determinism: bool) -> str | None:
    """Why no request can be deterministic on this engine; None: each may."""
    if config.num_ranks > 1:
        return "it is not proven for a model that is split among ranks"
    if config.enable_lora:
        return "this engine was made with enable_lora, and adapters' products are torch's"
    if config.logits_processors:
        return "this engine's logits processors see all requests of a step at once"
    if not serves_determinism:
        return "it needs the native CPU kernels (device='cpu'): elsewhere products are chosen by their size"
    return None


def _default_sampling(generation_config: dict[str, Any]) -> SamplingParams:
    """The model's own defaults where it brings any, as vLLM's `--generation-config auto` takes them: do_sample changes
    nothing there either. Values that cannot be used are left out."""
    params = SamplingParams()
    for theirs, ours in _GENERATION_DEFAULTS.items():
        if generation_config.get(theirs) is not None:
            with contextlib.suppress(BadRequestError):
                params = params.clone(**{ours: generation_config[theirs]})
    return params
