"""The facade against transformers' own tokenizer of the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from quire.errors import BadRequestError, TokenizerError
from quire.text import HFTokenizerFacade, Tokenizer

transformers = pytest.importorskip("transformers")

TEXTS = ["hello world", "", "Zażółć 你好 😀", "<|im_start|>user\nhi<|im_end|>", "  two  spaces ", "<tool>x"]
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi <b>& you</b>"},
    {"role": "assistant", "content": "Hello"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "größe", "parameters": {}}}]
WITH_TOOLS = "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}{{ thinking }}"


@pytest.fixture(scope="module", params=["plain", "tiny", "more special tokens", "bos around"])
def pair(
    request: pytest.FixtureRequest,
    byte_level_gguf: dict[str, Any],
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[HFTokenizerFacade, Any]:
    """The facade and transformers' tokenizer of one directory."""
    path = tiny_model
    if request.param != "tiny":
        path = tmp_path_factory.mktemp("hf")
        backend = Tokenizer.from_gguf(byte_level_gguf, "x").backend
        config: dict[str, Any] = json.loads((tiny_model / "tokenizer_config.json").read_text())
        config |= {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}
        if request.param == "more special tokens":
            backend.add_special_tokens(["<|unlisted|>", "<|listed|>"])
            config |= {"pad_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
            config["additional_special_tokens"] = ["<|listed|>"]
        if request.param == "bos around":
            backend.post_processor = _bos_first(backend)
        backend.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    return HFTokenizerFacade(Tokenizer.from_directory(path)), theirs


def _bos_first(backend: Backend) -> Any:
    from tokenizers.processors import TemplateProcessing

    token = "<|im_start|>"
    return TemplateProcessing(single=f"{token} $A", special_tokens=[(token, backend.token_to_id(token))])


@pytest.fixture(scope="module")
def facade(byte_level: Tokenizer) -> HFTokenizerFacade:
    return HFTokenizerFacade(byte_level)


def test_calling_and_encoding_are_theirs(pair: tuple[HFTokenizerFacade, Any]) -> None:
    ours, theirs = pair
    for add in (True, False):
        for text in TEXTS:
            expected = theirs(text, add_special_tokens=add)
            found = ours(text, add_special_tokens=add)
            assert found["input_ids"] == found.input_ids == expected["input_ids"]
            assert found["attention_mask"] == found.attention_mask == expected["attention_mask"]
            assert ours.encode(text, add_special_tokens=add) == theirs.encode(text, add_special_tokens=add)
            assert ours.tokenize(text, add_special_tokens=add) == theirs.tokenize(text, add_special_tokens=add)
        assert dict(ours(TEXTS, add_special_tokens=add)) == {
            name: theirs(TEXTS, add_special_tokens=add)[name] for name in ("input_ids", "attention_mask")
        }
    assert ours("hello") == {name: theirs("hello")[name] for name in ("input_ids", "attention_mask")}  # the defaults
    assert ours.encode("hello") == theirs.encode("hello")
    assert ours.tokenize("hello") == theirs.tokenize("hello")
    assert set(ours("hello", return_attention_mask=False)) == {"input_ids"}
    assert not hasattr(ours("hello", return_attention_mask=False), "attention_mask")


def test_decoding_is_theirs(pair: tuple[HFTokenizerFacade, Any]) -> None:
    ours, theirs = pair
    rows = [theirs.encode(text) for text in TEXTS]
    for row in rows:
        assert ours.decode(row) == theirs.decode(row)
        assert ours.decode(np.array(row, dtype=np.int64)) == theirs.decode(row)
        assert ours.decode(row, skip_special_tokens=True) == theirs.decode(row, skip_special_tokens=True)
    assert "<|" in ours.decode(theirs.encode(f"{theirs.bos_token}hi"))  # special tokens show by default
    assert ours.batch_decode(rows) == theirs.batch_decode(rows)
    assert ours.batch_decode(rows, skip_special_tokens=True) == theirs.batch_decode(rows, skip_special_tokens=True)
    assert ours.decode(theirs.eos_token_id) == theirs.decode(theirs.eos_token_id)
    assert ours.decode([10**6]) == theirs.decode([10**6])


@given(token_ids=st.lists(st.integers(0, 720)))
def test_any_ids_decode_as_theirs(pair: tuple[HFTokenizerFacade, Any], token_ids: list[int]) -> None:
    ours, theirs = pair
    assert ours.decode(token_ids) == theirs.decode(token_ids)
    assert ours.convert_ids_to_tokens(token_ids) == theirs.convert_ids_to_tokens(token_ids)


def test_the_vocabulary_is_theirs(pair: tuple[HFTokenizerFacade, Any]) -> None:
    ours, theirs = pair
    assert (len(ours), ours.vocab_size) == (len(theirs), theirs.vocab_size)
    assert ours.get_vocab() == theirs.get_vocab()
    ids = [theirs.bos_token_id, 5, theirs.eos_token_id, 10**6]
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    skipped = theirs.convert_ids_to_tokens(ids, skip_special_tokens=True)
    assert ours.convert_ids_to_tokens(ids, skip_special_tokens=True) == skipped
    assert len(skipped) == 2
    assert ours.convert_ids_to_tokens(5) == theirs.convert_ids_to_tokens(5)
    for tokens in (theirs.eos_token, "a", "no such token", [theirs.eos_token, "a", "no such token"]):
        assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "pad_token", "unk_token"])
