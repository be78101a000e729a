from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from quire.errors import BadRequestError, TokenizerError
from quire.text import ChatTemplate, Tokenizer
from quire.weights import open_checkpoint


def test_importing_is_cheap() -> None:
    code = "import sys, quire.text; print(sorted({'torch', 'tokenizers', 'jinja2', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_named_tokens(byte_level: Tokenizer) -> None:
    assert (byte_level.bos_token_id, byte_level.eos_token_id, byte_level.pad_token_id) == (1, 2, 2)
    assert (byte_level.bos_token, byte_level.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (byte_level.pad_token, byte_level.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert byte_level.token(1) == "<|im_start|>"
    assert byte_level.token(10**6) == byte_level.token(-1) == ""


def test_token_bytes_may_be_part_of_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("한", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(t) for t in ids).endswith("한".encode())
    assert tokenizer.token_bytes(ids[-1]) == "한".encode()[-1:]


def test_a_batch_is_encoded_as_each_alone(tokenizer: Tokenizer) -> None:
    texts = ["hello", "", "你好 😀"]
    for add in (True, False):
        alone = [tokenizer.encode(text, add_special_tokens=add) for text in texts]
        assert tokenizer.encode_batch(texts, add_special_tokens=add) == alone


@pytest.mark.parametrize("bad", ["a\ud800b", 3, None])
def test_what_is_no_text_is_refused(byte_level: Tokenizer, bad: object) -> None:
    with pytest.raises(BadRequestError, match=r"lone surrogate|must be a string") as caught:
        byte_level.encode(bad)
    assert caught.value.param == "prompt"
    with pytest.raises(BadRequestError, match=r"lone surrogate|must be a string"):
        byte_level.encode_batch(["fine", bad])


def test_phrases_are_found_at_and_inside_words(tokenizer: Tokenizer) -> None:
    for phrase in ("bad", " bad word", "你好", "\n"):
        texts = {tokenizer.decode(ids) for ids in map(list, tokenizer.ids_for_phrase(phrase))}
        raw = {b"".join(map(tokenizer.token_bytes, ids)).decode() for ids in tokenizer.ids_for_phrase(phrase)}
        stripped = phrase.strip(" ")
        assert {f" {stripped}", stripped} <= raw, phrase
        assert stripped in texts


def test_fit_with_the_embedding(byte_level: Tokenizer) -> None:
    byte_level.check_fits(byte_level.vocab_size, "model.gguf")
    byte_level.check_fits(byte_level.vocab_size + 100, "model.gguf")  # padded embeddings are common
    with pytest.raises(TokenizerError, match=r"model\.gguf: .* has 100 rows.*byte-level\.gguf has \d+ tokens"):
        byte_level.check_fits(100, "model.gguf")


def test_added_tokens_may_lie_beyond_the_embedding_but_not_eos(words: Tokenizer) -> None:
    backend = words.backend
    backend.add_tokens(["<image>"])
    tokenizer = Tokenizer(backend, source="words", vocab_size=4, named_token_ids={"eos": 2})
    tokenizer.check_fits(3, "model")
    with pytest.raises(TokenizerError, match="'<image>' as token 3"):
        Tokenizer(backend, source="words", vocab_size=4, named_token_ids={"eos": 3}).check_fits(3, "model")


@pytest.mark.model
def test_the_default_model_tokenizes_as_published(smollm2: Path) -> None:
    from quire.weights import open_checkpoint

    tokenizer = Tokenizer.from_gguf(open_checkpoint(smollm2).gguf_metadata, str(smollm2))
    text = ChatTemplate(None, tokenizer).render([{"role": "user", "content": "Hi 2024"}])
    # fmt: off
    expected = [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
        198, 1, 4093, 198, 26843, 216, 34, 32, 34, 36, 2, 198, 1, 520, 9531, 198,
    ]
    # fmt: on
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == expected
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    tokenizer.check_fits(49152, "smollm2")


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    text = "some words, and 12 numbers; " * 40_000
    started, done = time.monotonic(), threading.Event()
    thread = threading.Thread(target=lambda: (tokenizer.encode(text), done.set()))
    thread.start()
    longest_s, last_s = 0.0, started
    while not done.is_set():
        time.sleep(0.001)
        longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
    thread.join()
    assert longest_s < max(0.5 * (last_s - started), 0.05)  # the whole time, if it kept the interpreter to itself


def test_long_texts_are_encoded_as_short_ones(tokenizer: Tokenizer) -> None:
    word = "word "
    assert tokenizer.encode(word * 1_000) == tokenizer.encode_batch([word * 1_000])[0]
    assert len(tokenizer.encode(word * 1_000)) > 900


@pytest.mark.model
def test_the_default_models_tokenizer_under_attack(smollm2: Path) -> None:
    """4 MiB of text, which took seconds and a gigabyte: refused in a fraction of them."""
    tokenizer = Tokenizer.from_gguf(open_checkpoint(smollm2).gguf_metadata or {}, str(smollm2))
    for text in (" " * 500_000 + "1a.2b," * 600_000, " " * 300_000 + "1a.2b," * 55_000):
        started_s = time.process_time()
        with pytest.raises(BadRequestError, match=r"characters.*[Ss]horten it"):
            tokenizer.encode(text, at_most=8_192)
        assert time.process_time() - started_s < 2.0


def test_a_text_that_is_far_too_long_is_refused_without_reading_it_all(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "one two three, " * 5_000
    num_tokens = len(tokenizer.encode(text))
    assert len(tokenizer.encode(text, at_most=num_tokens)) == num_tokens
    assert len(tokenizer.encode(text, at_most=num_tokens - 1)) == num_tokens  # the caller knows what to say
    num_chars: list[int] = []
    encode_batch = Tokenizer.encode_batch

    def watched(self: Tokenizer, texts: list[str], **options: Any) -> list[list[int]]:
        num_chars.append(len(texts[0]))
        return encode_batch(self, texts, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", watched)
    with pytest.raises(BadRequestError, match="has 75,000 characters, and no token has more than") as refused:
        tokenizer.encode(text, at_most=100)
    assert refused.value.param == "prompt" and not num_chars  # by its characters alone
    # It begins with long tokens, and then almost every character is one.
    with pytest.raises(BadRequestError, match="length is 20000 tokens"):
        tokenizer.encode("one two three, " * 10_000 + "1a.2b," * 40_000, at_most=20_000)
    assert max(num_chars) <= 65_536 and sum(num_chars) < 390_000
