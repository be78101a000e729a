"""Embeddings, classes and scores against transformers, on random tiny models; and what is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pooling_fakes as fakes
import pytest
import torch
import torch.nn.functional as F

from quire import LLM, AsyncLLM, PoolingParams, SamplingParams
from quire.errors import BadRequestError, ConfigError, QuireError
from quire.plan import StepPlan
from quire.request import SequenceState
from quire.scheduler.step import StepBuilder

TEXTS = ["the cat sat", "a", "big red dog ran under the tree and the cat sat on the mat", "who is blue", ""]


def states(model: Any, ids: list[int], **inputs: Any) -> torch.Tensor:
    """The last hidden states, by transformers."""
    with torch.inference_mode():
        base = getattr(model, model.base_model_prefix, model)
        hidden: torch.Tensor = base(torch.tensor([ids]), **inputs).last_hidden_state[0]
    return hidden


def logits(model: Any, ids: list[int], types: list[int] | None = None) -> torch.Tensor:
    inputs = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([ids]), **inputs).logits[0]
    return found


def make(path: Path, **kwargs: Any) -> LLM:
    return LLM(str(path), **{"device": "cpu", "dtype": "float32", **kwargs})


@pytest.mark.parametrize(
    ("name", "kind"), [("BertModel", "mean_tokens"), ("RobertaModel", "cls_token"), ("XLMRobertaModel", "lasttoken")]
)
def test_encoders_embed_as_transformers_does(tmp_path: Path, name: str, kind: str) -> None:
    model = fakes.save(tmp_path, name)
    fakes.add_sentence_files(tmp_path, kind)
    outputs = make(tmp_path).embed(TEXTS, use_tqdm=False)
    for output in outputs:
        assert output.prompt_token_ids[0] == 2 and output.prompt_token_ids[-1] == 3
        hidden = states(model, output.prompt_token_ids)
        expected = {"mean_tokens": hidden.mean(0), "cls_token": hidden[0], "lasttoken": hidden[-1]}[kind]
        torch.testing.assert_close(
            torch.tensor(output.outputs.embedding), F.normalize(expected, dim=0), atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize(("kind", "budget"), [("LAST", 128), ("LAST", 24), ("MEAN", 24), ("CLS", 24)])  # 24: in chunks
def test_decoders_embed_as_transformers_does(tmp_path: Path, kind: str, budget: int) -> None:
    model = fakes.save(tmp_path, "LlamaForCausalLM")
    llm = make(
        tmp_path, runner="pooling", pooler_config={"pooling_type": kind, "normalize": False}, block_size=4,
        max_num_batched_tokens=budget, max_num_seqs=4,
    )  # fmt: skip
    texts = [*TEXTS, TEXTS[2] + " " + TEXTS[2]]
    for _ in range(2):  # the second time with prefixes in the cache
        outputs = llm.embed(texts, use_tqdm=False)
        for output in outputs:
            hidden = states(model, output.prompt_token_ids)
            expected = {"MEAN": hidden.mean(0), "CLS": hidden[0], "LAST": hidden[-1]}[kind]
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, atol=1e-4, rtol=1e-3)
    is_found = outputs[-1].num_cached_tokens > 0
    assert is_found == (kind == "LAST")  # the states of other tokens are not kept
    llm.llm_engine.core.scheduler.check()
    llm.llm_engine.core.kv.check()


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "Qwen2ForSequenceClassification"])
def test_decoders_with_a_classifier(tmp_path: Path, name: str) -> None:
    model = fakes.save(tmp_path, name, num_labels=3)
    llm = make(tmp_path)
    for output in llm.classify(TEXTS, use_tqdm=False):
        expected = logits(model, output.prompt_token_ids)
        assert output.outputs.num_classes == 3
        torch.testing.assert_close(torch.tensor(output.outputs.probs), expected.softmax(0), atol=1e-5, rtol=1e-4)
    raw = llm.classify(TEXTS[0], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)[0]
    torch.testing.assert_close(
        torch.tensor(raw.outputs.probs), logits(model, raw.prompt_token_ids), atol=1e-4, rtol=1e-3
    )
    with pytest.raises(BadRequestError, match="has 3 classes"):
        llm.score("a", ["the"])
    with pytest.raises(BadRequestError, match="convert='embed'"):
        llm.embed("a")
    states_of = make(tmp_path, convert="embed").embed(TEXTS[2], use_tqdm=False)[0]
    expected = F.normalize(states(model, states_of.prompt_token_ids)[-1], dim=0)
    torch.testing.assert_close(torch.tensor(states_of.outputs.embedding), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "RobertaForSequenceClassification"])
def test_encoders_score_pairs(tmp_path: Path, name: str) -> None:
    model = fakes.save(tmp_path, name, num_labels=1)
    llm = make(tmp_path)
    outputs = llm.score("who sat", TEXTS[:3], use_tqdm=False)
    for output in outputs:
        ids = output.prompt_token_ids
        first = ids.index(3) + 1
        types = [int(i >= first) for i in range(len(ids))] if name.startswith("Bert") else None
        expected = logits(model, ids, types).sigmoid().item()
        assert output.outputs.score == pytest.approx(expected, abs=1e-5)
    assert len({round(output.outputs.score, 6) for output in outputs}) == 3
    with pytest.raises(BadRequestError, match="texts, not token ids"):
        llm.score([5, 6], "the")


def test_scores_of_embeddings_are_cosines(tmp_path: Path) -> None:
    fakes.save(tmp_path, "BertModel")
    llm = make(tmp_path)
    vectors = torch.tensor([output.outputs.embedding for output in llm.embed(TEXTS[:3], use_tqdm=False)])
    scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS[:3], use_tqdm=False)]
    torch.testing.assert_close(torch.tensor(scores), vectors @ vectors[0], atol=1e-5, rtol=1e-4)
    assert scores[0] == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(BadRequestError, match="3 texts cannot be paired with 2"):
        llm.score(TEXTS[:3], TEXTS[:2])


def test_every_token_can_be_had(tmp_path: Path) -> None:
    model = fakes.save(tmp_path, "BertModel")
    llm = make(tmp_path)
    output = llm.encode(TEXTS[2], PoolingParams(use_activation=False), use_tqdm=False)[0]
    expected = states(model, output.prompt_token_ids)
    torch.testing.assert_close(output.outputs.data, expected, atol=1e-4, rtol=1e-3)
    pooled = llm.encode(TEXTS[2], pooling_task="embed", use_tqdm=False)[0].outputs.data
    by_params = llm.encode([TEXTS[2]], [PoolingParams(task="embed")], use_tqdm=False)[0].outputs.data
    assert torch.equal(pooled, by_params)
    torch.testing.assert_close(pooled, F.normalize(expected[0], dim=0), atol=1e-5, rtol=1e-4)


def test_a_model_saved_without_its_head(tmp_path: Path) -> None:
    """Qwen3-Embedding's way: names without "model." before them, a CausalLM by its config, and modules.json."""
    model = fakes.save(tmp_path, "Qwen3Model")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    fakes.add_sentence_files(tmp_path, "lasttoken")
    output = make(tmp_path).embed(TEXTS[2], use_tqdm=False)[0]
    expected = F.normalize(states(model, output.prompt_token_ids)[-1], dim=0)
    torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, atol=1e-5, rtol=1e-4)