def test_named_tokens_are_theirs(pair: tuple[HFTokenizerFacade, Any], name: str) -> None:
    ours, theirs = pair
    assert getattr(ours, name) == getattr(theirs, name)
    assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")


def test_special_tokens_are_theirs(pair: tuple[HFTokenizerFacade, Any]) -> None:
    ours, theirs = pair
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours.all_special_tokens[:2] == [ours.bos_token, ours.eos_token]


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True}, {"continue_final_message": True}])
def test_chats_are_theirs(pair: tuple[HFTokenizerFacade, Any], options: dict[str, Any]) -> None:
    ours, theirs = pair
    assert ours.chat_template == theirs.chat_template
    for chat in (CHAT, [CHAT, CHAT[1:]]):
        text = theirs.apply_chat_template(chat, tokenize=False, **options)
        assert ours.apply_chat_template(chat, tokenize=False, **options) == text
        found, expected = (t.apply_chat_template(chat, **options) for t in (ours, theirs))
        assert dict(found) == {name: expected[name] for name in ("input_ids", "attention_mask")}
        assert ours.apply_chat_template(chat, return_dict=False, **options) == expected["input_ids"]


def test_templates_tools_and_switches_are_theirs(pair: tuple[HFTokenizerFacade, Any]) -> None:
    ours, theirs = pair
    options = {"tools": TOOLS, "chat_template": WITH_TOOLS, "thinking": "yes", "tokenize": False}
    expected = theirs.apply_chat_template(CHAT, **options)
    assert "größe" in expected and expected.endswith("yes")
    assert ours.apply_chat_template(CHAT, **options) == expected


def test_tools_that_the_model_would_not_hear_of_are_refused(facade: HFTokenizerFacade) -> None:
    with pytest.raises(BadRequestError, match="never mentions tools") as refused:
        facade.apply_chat_template(CHAT, tools=TOOLS)
    assert refused.value.param == "tools"
    with pytest.raises(BadRequestError, match="JSON schemas"):
        facade.apply_chat_template(CHAT, tools=[print], chat_template=WITH_TOOLS)
    assert facade.apply_chat_template(CHAT, tools=[], tokenize=False) == facade.apply_chat_template(
        CHAT, tokenize=False
    )


