"""The text side alone: no torch, no weights, and everything that is about text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fakes
import pytest

from quire.config import EngineConfig
from quire.engine.text_side import TextSide, _default_sampling, open_model
from quire.errors import BadRequestError, TokenizerError


def text_side(path: Path, **kwargs: object) -> TextSide:
    config = EngineConfig(model=str(path), load_format="dummy", **kwargs)
    return TextSide(config, open_model(config))


def test_it_needs_no_torch(tiny_model: Path) -> None:
    code = (
        "import sys; from quire.config import EngineConfig; from quire.engine.text_side import TextSide, open_model;"
        f"config = EngineConfig(model={str(tiny_model)!r}, load_format='dummy');"
        "text = TextSide(config, open_model(config)); text.make_inputs(100); text.make_outputs();"
        "text.render_chat([{'role': 'user', 'content': 'hi'}]);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_chats(tiny_model: Path) -> None:
    text = text_side(tiny_model)
    messages = [{"role": "user", "content": "hi"}]
    rendered = text.render_chat(messages)
    assert text.tokenizer is not None
    assert text.tokenizer.decode(rendered["prompt_token_ids"], skip_special_tokens=False) == rendered["prompt"]
    assert text.render_chat(messages, chat_template="{{ messages[0]['content'] }}!")["prompt"] == "hi!"
    own = text_side(tiny_model, chat_template="own {{ messages[0]['content'] }}")
    assert own.render_chat(messages)["prompt"] == "own hi"
    with pytest.raises(BadRequestError, match="tokenizer"):
        text_side(tiny_model, skip_tokenizer_init=True).render_chat(messages)


def test_special_tokens_in_messages(tiny_model: Path) -> None:
    messages = [{"role": "user", "content": "<|end|>"}]
    as_text = text_side(tiny_model).render_chat(messages)
    as_token = text_side(tiny_model, allow_special_tokens_in_content=True).render_chat(messages)
    assert as_text["prompt"] == as_token["prompt"]
    assert len(as_text["prompt_token_ids"]) > len(as_token["prompt_token_ids"])
    assert text_side(tiny_model).render_chat(messages, allow_special_tokens=True) == as_token


def test_more_messages_than_tokens_fit_are_refused_before_rendering(tiny_model: Path) -> None:
    text = text_side(tiny_model, max_model_len=64)
    with pytest.raises(BadRequestError, match="65 messages, and at most 64 tokens fit"):
        text.render_chat([{"role": "user", "content": ""}] * 65)


def test_a_template_that_cannot_work_is_told_at_start(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    text_side(tiny_model).compile_template()
    assert "refused" not in caplog.text
    text_side(tiny_model, chat_template="{{ 'x' * 1000000000 }}").compile_template()
    assert "chats will be refused: the chat template does what its sandbox forbids" in caplog.text


def test_what_the_model_says_of_itself(tmp_path: Path) -> None:
    path = fakes.write_tiny_model(tmp_path / "m")
    text = text_side(path)
    assert text.eos_token_ids == {257}
    assert text.default_sampling.temperature == 1.0
    # As vLLM's --generation-config auto: do_sample says nothing, and what cannot be used costs only itself.
    own = {"do_sample": False, "temperature": 0.6, "top_p": 7, "top_k": 20, "max_new_tokens": 2048}
    sampling = _default_sampling(own)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.6, 1.0, 20, 2048)
    (path / "config.json").write_text(json.dumps(fakes.TINY_LLAMA | {"vocab_size": 100}))
    with pytest.raises(TokenizerError):
        text_side(path)
