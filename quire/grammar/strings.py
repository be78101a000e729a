"""Masks inside JSON strings of bounded length, without a look at each token.

Where a string has room for n more characters, a token of plain characters (no quote, backslash or control character)
may come next if it has at most n of them. The grammar library finds that out token by token where n is smaller than the
longer tokens are, which takes it up to two milliseconds for a mask over 128,256 tokens.

So a second matcher follows the same text over a vocabulary of its own: the tokens that are not plain, one token for
each byte, by which it is told of the plain ones, and probes, which are plain texts of 1, 2, 3 ... characters. Its mask
says which of the first may come next, the number of probes in it is n, and the plain tokens of at most n characters are
a mask that was made beforehand. Where no probe is allowed the library has to look at each token after all: outside of
strings, behind a backslash, within a character of several bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quire.grammar.lowering import WHITESPACE

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Words = npt.NDArray[np.int32]  # bits, one for each token

_MAX_LENGTH = 64  # characters of a plain token. Longer ones are few, and are looked at one by one
_PLAIN = re.compile(r'[^"\\\x00-\x1F\x7F]+')
_PROBE = "\u2042"  # three bytes, none of which another character begins with
_NO_STRINGS = ("null", "boolean", "integer", "number")


class StringVocabulary:
    """The vocabulary of the second matchers, and masks of the plain tokens by their length."""

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], ends: list[int]) -> None:
        """tokens: the bytes of each token of the model's vocabulary."""
        self._tokens = tokens
        self._num_words = -(-len(tokens) // 32)
        lengths = np.array([_plain_length(text) for text in tokens], dtype=np.int32)
        lengths[special_token_ids] = 0
        self._is_plain: list[bool] = (lengths > 0).tolist()
        self._by_length = _masks_by_length(lengths, self._num_words)  # [1 + _MAX_LENGTH, words]
        # A token without bytes is allowed nowhere.
        kept = [b"" if plain else text for text, plain in zip(tokens, self._is_plain, strict=True)]
        kept += [b""] * (32 * self._num_words - len(tokens))
        probes = [(_PROBE * length).encode() for length in range(1, _MAX_LENGTH + 1)]
        self.first_probe, self._first_byte = len(kept), len(kept) + len(probes)
        self.tokens = [*kept, *probes, *(bytes((byte,)) for byte in range(256))]
        self.num_words = len(self.tokens) // 32
        self.special_token_ids = special_token_ids
        self.bos_token_id, self.eos_token_id = None, ends[0]
        self._ends = ends

    def __call__(self, text: str) -> list[int]:
        """What the library takes for the canonical tokens of a text."""
        return [self._first_byte + byte for byte in text.encode()]

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        # The library would look first whether a string may take all of some sets of tokens, and has none of these here.
        return LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=self._ends, slices=[])

    def ids_of(self, token: int) -> list[int]:
        """A token of the model's vocabulary in tokens of this one."""
        if not self._is_plain[token]:
            return [token]
        return [self._first_byte + byte for byte in self._tokens[token]]

    def complete(self, masks: Words, into: Sequence[Words]) -> list[bool]:
        """From the masks of second matchers ([rows, num_words]) make those over the model's vocabulary (of each row
        [words]). Returns which of the rows stand in a string: the masks of the others are not made."""
        probes = masks[:, self._num_words : self._num_words + _MAX_LENGTH // 32]
        lengths = np.unpackbits(probes.view(np.uint8), axis=1).sum(axis=1).tolist()
        for mask, length, whole in zip(masks, lengths, into, strict=True):
            if length:
                np.bitwise_or(mask[: self._num_words], self._by_length[length], out=whole)
        return [length > 0 for length in lengths]


def _plain_length(text: bytes) -> int:
    """How many characters a token has that any string may have; 0 where it has others, or parts of characters."""
    if len(text) > 4 * _MAX_LENGTH:
        return 0
    try:
        chars = text.decode()
    except UnicodeDecodeError:
        return 0
    return len(chars) if len(chars) <= _MAX_LENGTH and _PLAIN.fullmatch(chars) else 0


def _masks_by_length(lengths: npt.NDArray[np.int32], num_words: int) -> Words:
    masks = np.zeros((1 + _MAX_LENGTH, num_words), dtype=np.int32)
    bits = np.zeros(32 * num_words, dtype=bool)
    for length in range(1, _MAX_LENGTH + 1):
        bits[np.flatnonzero(lengths == length)] = True
        masks[length] = np.packbits(bits, bitorder="little").view(np.int32)
    return masks


class StringMatcher:
    """The second matcher of a sequence."""

    __slots__ = ("matcher", "vocabulary")

    def __init__(self, matcher: LLMatcher, vocabulary: StringVocabulary) -> None:
        self.matcher, self.vocabulary = matcher, vocabulary

    def copy(self) -> StringMatcher:
        return StringMatcher(self.matcher.deep_copy(), self.vocabulary)

    def is_in_string(self) -> bool:
        """Whether a plain character may come next."""
        return bool(self.matcher.validate_tokens([self.vocabulary.first_probe]))

    def follow(self, token: int) -> bool:
        """The text has this token now, which the grammar allows. False: the matcher ran out of its means."""
        return bool(self.matcher.consume_tokens(self.vocabulary.ids_of(token)))


def bounds_plain_strings(grammar: str) -> bool:
    """Whether a grammar has strings of bounded length, and in none of its strings a plain token's length says too
    little.

    That is so where each string is either a literal (`enum`, `const`, a property's name) or any text with a length,
    and nowhere both are possible at once, as in a union of them.
    """
    grammars = json.loads(grammar)["grammars"]
    schema = grammars[0].get("json_schema")
    if len(grammars) > 1 or not isinstance(schema, dict) or _PROBE in grammar or "\\u2042" in grammar:
        return False
    options = schema.get("x-guidance", {})
    if options.get("whitespace_flexible") and options.get("whitespace_pattern") != WHITESPACE:
        return False
    parts = list(_schemas(schema))
    if any(name in part for part in parts for name in ("pattern", "patternProperties", "format")):
        return False
    has_literals = any("enum" in part or "const" in part for part in parts)
    if has_literals and any(_may_mix(part.get(name, ())) for part in parts for name in ("anyOf", "oneOf")):
        return False
    return any("maxLength" in part for part in parts)


def _schemas(schema: Any) -> Iterable[dict[str, Any]]:
    """A schema and all within it, and some of their data, which is taken for schemas too."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            yield part
            todo += part.values()
        elif isinstance(part, list):
            todo += part


def _may_mix(branches: Iterable[Any]) -> bool:
    """Whether more than one branch of a union may have strings in it."""
    texts = [one for one in branches if not isinstance(one, dict) or one.get("type") not in _NO_STRINGS]
    return len(texts) > 1
