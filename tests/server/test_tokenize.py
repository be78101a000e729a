from __future__ import annotations

from typing import Any

import pytest
from server_harness import Server

MESSAGES = [{"role": "user", "content": "hi"}]


def test_there_and_back(server: Server) -> None:
    text = "Grüße, 世界"
    tokens = server.post("/tokenize", {"model": "tiny", "prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(text.encode())
    assert (tokens["max_model_len"], tokens["token_strs"]) == (256, None)
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}


def test_special_tokens_are_shown(server: Server) -> None:
    tokens = server.post("/tokenize", {"prompt": "<|end|>x", "return_token_strs": True}).json()
    assert tokens["token_strs"] == ["<|end|>", "x"]
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "<|end|>x"}


def test_a_chat_as_its_template_writes_it(server: Server) -> None:
    tokens = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    shorter = server.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert tokens[: shorter["count"]] == shorter["tokens"]
    chat = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    assert server.post("/v1/chat/completions", chat).json()["prompt_token_ids"] == tokens


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"messages": MESSAGES, "tools": [1]}, 400, "tools[0]"),
        ("/tokenize", {"prompt": "x", "tools": [{}]}, 400, "tools"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [320]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
def test_refusals(server: Server, path: str, body: dict[str, Any], status: int, param: str) -> None:
    reply = server.post(path, body)
    assert (reply.status, reply.json()["error"]["param"]) == (status, param)


def test_without_a_tokenizer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.engine, "tokenizer", None)
    assert server.post("/tokenize", {"prompt": "x"}).status == 400
    assert server.post("/detokenize", {"tokens": [1]}).status == 400
    echo = {"prompt": [1, 2], "echo": True, "max_tokens": 1}
    assert server.post("/v1/completions", echo).json()["error"]["param"] == "echo"
