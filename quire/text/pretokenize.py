"""How byte-level vocabularies cut text into words before merging, under the names that GGUF files use.

A vocabulary only works with the cutting that it was trained with, so an unknown name is refused rather than guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.errors import TokenizerError

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.pre_tokenizers import PreTokenizer

_ANY_CASE_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_DIGIT = r"\p{N}"


def _words_and_numbers(number: str) -> str:
    """The cl100k family's pattern; its members differ in how many digits stay together."""
    return (
        rf"{_ANY_CASE_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
    )


def _words_by_case(number: str, contraction: str) -> str:
    """The o200k family's pattern: a word ends where lower case turns to upper case."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contraction}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contraction}"
        rf"|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
    )


@dataclass(slots=True, frozen=True)
class Pretokenizing:
    """Patterns, applied one after the other to the pieces the last one left, and what goes with them."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    adds_bos: bool = False  # unless the file says otherwise
    composes: bool = False  # text is normalized to NFC first


_DIGITS_APART = Pretokenizing((_DIGIT, _GPT2))
_PLAIN_GPT2 = Pretokenizing((_GPT2,))
_LLAMA3 = Pretokenizing((_words_and_numbers(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True)
_QWEN2 = Pretokenizing((_words_and_numbers(_DIGIT),), composes=True)

PRETOKENIZING: dict[str, Pretokenizing] = {
    "default": Pretokenizing((r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN_GPT2,
    "olmo": _PLAIN_GPT2,
    "mpt": _PLAIN_GPT2,
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "command-r": _DIGITS_APART,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": Pretokenizing(_LLAMA3.patterns),
    "dbrx": Pretokenizing(_LLAMA3.patterns),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": Pretokenizing(_QWEN2.patterns),
    "tekken": Pretokenizing((_words_by_case(_DIGIT, ""),), ignore_merges=True, adds_bos=True),
    "gpt-4o": Pretokenizing((_words_by_case(r"\p{N}{1,3}", f"{_ANY_CASE_CONTRACTION}?"),)),
}


def pretokenizing(name: str, source: str) -> Pretokenizing:
    """The entry of that name, or a TokenizerError that names it."""
    found = PRETOKENIZING.get(name)
    if found is None:
        raise TokenizerError(
            f"{source}: tokenizer.ggml.pre is {name!r}, a way of cutting words that Quire does not know "
            f"(known: {', '.join(sorted(PRETOKENIZING))}): use the model's safetensors directory with its "
            "tokenizer.json, or pass tokenizer=DIRECTORY"
        )
    return found


def pre_tokenizer(rule: Pretokenizing) -> PreTokenizer:
    """The rule as `tokenizers` runs it, with the byte-level alphabet at its end."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    cuts = [Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])


# -- the tokens that encoding adds around a text


def add_ends(backend: tokenizers.Tokenizer, *, bos_token_id: int | None, eos_token_id: int | None) -> None:
    """Makes `encode` begin every text with the one and end it with the other; None adds nothing."""
    from tokenizers.processors import TemplateProcessing

    ids = {"bos": bos_token_id, "eos": eos_token_id}
    # The template goes by names of ours, because a token's own text may hold characters that templates give a meaning.
    special = [
        {"id": name, "ids": [token_id], "tokens": [backend.id_to_token(token_id)]}
        for name, token_id in ids.items()
        if token_id is not None
    ]
    single = [*(["bos"] if bos_token_id is not None else []), "$A", *(["eos"] if eos_token_id is not None else [])]
    backend.post_processor = TemplateProcessing(single=single, special_tokens=special)