def test_dimensions_and_lengths(tmp_path: Path) -> None:
    fakes.save(tmp_path, "BertModel", matryoshka_dimensions=[8, 16])
    fakes.add_sentence_files(tmp_path, max_seq_length=10)
    llm = make(tmp_path)
    whole = llm.embed(TEXTS[0], use_tqdm=False)[0].outputs.embedding
    cut = llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=8), use_tqdm=False)[0].outputs.embedding
    torch.testing.assert_close(torch.tensor(cut), F.normalize(torch.tensor(whole[:8]), dim=0))
    with pytest.raises(BadRequestError, match="this model has 8, 16"):
        llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=9))
    with pytest.raises(BadRequestError, match="truncate_prompt_tokens=-1"):
        llm.embed(TEXTS[2])  # longer than the 10 tokens that sentence-transformers' file allows
    short = llm.embed(TEXTS[2], truncate_prompt_tokens=-1, use_tqdm=False)[0]
    assert len(short.prompt_token_ids) == 10 and short.prompt_token_ids[-1] == 3
    assert len(make(tmp_path, max_model_len=66).embed(TEXTS[2], use_tqdm=False)[0].prompt_token_ids) == 16


def test_batches_change_nothing(tmp_path: Path) -> None:
    """Bitwise: a text's vector does not depend on the texts beside it."""
    fakes.save(tmp_path, "BertModel")
    llm = make(tmp_path, batch_invariant=True)
    together = llm.embed(TEXTS, use_tqdm=False)
    assert [llm.embed(text, use_tqdm=False)[0].outputs for text in TEXTS] == [output.outputs for output in together]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    bert, llama = tmp_path / "bert", tmp_path / "llama"
    fakes.save(bert, "BertModel")
    fakes.save(llama, "LlamaForCausalLM")
    embedder = make(bert, max_num_batched_tokens=16, max_num_seqs=4)
    with pytest.raises(BadRequestError, match="generates no text"):
        embedder.generate("the cat")
    with pytest.raises(BadRequestError, match="not known to be trained"):
        embedder.embed("a", pooling_params=PoolingParams(dimensions=8))
    with pytest.raises(BadRequestError, match="has no classes"):
        embedder.classify("a")
    with pytest.raises(BadRequestError, match="max_num_batched_tokens=16"):
        embedder.embed(" ".join(TEXTS))  # an encoder computes a text in one step
    with pytest.raises(BadRequestError, match="runner='pooling'"):
        make(llama).embed("a")
    for path, arguments, message in (
        (bert, {"runner": "generate"}, "is an encoder and generates no text"),
        (bert, {"kv_cache_memory_bytes": 1 << 20}, "keeps no KV blocks"),
        (bert, {"speculative_config": {"method": "suffix"}}, "for models that generate"),
        (llama, {"task": "classify"}, "has no classifier"),
        (llama, {"convert": "embed"}, "set runner='pooling'"),
        (llama, {"runner": "pooling", "tensor_parallel_size": 2}, "runs on one device so far"),
        (bert, {"pooler_config": {"pooling_type": "STEP"}}, "LAST, MEAN or CLS"),
        (bert, {"task": "generate", "runner": "pooling"}, "contradict each other"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(path, **arguments)
    fakes.add_sentence_files(bert, "max_tokens")
    with pytest.raises(QuireError, match="pooling by pooling_mode_max_tokens"):
        make(bert)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("BertModel", "mean_tokens"),
        ("XLMRobertaModel", "cls_token"),
        ("LlamaModel", "lasttoken"),
        ("LlamaModel", "mean_tokens"),
    ],
)
def test_a_gpu_embeds_as_transformers_does(tmp_path: Path, name: str, kind: str) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 3} if name != "LlamaModel" else {}
    model = fakes.save(tmp_path, name, initializer_range=0.1, **sizes)
    fakes.add_sentence_files(tmp_path, kind)
    texts = TEXTS * 40
    llm = LLM(str(tmp_path), device="cuda", dtype="float16", max_num_batched_tokens=256, max_num_seqs=64)
    for output in llm.embed(texts, use_tqdm=False):
        hidden = states(model, output.prompt_token_ids)
        expected = {"mean_tokens": hidden.mean(0), "cls_token": hidden[0], "lasttoken": hidden[-1]}[kind]
        assert F.cosine_similarity(torch.tensor(output.outputs.embedding), expected, dim=0) > 0.9999


