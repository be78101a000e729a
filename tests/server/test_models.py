from __future__ import annotations

from pathlib import Path

import openai
from server_harness import ScriptedEngine, Server, running

import quire
from quire.request import AdapterRef
from quire.server.generation import fingerprint


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


def test_each_model_has_its_own_engine_admission_and_metrics(tiny_model: Path) -> None:
    first, second = ScriptedEngine(tiny_model), ScriptedEngine(tiny_model, max_model_len=128)
    with running(first, others={"second": second}) as server:
        listed = server.get("/v1/models").json()["data"]
        assert [(model["id"], model["max_model_len"]) for model in listed] == [("tiny", 256), ("second", 128)]
        body = {"prompt": "x", "max_tokens": 1}
        assert server.post("/v1/completions", body).json()["model"] == "tiny"
        chat = {"model": "second", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        assert server.post("/v1/chat/completions", chat).json()["model"] == "second"
        assert server.post("/v1/completions", body | {"model": "second"}).json()["model"] == "second"
        assert (len(first.prepared), len(second.prepared)) == (1, 2)
        assert server.post("/tokenize", {"model": "second", "prompt": "x"}).json()["max_model_len"] == 128
        missing = server.post("/v1/completions", body | {"model": "third"})
        assert missing.status == 404 and "'tiny' or 'second'" in missing.json()["error"]["message"]
        page = server.get("/metrics").text
        name = "vllm:request_success_total"
        assert f'{name}{{engine="0",finished_reason="length",model_name="tiny"}} 1.0' in page
        assert f'{name}{{engine="0",finished_reason="length",model_name="second"}} 2.0' in page
        assert page.count(f"# TYPE {name} counter") == 1
        assert len({id(served.admission) for served in server.context.models}) == 2


def test_an_unknown_model_is_answered_with_near_names(tiny_model: Path) -> None:
    others = {f"other-{i}": ScriptedEngine(tiny_model) for i in range(6)}
    with running(ScriptedEngine(tiny_model), others=others, served_model_names=("llama-8b", "qwen-4b")) as server:
        missing = server.post("/v1/completions", {"prompt": "x", "model": "lama-8b"}).json()["error"]["message"]
        assert "use 'llama-8b' or " in missing and missing.count(" or ") == 4


def test_an_adapter_is_listed_with_its_model_and_found_by_its_name(tiny_model: Path) -> None:
    with running(ScriptedEngine(tiny_model)) as server:
        server.context.first.adapters["pirate"] = AdapterRef("key", "/adapters/pirate")
        listed = server.get("/v1/models").json()["data"][1]
        assert (listed["id"], listed["root"], listed["parent"]) == ("pirate", "/adapters/pirate", "tiny")
        asked = server.context.find("pirate")
        assert (asked.served, asked.adapter) == (server.context.first, "pirate")


def test_version(server: Server) -> None:
    assert server.get("/version").json() == {"version": quire.__version__}


def test_the_fingerprint_tells_models_apart(server: Server) -> None:
    from dataclasses import replace

    info = server.engine.info
    assert fingerprint(info) == fingerprint(replace(info, ready_s=9.0))
    assert fingerprint(info) != fingerprint(replace(info, dtype="bfloat16"))
