from __future__ import annotations

from pathlib import Path

import openai
from server_harness import ScriptedEngine, Server, running

import quire
from quire.server.models import fingerprint


def test_models(server: Server) -> None:
    (model,) = server.get("/v1/models").json()["data"]
    assert (model["id"], model["root"], model["object"], model["max_model_len"]) == ("tiny", "tiny", "model", 256)
    assert server.get("/v1/models/tiny").json() == model
    missing = server.get("/v1/models/other")
    assert (missing.status, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_the_official_client_lists_them(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").owned_by == "quire"


def test_several_names_for_one_model(tiny_model: Path) -> None:
    with running(ScriptedEngine(tiny_model), served_model_names=("org/first", "second")) as server:
        listed = server.get("/v1/models").json()["data"]
        assert [(model["id"], model["root"]) for model in listed] == [("org/first", "tiny"), ("second", "tiny")]
        assert server.get("/v1/models/org/first").status == 200
        body = {"prompt": "x", "max_tokens": 1}
        assert server.post("/v1/completions", body).json()["model"] == "org/first"
        assert server.post("/v1/completions", body | {"model": "second"}).json()["model"] == "second"
        assert server.post("/v1/completions", body | {"model": "tiny"}).status == 404


def test_version(server: Server) -> None:
    assert server.get("/version").json() == {"version": quire.__version__}


def test_the_fingerprint_tells_models_apart(server: Server) -> None:
    from dataclasses import replace

    info = server.engine.info
    assert fingerprint(info) == fingerprint(replace(info, ready_s=9.0))
    assert fingerprint(info) != fingerprint(replace(info, dtype="bfloat16"))