async def test_requests_of_an_async_engine(tmp_path: Path) -> None:
    """Several at once, one aborted by leaving; priorities are taken."""
    fakes.save(tmp_path, "BertModel")
    expected = make(tmp_path).embed(TEXTS, use_tqdm=False)

    engine = AsyncLLM(str(tmp_path), device="cpu", dtype="float32", scheduling_policy="priority", max_num_seqs=2)

    async def one(i: int) -> torch.Tensor:
        async for output in engine.encode(TEXTS[i], PoolingParams(task="embed"), f"r{i}", priority=-i):
            assert output.finished and output.request_id == f"r{i}"
            found: torch.Tensor = output.outputs.data
        return found

    try:
        left = engine.encode("the cat", request_id="left")
        waiting = asyncio.ensure_future(anext(left))
        await asyncio.sleep(0)
        waiting.cancel()
        vectors = await asyncio.gather(*(one(i) for i in range(len(TEXTS))))
        with pytest.raises(BadRequestError, match="generates no text"):
            async for _ in engine.generate("a", SamplingParams()):
                pass
    finally:
        engine.shutdown()
    for vector, output in zip(vectors, expected, strict=True):
        torch.testing.assert_close(vector, torch.tensor(output.outputs.embedding), atol=1e-6, rtol=1e-5)


def test_a_preempted_row_is_pooled_from_its_beginning(tmp_path: Path) -> None:
    """What a row kept of earlier chunks leaves with it: the scheduler computes it again, and never swaps it."""
    model = fakes.save(tmp_path, "LlamaForCausalLM")
    llm = make(
        tmp_path, runner="pooling", pooler_config={"pooling_type": "MEAN"}, max_num_batched_tokens=8, max_num_seqs=2,
        block_size=4, swap_space_gb=0.01, preemption="swap",
    )  # fmt: skip
    engine = llm.llm_engine
    engine.add_request("long", TEXTS[2])
    engine.step()
    scheduler = engine.core.scheduler
    (seq,) = scheduler.running
    assert 0 < seq.num_computed_tokens < len(seq.token_ids)
    step = StepBuilder(StepPlan(0), budget=8)
    scheduler._room.preempt(seq, step)
    assert seq.state is SequenceState.PREEMPTED and not step.plan.moves
    outputs: list[Any] = []
    while not outputs:
        outputs = engine.step()
    expected = F.normalize(states(model, seq.request.prompt_token_ids).mean(0), dim=0)
    vector = torch.tensor(outputs[0].outputs[0].pooled.lists()[0])
    torch.testing.assert_close(vector, expected, atol=1e-5, rtol=1e-4)
    scheduler.check()
    engine.core.kv.check()
