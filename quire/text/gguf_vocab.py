"""A tokenizer from the vocabulary inside a GGUF file: byte-level BPE ("gpt2") or SentencePiece BPE ("llama")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from numbers import Real
from typing import TYPE_CHECKING, Any

from quire.errors import TokenizerError
from quire.text.pretokenize import add_ends, pre_tokenizer, pretokenizing

if TYPE_CHECKING:
    import tokenizers

_SPACE = "▁"  # what SentencePiece writes for a space
_WHAT_TO_DO = "download or convert the file again, or pass tokenizer=DIRECTORY"

# Tokens that end a turn or a document under any model that has them; older files name only one of them as eos.
_END_TOKENS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"})


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(slots=True)
class GGUFVocab:
    """The tokenizer.ggml.* values of one file, checked."""

    source: str
    tokens: list[str]
    types: list[int]
    metadata: Mapping[str, Any]

    @classmethod
    def read(cls, metadata: Mapping[str, Any], source: str) -> GGUFVocab:
        tokens = _list(metadata, "tokens", str, source)
        if tokens is None:
            raise TokenizerError(f"{source}: no vocabulary (tokenizer.ggml.tokens) in this file: {_WHAT_TO_DO}")
        types = _list(metadata, "token_type", int, source, len(tokens))
        return cls(source, tokens, types or [TokenType.NORMAL] * len(tokens), metadata)

    def value(self, name: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}")

    def id_of(self, name: str) -> int | None:
        token_id = self.value(f"{name}_token_id")
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise TokenizerError(
                f"{self.source}: tokenizer.ggml.{name}_token_id is {str(token_id)[:80]}, the vocabulary has "
                f"{len(self.tokens)} tokens: {_WHAT_TO_DO}"
            )
        return token_id

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Every token that ends a turn or the text."""
        named = [self.id_of(name) for name in ("eos", "eot", "eom")]
        known = [i for i in self._ids_of_types(TokenType.CONTROL) if self.tokens[i] in _END_TOKENS]
        return frozenset(token_id for token_id in (*named, *known) if token_id is not None)

    def build(self) -> tokenizers.Tokenizer:
        model = self.value("model")
        if model == "gpt2":
            backend, adds_bos = self._build_byte_level()
        elif model == "llama":
            backend, adds_bos = self._build_sentencepiece(), True
        else:
            raise TokenizerError(
                f"{self.source}: tokenizer.ggml.model is {str(model)[:80]!r}, Quire reads 'gpt2' and 'llama': "
                "pass tokenizer=DIRECTORY with the model's tokenizer.json"
            )
        self._add_whole_tokens(backend)
        flags = (self.value("add_bos_token"), self.value("add_eos_token"))
        wanted = (adds_bos if flags[0] is None else bool(flags[0]), bool(flags[1]))
        ends = [self.id_of(name) if want else None for name, want in zip(("bos", "eos"), wanted, strict=True)]
        add_ends(backend, bos_token_id=ends[0], eos_token_id=ends[1])
        return backend

    def _build_byte_level(self) -> tuple[tokenizers.Tokenizer, bool]:
        from tokenizers import Tokenizer, decoders, normalizers

        rule = pretokenizing(str(self.value("pre") or "default")[:80], self.source)
        lines = _list(self.metadata, "merges", str, self.source)
        if lines is None:
            raise TokenizerError(f"{self.source}: no tokenizer.ggml.merges, which byte-level BPE needs: {_WHAT_TO_DO}")
        merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
        backend = Tokenizer(self._bpe(merges, ignore_merges=rule.ignore_merges))
        if rule.composes:
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizer(rule)
        backend.decoder = decoders.ByteLevel()
        return backend, rule.adds_bos

    def _build_sentencepiece(self) -> tokenizers.Tokenizer:
        from tokenizers import Tokenizer, decoders, normalizers

        unknown = self.id_of("unknown")
        adds_space = self.value("add_space_prefix")
        adds_space = True if adds_space is None else bool(adds_space)
        backend = Tokenizer(
            self._bpe(
                self._merges_by_score(),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        replace = normalizers.Replace(" ", _SPACE)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if adds_space else replace
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace(_SPACE, " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                *([decoders.Strip(" ", 1, 0)] if adds_space else []),
            ]
        )
        return backend

    def _bpe(self, merges: list[tuple[str, str]], **options: Any) -> Any:
        from tokenizers import models

        vocab = {token: token_id for token_id, token in enumerate(self.tokens)}
        try:
            return models.BPE(vocab=vocab, merges=merges, **options)
        except Exception as error:  # `tokenizers` raises nothing narrower
            raise TokenizerError(
                f"{self.source}: tokens and merges do not fit together ({str(error)[:200]}): {_WHAT_TO_DO}"
            ) from error

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """SentencePiece joins whichever neighbours make the piece of the highest score: as merges, in that order."""
        scores = _list(self.metadata, "scores", Real, self.source, len(self.tokens))
        if scores is None:
            raise TokenizerError(f"{self.source}: no tokenizer.ggml.scores, which SentencePiece needs: {_WHAT_TO_DO}")
        ids = {self.tokens[i]: i for i in self._ids_of_types(TokenType.NORMAL, TokenType.USER_DEFINED)}
        merges: list[tuple[str, str]] = []
        for piece in sorted(ids, key=lambda piece: -scores[ids[piece]]):
            cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in ids and piece[i:] in ids]
            if len(cuts) > 1:  # cuts of one piece have one score: order them as published tokenizer.json files do
                cuts.sort(key=lambda cut: (ids[cut[0]], ids[cut[1]]))
            merges += cuts
        return merges

    def _add_whole_tokens(self, backend: tokenizers.Tokenizer) -> None:
        """Tokens that text may name and that are then matched whole, before any merging."""
        from tokenizers import AddedToken

        named = {i for name in ("bos", "eos", "eot", "eom") if (i := self.id_of(name)) is not None}
        special = named.union(self._ids_of_types(TokenType.CONTROL, TokenType.UNKNOWN))
        whole = special.union(self._ids_of_types(TokenType.USER_DEFINED))
        backend.add_tokens(
            [
                AddedToken(token, normalized=False, special=token_id in special)
                for token_id in sorted(whole)
                if (token := self.tokens[token_id])
            ]
        )

    def _ids_of_types(self, *types: TokenType) -> list[int]:
        wanted = frozenset(map(int, types))
        return [token_id for token_id, kind in enumerate(self.types) if kind in wanted]


def _list(
    metadata: Mapping[str, Any], name: str, kind: type, source: str, length: int | None = None
) -> list[Any] | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return None
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
        raise TokenizerError(f"{source}: tokenizer.ggml.{name} is not the list it should be: {_WHAT_TO_DO}")
    if length is not None and len(items) != length:
        raise TokenizerError(
            f"{source}: tokenizer.ggml.{name} has {len(items)} entries for {length} tokens: {_WHAT_TO_DO}"
        )
    return items
