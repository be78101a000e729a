from __future__ import annotations

import pytest
import tokenizers
from tokenizers import models

from quire.errors import TokenizerError
from quire.text.pretokenize import PRETOKENIZING, add_ends, pre_tokenizer, pretokenizing


def cut(name: str, text: str) -> list[str]:
    parts = pre_tokenizer(pretokenizing(name, "file.gguf")).pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in parts]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["It", "'s", " 12345", " O", "'", "CLOCK", "...", "\n\n", " HelloWorld"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " O", "'", "CLOCK", "...", "\n\n", " HelloWorld"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " O", "'CLOCK", "...\n\n", " HelloWorld"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " O", "'CLOCK", "...\n\n", " HelloWorld"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", "5", " O", "'CLOCK", "...\n\n", " Hello", "World"]),
        ("gpt-4o", ["It's", " ", "123", "45", " O", "'CLOCK", "...\n\n", " Hello", "World"]),
        ("default", ["It", "'", "s", " ", "123", "45", " O", "'", "CLOCK", "...", "\n\n", " HelloWorld"]),
    ],
)
def test_words_are_cut_as_the_vocabulary_was_trained(name: str, expected: list[str]) -> None:
    assert cut(name, "It's 12345 O'CLOCK...\n\n HelloWorld") == expected


@pytest.mark.parametrize("name", sorted(PRETOKENIZING))
def test_no_text_is_lost(name: str) -> None:
    text = "  A1b2  ½ é e\u0301 你好!!\t\r\n\n x's X'LL 😀 ___ "
    assert "".join(cut(name, text)) == text


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match=r"file\.gguf.*'deepseek-llm'.*llama-bpe.*tokenizer=DIRECTORY"):
        pretokenizing("deepseek-llm", "file.gguf")


def test_tokens_with_template_characters_are_added_as_they_are() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "$b:1 x": 1, "": 2}, unk_token="a"))
    add_ends(backend, bos_token_id=1, eos_token_id=2)
    assert backend.encode("a").ids == [1, 0, 2]
    add_ends(backend, bos_token_id=None, eos_token_id=None)
    assert backend.encode("a").ids == [0]