@pytest.mark.parametrize(
    "options", [{"padding": True}, {"truncation": True}, {"max_length": 3}, {"return_tensors": "pt"}]
)
def test_what_is_not_done_is_refused_by_name(facade: HFTokenizerFacade, options: dict[str, Any]) -> None:
    [name] = options
    for call in (lambda: facade("a", **options), lambda: facade.encode("a", **options)):
        with pytest.raises(BadRequestError, match=name) as refused:
            call()
        assert refused.value.param == name
    with pytest.raises(BadRequestError, match=name):
        facade.apply_chat_template(CHAT, **options)


def test_options_at_their_defaults_are_taken(facade: HFTokenizerFacade) -> None:
    plain = {"padding": False, "truncation": False, "return_tensors": None, "max_length": None}
    assert facade("a", **plain) == facade("a")
    assert facade.encode("a", **plain, verbose=False) == facade.encode("a")
    assert facade.apply_chat_template(CHAT, **plain) == facade.apply_chat_template(CHAT)
    assert facade.decode([5], clean_up_tokenization_spaces=False) == facade.decode([5])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: t("a", paddding=False), "no option 'paddding'"),
        (lambda t: t("a", stride=False), "stride=False"),  # equal to 0 and yet no number
        (lambda t: t(3), "a string or a list of strings"),
        (lambda t: t([["pre", "split"]]), "a string or a list of strings"),
        (lambda t: t.encode(["a"]), "must be a string, got list"),
        (lambda t: t.decode([5], clean_up_tokenization_spaces=True), "clean_up_tokenization_spaces"),
        (lambda t: t.decode([[5], [6]]), "batch_decode takes several rows"),
        (lambda t: t.decode([-1]), "whole numbers >= 0, got -1"),
        (lambda t: t.decode("hi"), "expected a row of token ids, got str"),
        (lambda t: t.batch_decode([5, 6]), "expected a row of token ids, got int"),
        (lambda t: t.apply_chat_template(CHAT, continue_final_message="reasoning"), "must be True or False"),
        (
            lambda t: t.apply_chat_template(CHAT, continue_final_message=True, add_generation_prompt=True),
            "begins a new",
        ),
        (lambda t: t.apply_chat_template(CHAT, content_format="openai"), "content_format"),
        (lambda t: t.apply_chat_template([]), "must not be empty"),
    ],
)
def test_clear_refusals(facade: HFTokenizerFacade, call: Any, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        call(facade)


def test_nothing_can_be_set_on_it(facade: HFTokenizerFacade) -> None:
    for name in ("chat_template", "pad_token", "padding_side"):
        with pytest.raises(AttributeError, match=name):
            setattr(facade, name, "x")


def test_the_users_template_goes_over_the_models(byte_level: Tokenizer) -> None:
    facade = HFTokenizerFacade(byte_level, "{{ messages[0].content }}!")
    assert facade.apply_chat_template(CHAT, tokenize=False) == "Be kind.!"
    assert facade.chat_template == "{{ messages[0].content }}!"


def test_a_template_may_be_named(byte_level: Tokenizer) -> None:
    templates = {"default": "plain", "rag": "{{ documents[0] }}"}
    tokenizer = Tokenizer(byte_level.backend, source="x", vocab_size=10, named_token_ids={}, chat_templates=templates)
    facade = HFTokenizerFacade(tokenizer)
    chat = facade.apply_chat_template(CHAT, chat_template="rag", documents=["one"], tokenize=False)
    assert chat == "one"
    with pytest.raises(TokenizerError, match="neither a template"):
        facade.apply_chat_template(CHAT, chat_template="other")


def test_without_a_template_chats_say_so(sentencepiece: Tokenizer) -> None:
    facade = HFTokenizerFacade(sentencepiece)
    assert facade.chat_template is None
    with pytest.raises(TokenizerError, match="has no chat template"):
        facade.apply_chat_template(CHAT)


def test_a_gguf_file_lists_all_its_control_tokens(facade: HFTokenizerFacade) -> None:
    assert facade.all_special_tokens == ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    assert facade.all_special_ids == [1, 2, 0]
