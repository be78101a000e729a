"""Small real vocabularies as GGUF metadata: byte-level BPE trained on many scripts, and a SentencePiece-like one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import settings
from tokenizers import decoders, models, pre_tokenizers, trainers

from quire.text import Tokenizer

# Time limits per example fail on busy machines and say nothing here.
settings.register_profile("text", deadline=None)
settings.load_profile("text")

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog, in 2024, didn't mind; it's used to that.",
    "hello hello there, hello world! user assistant system bad word badly worded",
    "def main():\n    return 42\n\n\nif x == 3:\n\tprint('yes')\n",
    "Zażółć gęślą jaźń. Größe, naïve café, e\u0301a\u0308o\u0302 (combining).",
    "你好世界，今天天气很好。日本語の文章です。한국어 문장입니다.",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם. नमस्ते दुनिया। สวัสดีชาวโลก",
    "😀😃😄 👩‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷 ❤️ 🏳️‍🌈 emoji 😀 after 😃 emoji",
] * 4

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def byte_level_gguf() -> dict[str, Any]:
    """A trained byte-level vocabulary under GGUF's names."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=CONTROL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*tokens, "<tool>"],
        "tokenizer.ggml.token_type": [3 if t in CONTROL else 1 for t in tokens] + [4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


@pytest.fixture(scope="session")
def sentencepiece_gguf() -> dict[str, Any]:
    """A SentencePiece-like vocabulary under GGUF's names: bytes, then pieces with the score -rank, then characters.

    It lacks emoji and Hangul, so those go through byte tokens.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False)
    lines = ["".join(c for c in line if c < "\uac00" and c not in "\n\t") for line in CORPUS]
    backend.train_from_iterator(lines, trainer)
    model = json.loads(backend.to_str())["model"]
    merged = list(dict.fromkeys("".join(merge) for merge in model["merges"]))
    characters = sorted(t for t in model["vocab"] if len(t) == 1)
    head = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    tokens = [*head, *merged, *characters, "[INST]"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(characters)) + [4],
        "tokenizer.ggml.scores": [0.0] * len(head) + [-float(i) for i in range(len(tokens) - len(head))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def byte_level(byte_level_gguf: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_gguf, "byte-level.gguf")


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_gguf: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_gguf, "sentencepiece.gguf")


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each kind in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    """A vocabulary of words, joined by spaces, as toy models have."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="a"))
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, source="words", vocab_size=3, named_token_ids={"eos": 2})


@pytest.fixture
def hf_directory(byte_level_gguf: dict[str, Any], tmp_path):
    """The byte-level vocabulary as a Hugging Face directory."""
    backend = Tokenizer.from_gguf(byte_level_gguf, "x").backend
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path
