"""Tokenizer: text to token ids and back, from a model directory or from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import BadRequestError, ContextLengthError, TokenizerError
from quire.text.control_tokens import ControlTokens
from quire.text.detokenizer import Detokenizer
from quire.text.token_bytes import TokenBytes, decode_rule

if TYPE_CHECKING:
    import tokenizers

# Text after which the next word starts without the space that SentencePiece vocabularies put before a text.
_NO_SPACE_BEFORE = "\n"
_LONG_TEXT_CHARS = 2_000
_WINDOW_CHARS = 65_536


class Tokenizer:
    """One model's vocabulary. Made by `from_directory` or `from_gguf`; immutable and safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        source: str,
        vocab_size: int,
        named_token_ids: Mapping[str, int | None],
        end_token_ids: frozenset[int] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        listed_special_tokens: Iterable[str] | None = None,
    ) -> None:
        self.backend = backend  # the library's tokenizer; it is shared: do not change it
        self.source = source
        self.vocab_size = vocab_size  # the largest id + 1
        self.bos_token_id = named_token_ids.get("bos")
        self.eos_token_id = named_token_ids.get("eos")
        self.pad_token_id = named_token_ids.get("pad")
        self.unk_token_id = named_token_ids.get("unk")
        named = (self.bos_token_id, self.eos_token_id, self.pad_token_id, self.unk_token_id)
        self.bos_token, self.eos_token, self.pad_token, self.unk_token = (
            None if token_id is None else self.token(token_id) for token_id in named
        )
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # The special tokens that the model's files list by name. A GGUF file lists none: then they are all of them.
        if listed_special_tokens is None:
            listed_special_tokens = (added[token_id].content for token_id in sorted(self.special_token_ids))
        self.listed_special_tokens = tuple(listed_special_tokens)
        eos = frozenset[int]() if self.eos_token_id is None else frozenset((self.eos_token_id,))
        self.end_token_ids = eos if end_token_ids is None else end_token_ids | eos
        self.chat_templates = dict(chat_templates or {})
        rule = decode_rule(backend, source)
        self.num_spaces_stripped = rule.num_spaces_stripped  # from the start of a decoded text
        self._table = TokenBytes(backend.id_to_token, rule.to_bytes, vocab_size)
        self._table_without_special = TokenBytes(
            backend.id_to_token, rule.to_bytes, vocab_size, hidden=self.special_token_ids
        )

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Reads tokenizer.json and the files beside it."""
        from quire.text.directory import TokenizerFiles

        files = TokenizerFiles(Path(path))
        backend = files.load()
        return cls(
            backend,
            source=str(files.tokenizer_json),
            vocab_size=max(backend.get_vocab().values(), default=-1) + 1,
            named_token_ids=files.named_token_ids(backend),
            chat_templates=files.chat_templates(),
            listed_special_tokens=files.special_tokens(backend),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str) -> Tokenizer:
        """Builds the tokenizer from a GGUF file's tokenizer.ggml.* values; `source` names the file in errors."""
        from quire.text.gguf_vocab import GGUFVocab

        vocab = GGUFVocab.read(metadata, source)
        template = metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise TokenizerError(f"{source}: tokenizer.chat_template is no text: convert the file again")
        return cls(
            vocab.build(),
            source=source,
            vocab_size=len(vocab.tokens),
            named_token_ids={
                name: vocab.id_of(gguf_name)
                for name, gguf_name in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items()
            },
            end_token_ids=vocab.end_token_ids,
            chat_templates={"default": template} if template else None,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True, at_most: int | None = None) -> list[int]:
        """Token ids of a text. Special tokens that are written out in it are recognized.

        `at_most` is how many the caller can use. A text that has many times as many is refused before it costs their
        time and memory; one that has a few more comes back whole, for the caller to refuse with the number.
        """
        if isinstance(text, str) and len(text) > _LONG_TEXT_CHARS:
            if at_most is not None:
                self._refuse_far_too_long(text, at_most)
            # Only this one of the library's two ways lets other threads run meanwhile.
            return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise _not_text([text]) from None

    def _refuse_far_too_long(self, text: str, at_most: int) -> None:
        """Encoding takes about 400 bytes and 2 us a token, so no more than `worth_of_work` are ever made at once."""
        if len(text) > at_most * self.max_token_chars:
            raise ContextLengthError.of(
                at_most,
                f"the text has {len(text):,} characters, and no token has more than {self.max_token_chars}. Shorten it",
                param="prompt",
            )
        limit = worth_of_work(at_most)
        if len(text) <= limit:
            return
        # Few texts that long would fit: their tokens are counted piece by piece. A cut changes the tokens beside it
        # alone, so the sum is right but for a few, and the limit is several times what fits.
        num_tokens = 0
        for start in range(0, len(text), _WINDOW_CHARS):
            piece = text[start : start + _WINDOW_CHARS]
            num_tokens += len(self.encode_batch([piece], add_special_tokens=False)[0])
            if num_tokens > limit:
                raise ContextLengthError.of(
                    at_most,
                    f"the text has {len(text):,} characters, the first {start + len(piece):,} of them {num_tokens:,} "
                    "tokens. Shorten it",
                    param="prompt",
                )

    @cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest token as the vocabulary writes it, never fewer than it has in a text."""
        return max(map(len, self.backend.get_vocab()), default=1)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Encode many texts in parallel."""
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError:
            raise _not_text(texts) from None
        return [encoding.ids for encoding in encodings]

    def encode_whole(
        self, text: str, second: str | None = None, *, at_most: int, keep: int | None = None
    ) -> tuple[list[int], int | None]:
        """Token ids of a text or of a pair, and how many tokens belong to a pair's first text, if the tokenizer tells
        them apart. at_most: see `encode`.

        More than `keep` tokens are cut at the end, in a pair the longer text first. Tokens around a text, such as [CLS]
        and [SEP], stay.
        """
        texts = [text] if second is None else [text, second]
        try:
            for each in texts if keep is None else ():
                if len(each) > _LONG_TEXT_CHARS:
                    self._refuse_far_too_long(each, at_most)
            if keep is not None:  # the rest would hardly be read
                texts = [each[: 4 * worth_of_work(keep)] for each in texts]
            parts = self.backend.encode_batch(texts, add_special_tokens=False)
        except TypeError:
            raise _not_text(texts) from None
        if keep is not None:
            room = keep - self.backend.num_special_tokens_to_add(len(parts) == 2)
            if room < len(parts):
                raise BadRequestError(
                    f"truncate_prompt_tokens={keep} leaves no room for a text", param="truncate_prompt_tokens"
                )
            num_second = len(parts[1]) if len(parts) == 2 else 0
            num_first = min(len(parts[0]), max(room - num_second, room - room // 2 if num_second else room))
            for part, count in zip(parts, (num_first, room - num_first), strict=False):
                part.truncate(count)
        whole = self.backend.post_process(parts[0], parts[1] if len(parts) == 2 else None, True)
        return whole.ids, whole.type_ids.index(1) if second is not None and 1 in whole.type_ids else None

    def decode(
        self, token_ids: Iterable[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of token ids; ids that no token has are nothing, bytes that make no character are U+FFFD.

        With `spaces_between_special_tokens` false, special tokens and the texts between them are decoded one by one,
        without the space that a SentencePiece text otherwise has after a special token.
        """
        detokenizer = Detokenizer(
            self,
            prompt_token_ids=(),
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        return detokenizer.push(tuple(token_ids)) + detokenizer.flush()

    def token(self, token_id: int) -> str:
        """The token as the vocabulary writes it (`Ġthe`, `▁the`), "" if no token has this id."""
        return (self.backend.id_to_token(token_id) or "") if 0 <= token_id < self.vocab_size else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; they need not be whole characters."""
        return self._table[token_id]

    def token_bytes_table(self, *, skip_special_tokens: bool) -> TokenBytes:
        """Bytes by token id, for the detokenizer."""
        return self._table_without_special if skip_special_tokens else self._table

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The special tokens and their marks, for chats, in which only the template may write them."""
        return ControlTokens(self.backend, self.unk_token_id)

    @property
    def chat_template(self) -> str | None:
        """The model's chat template: the one named "default", or the only one."""
        if "default" not in self.chat_templates and len(self.chat_templates) == 1:
            return next(iter(self.chat_templates.values()))
        return self.chat_templates.get("default")

    def ids_for_phrase(self, text: str) -> list[tuple[int, ...]]:
        """The token ids of a phrase at the start of a word and inside one: with and without a space before it."""
        phrase = text.strip(" ") or text
        anchor = self._anchor_token_ids
        variants = [self.encode(phrase, add_special_tokens=False)]
        for lead in (_NO_SPACE_BEFORE, f"{_NO_SPACE_BEFORE} "):
            ids = self.encode(lead + phrase, add_special_tokens=False)
            # Only where the anchor did not melt into the phrase are the tokens after it the phrase's own.
            if ids[: len(anchor)] == anchor:
                variants.append(ids[len(anchor) :])
        return [variant for variant in dict.fromkeys(map(tuple, variants)) if variant]

    @cached_property
    def _anchor_token_ids(self) -> list[int]:
        return self.encode(_NO_SPACE_BEFORE, add_special_tokens=False)

    def check_fits(self, embedding_rows: int, source: str) -> None:
        """Refuses a tokenizer whose tokens the model has no embedding for.

        Added tokens may lie beyond it: some models ship a few that they were never trained on. A prompt that holds
        one is refused where prompts are checked.
        """
        num_tokens = self.backend.get_vocab_size(with_added_tokens=False)
        what = f"the tokenizer {self.source} has {num_tokens} tokens"
        if num_tokens <= embedding_rows:
            beyond = [i for i in (self.bos_token_id, self.eos_token_id) if i is not None and i >= embedding_rows]
            if not beyond:
                return
            what = f"the tokenizer {self.source} has {self.token(beyond[0])!r} as token {beyond[0]}"
        raise TokenizerError(
            f"{source}: the embedding has {embedding_rows} rows, but {what}: it belongs to another model; "
            "use the tokenizer that came with these weights"
        )


def worth_of_work(at_most: int) -> int:
    """How many tokens are worth making for a caller that can use `at_most`, if only to tell how many there are."""
    return max(4 * at_most, _WINDOW_CHARS)


def _not_text(texts: Sequence[object]) -> BadRequestError:
    wrong = next((text for text in texts if not isinstance(text, str)), None)
    if wrong is not None:
        return BadRequestError(f"a prompt must be a string, got {type(wrong).__name__}", param="prompt")
    return BadRequestError("the text holds a lone surrogate, which is no Unicode text: remove it", param="prompt")
