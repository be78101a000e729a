"""The names that programs import from the top level."""

from __future__ import annotations

import pytest

import quire
from quire import SamplingParams, TextPrompt, TokensPrompt
from quire.engine.inputs import _PROMPT_KEYS, InputProcessor
from quire.errors import BadRequestError


def test_every_public_name_is_there() -> None:
    for name in quire.__all__:
        assert getattr(quire, name) is not None
    assert {"TextPrompt", "TokensPrompt"} <= set(dir(quire))
    with pytest.raises(AttributeError, match="NoSuchName"):
        quire.NoSuchName  # noqa: B018 - looking it up is the test


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("AsyncLLMEngine", "AsyncLLM"),
        ("EngineArgs", "EngineConfig"),
        ("AsyncEngineArgs", "EngineConfig"),
        ("RequestOutputKind", "OutputKind"),
    ],
)
def test_vllms_names_are_ours(theirs: str, ours: str) -> None:
    assert getattr(quire, theirs) is getattr(quire, ours)


def test_prompt_types_are_what_the_engine_reads() -> None:
    assert set(TextPrompt.__annotations__) | set(TokensPrompt.__annotations__) == _PROMPT_KEYS
    inputs = InputProcessor(None, vocab_size=9, max_model_len=9, eos_token_ids=frozenset(), seed=0)
    prompt = TokensPrompt(prompt_token_ids=[1, 2], prompt="ab", cache_salt="mine")
    assert inputs.read_prompt(prompt) == ("ab", [1, 2], "mine")
    with pytest.raises(BadRequestError, match="skip_tokenizer_init"):  # read as text
        inputs.read_prompt(TextPrompt(prompt="ab"))


def test_sampling_params_from_optional() -> None:
    params = SamplingParams.from_optional(n=None, temperature=None, top_p=0.5, stop=None, max_tokens=None)
    assert params == SamplingParams(top_p=0.5, max_tokens=None)
    assert SamplingParams.from_optional() == SamplingParams()
    with pytest.raises(BadRequestError, match="top_p"):
        SamplingParams.from_optional(top_p=2.0)
