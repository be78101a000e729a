from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.errors import TokenizerError
from quire.text import Tokenizer


def configure(directory: Path, **values: Any) -> None:
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_directory_gives_what_the_gguf_file_gives(hf_directory: Path, byte_level: Tokenizer) -> None:
    tokenizer = Tokenizer.from_directory(hf_directory)
    text = "<|im_start|>user\nhello 你好 😀 2024<|im_end|>"
    assert tokenizer.encode(text) == byte_level.encode(text)
    assert tokenizer.vocab_size == byte_level.vocab_size
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>", None)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, None)
    assert tokenizer.special_token_ids == byte_level.special_token_ids
    assert tokenizer.chat_template == byte_level.chat_template


def test_special_tokens_map_fills_in(hf_directory: Path) -> None:
    (hf_directory / "tokenizer_config.json").unlink()
    (hf_directory / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert Tokenizer.from_directory(hf_directory).eos_token_id == 0


def test_flags_decide_what_encoding_adds(hf_directory: Path) -> None:
    assert Tokenizer.from_directory(hf_directory).encode("") == []
    configure(hf_directory, add_bos_token=True, add_eos_token=True)
    assert Tokenizer.from_directory(hf_directory).encode("") == [1, 2]


def test_tokens_that_the_configuration_calls_special_are(hf_directory: Path) -> None:
    configure(hf_directory, additional_special_tokens=["<tool>", "<not-in-the-vocabulary>"])
    tokenizer = Tokenizer.from_directory(hf_directory)
    assert tokenizer.vocab_size - 1 in tokenizer.special_token_ids
    assert tokenizer.decode(tokenizer.encode("a<tool>b")) == "ab"


def test_truncation_and_padding_of_the_file_do_not_reach_prompts(hf_directory: Path, byte_level: Tokenizer) -> None:
    file = hf_directory / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    file.write_text(json.dumps(content))
    assert Tokenizer.from_directory(hf_directory).encode("hello there world") == byte_level.encode("hello there world")


@pytest.mark.parametrize("source", ["jinja", "json", "list", "one-named"])
def test_chat_template_places(hf_directory: Path, source: str) -> None:
    if source == "jinja":
        (hf_directory / "chat_template.jinja").write_text("{{ 'found' }}")
    elif source == "json":
        (hf_directory / "chat_template.json").write_text('{"chat_template": "{{ \'found\' }}"}')
    elif source == "list":
        named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ 'found' }}"}]
        configure(hf_directory, chat_template=named)
    else:
        configure(hf_directory, chat_template=[{"name": "rag", "template": "{{ 'found' }}"}])
    assert Tokenizer.from_directory(hf_directory).chat_template == "{{ 'found' }}"


def test_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing: download it"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model alone is not enough.*save_pretrained"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", r"tokenizer\.json cannot be read .*download it again"),
        ("tokenizer.json", b"\xff\xfe", r"tokenizer\.json cannot be read .*download it again"),
        ("tokenizer_config.json", b"{", r"tokenizer_config\.json is not JSON"),
        ("tokenizer_config.json", b"[1]", r"tokenizer_config\.json holds a list"),
        ("tokenizer_config.json", b'{"x": "\xff"}', r"tokenizer_config\.json cannot be read"),
        ("tokenizer_config.json", b'{"eos_token": "<nope>"}', r"eos_token is '<nope>', which tokenizer\.json does not"),
        ("tokenizer_config.json", b'{"chat_template": 3}', r"chat_template must be a string or a list"),
    ],
)
def test_broken_files_are_named(hf_directory: Path, name: str, content: bytes, message: str) -> None:
    (hf_directory / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_directory(hf_directory)
