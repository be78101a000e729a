from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from quire.errors import TokenizerError
from quire.text import Tokenizer
from quire.text.token_bytes import byte_of_char, decode_rule


def with_decoder(decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    return backend


@given(ids=st.lists(st.integers(0, 760), max_size=40), skip=st.booleans())
def test_byte_level_decoding_is_exactly_tokenizers_decoding(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    expected = byte_level.backend.decode(ids, skip_special_tokens=skip)
    assert byte_level.decode(ids, skip_special_tokens=skip) == expected


@given(data=st.binary(max_size=12))
def test_any_bytes_decode_as_tokenizers_decodes_them(byte_level: Tokenizer, data: bytes) -> None:
    chars = {byte: char for char, byte in byte_of_char().items()}
    ids = [byte_level.backend.token_to_id(chars[byte]) for byte in data]
    assert byte_level.decode(ids) == byte_level.backend.decode(ids)


@given(text=st.text(max_size=40), skip=st.booleans())
def test_sentencepiece_decoding_is_tokenizers_decoding_of_any_text(
    sentencepiece: Tokenizer, text: str, skip: bool
) -> None:
    ids = sentencepiece.encode(text)
    expected = sentencepiece.backend.decode(ids, skip_special_tokens=skip)
    assert sentencepiece.decode(ids, skip_special_tokens=skip) == expected


def test_a_broken_byte_does_not_take_the_characters_before_it_along(sentencepiece: Tokenizer) -> None:
    ids = [sentencepiece.backend.token_to_id(f"<0x{b:02X}>") for b in ("你".encode() + b"\xff")]
    assert sentencepiece.decode(ids) == "你\ufffd"


def test_alphabet_is_the_one_of_tokenizers() -> None:
    assert set(byte_of_char()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_of_char().values()) == list(range(256))


def test_added_tokens_of_other_scripts_are_themselves() -> None:
    backend = with_decoder(decoders.ByteLevel())
    backend.add_tokens([AddedToken("你好 x")])
    tokenizer = Tokenizer(backend, source="t", vocab_size=2, named_token_ids={})
    assert tokenizer.decode([1]) == "你好 x" == backend.decode([1])


def test_words_are_joined_by_spaces(words: Tokenizer) -> None:
    assert words.decode([0, 1, 1, 2, 0]) == "a b b a" == words.backend.decode([0, 1, 1, 2, 0])
    assert words.decode([2, 0, 2], skip_special_tokens=False) == "<end> a <end>"
    assert words.decode([2, 0, 2], skip_special_tokens=False, spaces_between_special_tokens=False) == "<end>a<end>"


def test_byte_tokens_are_text_where_the_decoder_has_no_byte_fallback() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<0x41>": 0}, unk_token="<0x41>"))
    backend.decoder = decoders.Fuse()
    tokenizer = Tokenizer(backend, source="t", vocab_size=1, named_token_ids={})
    assert tokenizer.decode([0]) == "<0x41>" == backend.decode([0])


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace(scheme: str) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"▁a": 0, "b": 1}, unk_token="b"))
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = Tokenizer(backend, source="t", vocab_size=2, named_token_ids={})
    assert tokenizer.decode([0, 1, 0]) == backend.decode([0, 1, 0])


def test_word_pieces() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"play": 0, "##ing": 1, "a": 2}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend, source="t", vocab_size=3, named_token_ids={})
    assert tokenizer.decode([2, 0, 1, 2]) == "a playing a" == backend.decode([2, 0, 1, 2])


@pytest.mark.parametrize("decoder", [decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]), decoders.CTC()])
def test_other_decoders_are_refused_by_name(decoder: decoders.Decoder) -> None:
    with pytest.raises(TokenizerError, match=r"file\.json: the decoder (Strip|CTC)"):
        decode_rule(with_decoder(decoder), "file.json")


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**70])
def test_ids_that_no_token_has_are_nothing_and_not_remembered(byte_level: Tokenizer, token_id: int) -> None:
    assert byte_level.decode([token_id]) == ""
    assert token_id not in byte_level.token_bytes_table(skip_special_tokens=True)
