"""Structured output in a real engine: with everything else that a request may ask for."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import fakes
import jsonschema
import pytest
from grammar.schemas import schema_of
from scheduler.harness import Proposer

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.errors import BadRequestError
from quire.executor.local import LocalExecutor
from quire.outputs import RequestOutput
from quire.request import Sequence

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
PROMPTS = [[7 + i, 20, 30 + i, 9, 9, 40 + i][: 3 + i % 4] for i in range(6)]


def make(model: Path, **fields: Any) -> LLM:
    settings: dict[str, Any] = {"block_size": 4, "kv_cache_memory_bytes": 4 << 20, "num_threads": 1, **fields}
    return LLM(model=str(model), load_format="dummy", device="cpu", dtype="float32", seed=2, **settings)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return make(tiny_model)


def params(schema: Any = SCHEMA, **fields: Any) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": 150, "temperature": 1.0, "seed": 5, **fields}
    return SamplingParams(structured_outputs=StructuredOutputsParams(json=schema), **settings)


def run(llm: LLM, sampling: SamplingParams | list[SamplingParams], prompts: Any = PROMPTS) -> list[RequestOutput]:
    return llm.generate(prompts, sampling, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


def check(outputs: list[RequestOutput], schema: Any = SCHEMA) -> None:
    for output in outputs:
        for completion in output.outputs:
            assert completion.finish_reason == "stop", completion
            jsonschema.validate(json.loads(completion.text), schema)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0, "frequency_penalty": 2.0},
        {"n": 3, "logprobs": 2},
        {"top_p": 0.5, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"prompt_logprobs": 1, "logit_bias": {65: 3.0}},
        {"min_tokens": 3, "stop": ["never in there"]},
        {"bad_words": ["zz"]},
    ],
)
def test_answers_fit_whatever_else_is_asked(llm: LLM, fields: dict[str, Any]) -> None:
    outputs = run(llm, params(**fields))
    check(outputs)
    for completion in (one for output in outputs for one in output.outputs if one.logprobs):
        assert len(completion.logprobs) == len(completion.token_ids)


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    (forced,) = run(llm, params({"const": 7}, logprobs=0), PROMPTS[:1])
    (entry, *_) = forced.outputs[0].logprobs or ()
    assert all(one.logprob < -0.01 for one in entry.values())  # under the mask it would be the only one, and 0


def test_constrained_and_free_requests_share_steps(llm: LLM) -> None:
    free = SamplingParams(max_tokens=30, temperature=1.0, seed=8, ignore_eos=True)
    alone = tokens(run(llm, free))
    mixed = run(llm, [sampling for _ in PROMPTS for sampling in (free, params())], [p for p in PROMPTS for _ in "ab"])
    assert tokens(mixed[::2]) == alone
    check(mixed[1::2])


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_sequences_go_on_where_they_were(tiny_model: Path, preemption: str) -> None:
    expected = tokens(run(make(tiny_model), params(n=2)))
    llm = make(
        tiny_model, num_gpu_blocks_override=48, kv_cache_memory_bytes=None, preemption=preemption, swap_space_gb=0.01
    )
    outputs = run(llm, params(n=2))
    assert llm.llm_engine.core.scheduler.stats.num_preemptions > 0
    assert tokens(outputs) == expected
    check(outputs)


class Oracle(Proposer):
    """Drafts of what will come, every fourth of them wrong."""

    def __init__(self, outputs: list[RequestOutput]) -> None:
        self._lines = {(tuple(o.prompt_token_ids), c.index): list(c.token_ids) for o in outputs for c in o.outputs}
        self._count = 0

    def propose(self, seq: Sequence) -> list[int] | int:
        line = self._lines[tuple(seq.request.prompt_token_ids), seq.index]
        self._count += 1
        known = line[seq.num_output_tokens :][: self._count % 5]
        return [*known[:-1], known[-1] ^ 1] if known and self._count % 4 == 0 else known


@pytest.mark.parametrize("fields", [{}, {"n": 2, "logprobs": 1}, {"repetition_penalty": 1.2}])
def test_drafts_are_verified_under_the_mask(tiny_model: Path, fields: dict[str, Any]) -> None:
    llm = make(tiny_model)
    plain = run(llm, params(**fields))
    llm.llm_engine.core.scheduler.drafter = Oracle(plain)
    drafted = run(llm, params(**fields))
    assert llm.llm_engine.core.scheduler.stats.num_accepted_tokens > 0
    assert tokens(drafted) == tokens(plain)


def test_forced_tokens_need_no_steps_of_their_own(tiny_model: Path) -> None:
    words = {"const": {"a long and fixed name": "with a value", "another": [True, None]}}
    llm = make(tiny_model)
    scheduler = llm.llm_engine.core.scheduler
    jumped = run(llm, params(words, n=2, logprobs=1))
    num_steps = scheduler.stats.num_steps
    scheduler.forced_tokens = None
    plain = run(llm, params(words, n=2, logprobs=1))
    assert tokens(jumped) == tokens(plain)
    assert num_steps < 0.8 * (scheduler.stats.num_steps - num_steps)
    assert scheduler.stats.num_draft_tokens == 0


@pytest.mark.parametrize("num_threads", [1, 3])
def test_two_steps_in_flight_give_the_same_answers(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """As on a GPU, where threads fill the masks of one step while the one before is taken in."""
    wanted = [params(n=2) if i % 3 else params(bad_words=['"']) for i in range(len(PROMPTS))]
    expected = run(make(tiny_model), wanted)
    monkeypatch.setattr(LocalExecutor, "depth", 2)
    llm = make(tiny_model)
    executor = llm.llm_engine.core.executor
    assert isinstance(executor, LocalExecutor) and executor.worker.constraints is not None
    executor.worker.constraints._num_threads = num_threads
    found = run(llm, wanted)
    assert tokens(found) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        assert [c.error for c in one.outputs] == [c.error for c in other.outputs]
    assert [output.outputs[0].finish_reason for output in found[:2]] == ["banned", "stop"]


def test_the_prefix_cache_changes_nothing(llm: LLM) -> None:
    prompt = [list(range(60, 100))]
    first, again = run(llm, params(), prompt), run(llm, params(), prompt)
    assert tokens(first) == tokens(again)
    assert again[0].num_cached_tokens > 0


def test_the_end_of_max_tokens_is_told(llm: LLM) -> None:
    (output,) = run(llm, params(max_tokens=4), PROMPTS[:1])
    assert output.outputs[0].finish_reason == "length"


def test_a_state_without_a_token_is_told(llm: LLM) -> None:
    bans_quotes = params(logit_bias=None, bad_words=['"'])
    (output,) = run(llm, bans_quotes, PROMPTS[:1])
    assert output.outputs[0].finish_reason == "banned"
    assert "structured_outputs" in (output.outputs[0].error or "")


def test_a_request_waits_for_its_grammar_and_holds_nobody_up(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(tiny_model).llm_engine
    grammars = engine.core._grammars
    assert grammars is not None
    go, compile_now = threading.Event(), grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda text: (go.wait(60), compile_now(text))[1])
    monkeypatch.setattr(grammars, "check", grammars.start)
    engine.add_request("slow", PROMPTS[0], params({"const": "slow"}))
    engine.add_request("gone", PROMPTS[1], params({"const": "gone"}))
    engine.add_request("free", PROMPTS[2], SamplingParams(max_tokens=4, ignore_eos=True))
    with pytest.raises(BadRequestError, match="in use"):
        engine.add_request("slow", PROMPTS[0], params({"const": "slow"}))
    done: dict[str, RequestOutput] = {}
    while not done:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert set(done) == {"free"}
    (gone,) = engine.abort_request("gone")
    assert gone.outputs[0].finish_reason == "abort"
    go.set()
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert json.loads(done["slow"].outputs[0].text) == "slow"


@dataclass
class Person:
    name: Literal["Ada", "Bob"]
    age: int | None
    friends: list[Person]


def test_dataclasses_are_schemas(llm: LLM) -> None:
    kind = StructuredOutputsParams(json=Person)
    jsonschema.validate({"name": "Ada", "age": None, "friends": []}, kind.json)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "Ada", "age": 1, "friends": [{}]}, kind.json)
    check(run(llm, params(Person, logit_bias={ord("]"): 9.0, ord("0"): -9.0}), PROMPTS[:1]), kind.json)


def test_many_schemas_with_a_real_vocabulary(smollm2: Path, tmp_path: Path) -> None:
    model = fakes.write_tiny_model(tmp_path, vocab_size=49_152, max_position_embeddings=512)
    llm = make(model, tokenizer=str(smollm2), max_model_len=256)
    schemas = [schema_of(number) for number in range(24)]
    close = dict.fromkeys(llm.get_tokenizer().encode('"}],', add_special_tokens=False), 6.0)
    sampling = [params(schema, seed=i, max_tokens=200, logit_bias=close) for i, schema in enumerate(schemas)]
    outputs = run(llm, sampling, [[5, 6, 7]] * len(schemas))
    ended = [(o, s) for o, s in zip(outputs, schemas, strict=True) if o.outputs[0].finish_reason == "stop"]
    assert len(ended) > len(schemas) // 2
    for output, schema in ended:
        check([output], schema)
