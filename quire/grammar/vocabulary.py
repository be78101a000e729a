"""A model's tokens as the grammar compiler reads them: the bytes that each stands for, and which are special."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.errors import BadRequestError
from quire.models.spec import ModelSpec
from quire.text import Tokenizer
from quire.weights import Checkpoint, open_checkpoint, resolve_model

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def open_tokenizer(config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec) -> Tokenizer | None:
    """The tokenizer that a config names, or else the model's own."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        # Its weights are not needed.
        other = resolve_model(config.tokenizer, load_format="dummy", download_dir=config.download_dir)
        if other.suffix == ".gguf":
            tokenizer = Tokenizer.from_gguf(open_checkpoint(other).gguf_metadata or {}, source=str(other))
        else:
            tokenizer = Tokenizer.from_directory(other)
    elif checkpoint.gguf_metadata is not None:
        tokenizer = Tokenizer.from_gguf(checkpoint.gguf_metadata, source=str(checkpoint.path))
    else:
        tokenizer = Tokenizer.from_directory(checkpoint.path)
    tokenizer.check_fits(spec.vocab_size, source=str(checkpoint.path))
    return tokenizer


def end_token_ids(checkpoint: Checkpoint, spec: ModelSpec, tokenizer: Tokenizer | None) -> set[int]:
    """Models name their end tokens in up to three places; any of them ends a sequence."""
    ids = set(spec.eos_token_ids)
    told: Any = checkpoint.generation_config.get("eos_token_id")
    if isinstance(told, int):
        ids.add(told)
    elif isinstance(told, list):
        ids.update(told)
    if tokenizer is not None:
        ids.update(tokenizer.end_token_ids)
    return ids


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        # Ids beyond the tokenizer's have no bytes, and a token without bytes is allowed nowhere.
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(token for token in tokenizer.special_token_ids if token < vocab_size)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def grammar_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> LLTokenizer:
    """Takes some hundred milliseconds for a large vocabulary, and holds the interpreter for half of them."""
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = sorted(token for token in eos_token_ids if token < vocab_size)
    if not ends:
        raise BadRequestError(
            "structured_outputs need a model with an end token, and this one names none", param="structured_outputs"
        )
    wrapped = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, ends[0]))
    return LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=ends)
