"""Embeddings, scores and classes over HTTP, from real engines in processes of their own; OpenAI's client unmodified."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pooling_fakes as fakes
import pytest
from hypothesis import HealthCheck, given, settings
from observing_fakes import eventually
from openapi_strategies import of_schema
from server_harness import Server, running

from quire import LLM
from quire.cli.main import main
from quire.config import EngineConfig
from quire.engine.client import EngineClient
from quire.router.replicas import ReplicaSet
from quire.server.openapi import openapi_document

DOCUMENT = openapi_document()
SCHEMAS = DOCUMENT["components"]["schemas"]
TEXTS = ["the cat sat", "a", "big red dog ran under the tree"]


@pytest.fixture(scope="module")
def embedder_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embedder")
    fakes.save(path, "BertModel", is_matryoshka=True)
    fakes.add_sentence_files(path)
    return path


@pytest.fixture(scope="module")
def embedder(embedder_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = EngineConfig(model=str(embedder_path), dtype="float32", device="cpu", scheduling_policy="priority")
    kept = str(tmp_path_factory.mktemp("kept"))
    with running(EngineClient(config), served_model_names=("mini",), batch_dir=kept) as server:
        yield server


@pytest.fixture(scope="module")
def expected(embedder_path: Path) -> list[list[float]]:
    llm = LLM(str(embedder_path), dtype="float32", device="cpu")
    return [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]


def test_the_official_client(embedder: Server, expected: list[list[float]]) -> None:
    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none")
    reply = client.embeddings.create(model="mini", input=TEXTS)  # which asks for base64 by itself
    for i, one in enumerate(reply.data):
        assert one.index == i and one.embedding == pytest.approx(expected[i], abs=1e-6)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 0
    plain = client.embeddings.create(model="mini", input=TEXTS[0], encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(expected[0], abs=1e-6)
    ids = embedder.post("/tokenize", {"prompt": TEXTS[0]}).json()["tokens"]
    for wanted in (ids, [ids, ids]):
        assert client.embeddings.create(model="mini", input=wanted).data[-1].embedding == plain.data[0].embedding
    short = client.embeddings.create(model="mini", input=TEXTS[0], dimensions=8).data[0].embedding
    assert len(short) == 8 and sum(x * x for x in short) == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(openai.BadRequestError, match="generates no text"):
        client.completions.create(model="mini", prompt="a")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")


def test_base64_is_float32(embedder: Server, expected: list[list[float]]) -> None:
    reply = embedder.post("/v1/embeddings", {"input": TEXTS[2], "encoding_format": "base64"}).json()
    data = base64.b64decode(reply["data"][0]["embedding"])
    assert struct.unpack(f"<{len(data) // 4}f", data) == pytest.approx(expected[2], abs=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked(embedder: Server, path: str) -> None:
    body: dict[str, Any] = {"query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[0]}, TEXTS[2]]}
    results = embedder.post(path, body).json()["results"]
    assert results[0]["index"] == 1 and results[0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)
    assert results[0]["document"] == {"text": TEXTS[0]}
    assert [one["relevance_score"] for one in results] == sorted(one["relevance_score"] for one in results)[::-1]
    best = embedder.post(path, body | {"top_n": 1, "return_documents": False}).json()["results"]
    assert best == [{"index": 1, "relevance_score": results[0]["relevance_score"]}]


def test_pairs_are_scored(embedder: Server) -> None:
    both = embedder.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json()
    assert both["data"][0]["score"] == pytest.approx(1.0, abs=1e-5) and len(both["data"]) == 3
    same = embedder.post("/v1/score", {"data_1": TEXTS, "data_2": TEXTS}).json()["data"]
    assert [one["score"] for one in same] == pytest.approx([1.0] * 3, abs=1e-5)


def test_states_of_tokens(embedder: Server) -> None:
    (one,) = embedder.post("/pooling", {"input": TEXTS[0]}).json()["data"]
    assert len(one["data"]) == 5 and len(one["data"][0]) == 48
    (whole,) = embedder.post("/pooling", {"input": TEXTS[0], "task": "embed"}).json()["data"]
    assert len(whole["data"]) == 48


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "a", "dimensions": 49}, "dimensions"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", [1]], "nonsense": 1}, "nonsense"),
        ("/v1/embeddings", {"input": [1, "a"]}, "input"),
        ("/v1/embeddings", {"input": "the cat " * 60}, "input"),
        ("/v1/embeddings", {"input": [999]}, "input"),
        ("/classify", {"input": "a"}, "task"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "the"], "text_2": ["a"]}, "data_1"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/pooling", {"input": "a", "task": "generate"}, "task"),
    ],
)
def test_what_is_wrong_is_named(embedder: Server, path: str, body: dict[str, Any], param: str) -> None:
    reply = embedder.post(path, body)
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)
    assert embedder.post("/v1/embeddings", {"input": "a"}).status == 200


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/pooling"])
def test_any_body(embedder: Server, path: str) -> None:
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    statuses: list[int] = []

    @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(of_schema(SCHEMAS[schema.rsplit("/", 1)[1]], SCHEMAS))
    def run(body: dict[str, Any]) -> None:
        few = {name: body[name] for name in ("input", "query", "documents", "text_1", "text_2") if body.get(name)}
        if path == "/v1/score":  # most pairs of lists have different lengths
            few = {"text_1": "the cat", "text_2": few.get("text_2", "a")}
        for each in (body | {"model": "mini", "timeout": None}, few):
            statuses.append(embedder.post(path, each).status)

    run()
    assert set(statuses) <= {200, 400} and 200 in statuses, set(statuses)


def test_texts_are_cut_where_asked(embedder: Server) -> None:
    reply = embedder.post("/v1/embeddings", {"input": "the cat " * 60, "truncate_prompt_tokens": -1}).json()
    assert reply["usage"]["prompt_tokens"] == 66


@pytest.mark.parametrize("path", ["/health", "/load", "/metrics", "/debug/kv?full=1", "/debug/kv/map", "/v1/models"])
def test_what_operators_look_at(embedder: Server, path: str) -> None:
    """An encoder has no blocks; pages that show them are empty, not broken."""
    assert embedder.get(path).status == 200


def test_replicas(embedder_path: Path, expected: list[list[float]]) -> None:
    config = EngineConfig(model=str(embedder_path), dtype="float32", device="cpu", num_threads=1)
    with running(ReplicaSet(config, 2), served_model_names=("mini",)) as server:
        for _ in range(2):
            reply = server.post("/v1/embeddings", {"input": TEXTS}).json()
            for one, vector in zip(reply["data"], expected, strict=True):
                assert one["embedding"] == pytest.approx(vector, abs=1e-6)


def test_a_classifier(tmp_path: Path) -> None:
    fakes.save(tmp_path, "LlamaForSequenceClassification", id2label={0: "bad", 1: "good", 2: "so-so"})
    config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", kv_cache_memory_bytes=1 << 20)
    with running(EngineClient(config), served_model_names=("judge",)) as server:
        (one,) = server.post("/classify", {"input": TEXTS[0]}).json()["data"]
        assert one["num_classes"] == 3 and sum(one["probs"]) == pytest.approx(1.0, abs=1e-5)
        assert one["label"] == ["bad", "good", "so-so"][one["probs"].index(max(one["probs"]))]
        assert server.post("/v1/embeddings", {"input": "a"}).json()["error"]["param"] == "task"


def test_a_batch_by_the_official_client(embedder: Server, expected: list[list[float]]) -> None:
    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none")
    lines = [{"custom_id": str(i), "url": "/v1/embeddings", "body": {"input": text}} for i, text in enumerate(TEXTS)]
    data = "".join(json.dumps({"method": "POST", **line}) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
    batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    for answer in answers:
        vector = answer["response"]["body"]["data"][0]["embedding"]
        assert vector == pytest.approx(expected[int(answer["custom_id"])], abs=1e-6)
    assert len(answers) == len(TEXTS)


def test_a_file_of_requests(embedder_path: Path, tmp_path: Path, expected: list[list[float]]) -> None:
    lines = [{"custom_id": str(i), "url": "/v1/embeddings", "body": {"input": text}} for i, text in enumerate(TEXTS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    assert main(["run-batch", *paths, str(embedder_path), "--dtype", "float32", "--device", "cpu"]) == 0
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        answer = json.loads(line)
        vector = answer["response"]["body"]["data"][0]["embedding"]
        assert vector == pytest.approx(expected[int(answer["custom_id"])], abs=1e-6)
