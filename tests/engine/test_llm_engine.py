"""The engine on a tiny real model: whatever the cache and the scheduler do, the tokens stay the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLMEngine, SamplingParams
from quire.config import EngineConfig
from quire.engine.build import CPU_READERS_STEP_S
from quire.errors import BadRequestError, EngineDeadError, QuireError
from quire.outputs import RequestOutput
from quire.params import OutputKind


def make(tiny_model: Path, **kwargs: Any) -> LLMEngine:
    kwargs.setdefault("device", "cpu")
    kwargs.setdefault("num_threads", 1)
    kwargs.setdefault("kv_cache_memory_bytes", 4 << 20)
    return LLMEngine.from_config(EngineConfig(model=str(tiny_model), load_format="dummy", **kwargs))


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        engine.core.kv.check()
    return done


def requests(count: int, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and sampled, short and long, some with a common head."""
    rng = random.Random(seed)
    head = [rng.randrange(256) for _ in range(40)]
    found = []
    for i in range(count):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
        if i % 3 == 0:
            prompt = head + prompt
        params = SamplingParams(
            temperature=0.0 if i % 2 else 0.9,
            top_p=0.9 if i % 4 == 0 else 1.0,
            seed=i,
            max_tokens=rng.randint(1, 40),
            ignore_eos=True,
        )
        found.append((prompt, params))
    return found


def run_all(engine: LLMEngine, work: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    for i, (prompt, params) in enumerate(work):
        engine.add_request(str(i), prompt, params)
    done = finish(engine)
    return [done[str(i)].outputs[0].token_ids for i in range(len(work))]


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[list[int]]:
    """Each request by itself, without prefix caching: what every other way of running must give."""
    engine = make(tiny_model, enable_prefix_caching=False)
    return [run_all(engine, [one])[0] for one in requests(24)]


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"long_prefill_token_threshold": 7},
        {"enable_chunked_prefill": False},
        {"block_size": 4},
        {"block_size": 128},
        {"enable_prefix_caching": False},
        {"target_step_ms": 1.0},
        {"scheduling_policy": "priority"},
        # 24 blocks of 16: far too few for all at once
        {"kv_cache_memory_bytes": 24 * 16 * 1024, "preemption": "recompute"},
        {"kv_cache_memory_bytes": 24 * 16 * 1024, "preemption": "swap", "swap_space_gb": 0.01},
        {"kv_cache_memory_bytes": 24 * 16 * 1024, "swap_space_gb": 0.01},
    ],
    ids=str,
)
def test_same_tokens_however_they_are_run(tiny_model: Path, alone: list[list[int]], kwargs: dict[str, Any]) -> None:
    engine = make(tiny_model, **kwargs)
    assert run_all(engine, requests(24)) == alone
    assert engine.core.kv.num_used_blocks == 0
    if "preemption" in kwargs:
        assert engine.core.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("kwargs", "target_s"),
    [
        ({}, CPU_READERS_STEP_S),
        ({"target_step_ms": 40.0}, 0.04),
        ({"smooth_prefill_tokens": 0}, None),
        ({"enable_chunked_prefill": False}, None),
    ],
    ids=str,
)
def test_steps_are_kept_short_on_a_cpu_where_somebody_reads_along(
    tiny_model: Path, kwargs: dict[str, Any], target_s: float | None
) -> None:
    engine = make(tiny_model, **kwargs)
    if "target_step_ms" not in kwargs:
        assert engine.core.scheduler.target_step_s is None  # a program that waits for whole answers gains nothing
    engine.built.tokens.smooth_for_readers(engine.built.config)
    assert engine.core.scheduler.target_step_s == target_s


def test_second_turn_finds_the_first(tiny_model: Path) -> None:
    engine = make(tiny_model)
    prompt = list(range(50))
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engine.add_request("a", prompt, params)
    first = finish(engine)["a"]
    assert (first.num_cached_tokens, first.num_cache_creation_tokens) == (0, 48)
    engine.add_request("b", prompt + first.outputs[0].token_ids + [7, 8, 9], params)
    second = finish(engine)["b"]
    # 79 of the first turn's 80 tokens have KV (the last was sampled, not run): four full blocks.
    assert second.num_cached_tokens == 64
    assert second.metrics is not None
    assert second.metrics.cache_outcome == "partial"


def test_salts_do_not_share(tiny_model: Path) -> None:
    engine = make(tiny_model)
    params = SamplingParams(temperature=0.0, max_tokens=2)
    for name, salt, cached in [("a", "x", 0), ("b", "y", 0), ("c", "x", 32)]:
        engine.add_request(name, {"prompt_token_ids": list(range(40)), "cache_salt": salt}, params)
        assert finish(engine)[name].num_cached_tokens == cached


def test_forks_share_the_prompt_and_differ(tiny_model: Path) -> None:
    engine = make(tiny_model)
    prompt = list(range(41))
    engine.add_request("n", prompt, SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True))
    most_used = 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        most_used = max(most_used, engine.core.kv.num_used_blocks)
        engine.core.kv.check()
    lines = [c.token_ids for c in outputs[0].outputs]
    assert [c.index for c in outputs[0].outputs] == [0, 1, 2, 3]
    assert len({tuple(line) for line in lines}) == 4
    stats = engine.core.kv.stats
    assert (stats.num_forks, stats.num_copies) == (3, 3)
    assert most_used <= 2 + 4 * 2  # two full prompt blocks once, the rest of each line apart
    # Each line is what the same seed gives without sharing.
    apart = make(tiny_model, enable_prefix_caching=False, max_num_seqs=4)
    apart.add_request("n", prompt, SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True))
    assert [c.token_ids for c in finish(apart)["n"].outputs] == lines


def test_abort_frees_at_once(tiny_model: Path) -> None:
    engine = make(tiny_model, max_num_seqs=2)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    for name in "abc":
        engine.add_request(name, list(range(30)), params)
    engine.step()
    ended = engine.abort_request(["a", "c", "nobody"])  # one running, one waiting
    assert sorted((o.request_id, o.outputs[0].finish_reason, o.finished) for o in ended) == [
        ("a", "abort", True),
        ("c", "abort", True),
    ]
    assert set(finish(engine)) == {"b"}
    assert engine.core.kv.num_used_blocks == 0
    assert engine.abort_request("a") == []


def test_aborting_before_the_forks_ends_the_request(tiny_model: Path) -> None:
    engine = make(tiny_model)
    engine.add_request("n", [1, 2, 3], SamplingParams(n=4))
    [output] = engine.abort_request("n")
    assert output.finished
    assert [c.finish_reason for c in output.outputs] == ["abort"]
    assert not engine.has_unfinished_requests()


def test_stop_string_ends_and_frees(tiny_model: Path) -> None:
    engine = make(tiny_model)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine.add_request("free", "hello", params)
    text = finish(engine)["free"].outputs[0].text
    stop = text[10:13]
    engine.add_request("stop", "hello", params.clone(stop=[stop]))
    stopped = finish(engine)["stop"]
    output = stopped.outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert stopped.metrics is not None
    assert stopped.metrics.total_s is not None
    assert output.text == text[: text.index(stop)]
    assert engine.core.kv.num_used_blocks == 0
    engine.add_request("kept", "hello", params.clone(stop=[stop], include_stop_str_in_output=True))
    assert finish(engine)["kept"].outputs[0].text == text[: text.index(stop) + len(stop)]


def test_streams_join_to_the_final_text(tiny_model: Path) -> None:
    engine = make(tiny_model)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    engine.add_request("whole", "Grüße 👋", params.clone(output_kind=OutputKind.FINAL_ONLY))
    whole = finish(engine)["whole"].outputs[0]
    engine.add_request("delta", "Grüße 👋", params.clone(output_kind=OutputKind.DELTA))
    pieces, tokens = [], []
    while engine.has_unfinished_requests():
        for output in engine.step():
            pieces.append(output.outputs[0].text)
            tokens += output.outputs[0].token_ids
    assert tokens == whole.token_ids
    assert "".join(pieces) == whole.text
    engine.add_request("all", "Grüße 👋", params)
    seen = ""
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.outputs[0].text.startswith(seen)
            seen = output.outputs[0].text
    assert seen == whole.text


def test_end_tokens(tiny_model: Path) -> None:
    engine = make(tiny_model)
    engine.add_request("free", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    tokens = finish(engine)["free"].outputs[0].token_ids
    end = tokens[4]
    first = tokens.index(end)
    engine.add_request("stop", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[end]))
    output = finish(engine)["stop"].outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (tokens[: first + 1], "stop", end)
    params = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[end], min_tokens=first + 2)
    engine.add_request("min", [1, 2, 3], params)
    assert len(finish(engine)["min"].outputs[0].token_ids) >= first + 2


def test_a_priority_is_refused_where_it_would_change_nothing(tiny_model: Path) -> None:
    engine = make(tiny_model)
    with pytest.raises(BadRequestError, match='make the engine with scheduling_policy="priority"') as refused:
        engine.add_request("x", "a", SamplingParams(max_tokens=1), priority=3)
    assert refused.value.param == "priority"
    engine.add_request("x", "a", SamplingParams(max_tokens=1), priority=0)
    assert len(finish(engine)) == 1


def test_the_first_and_the_last_priority(tiny_model: Path) -> None:
    engine = make(tiny_model, scheduling_policy="priority")
    ok = SamplingParams(max_tokens=1)
    for priority in (-(2**31), 2**31 - 1):
        engine.add_request(str(priority), "a", ok, priority=priority)
        with pytest.raises(BadRequestError, match="between -2147483648 and 2147483647"):
            engine.add_request("x", "a", ok, priority=priority + (1 if priority > 0 else -1))
    assert len(finish(engine)) == 2


def test_a_sequence_that_bans_all_its_tokens_ends_alone(tiny_model: Path) -> None:
    engine = make(tiny_model)
    (a,) = engine.tokenizer.encode("a", add_special_tokens=False)
    engine.add_request("stuck", "x", SamplingParams(max_tokens=9, allowed_token_ids=[a], bad_words=["aaa"]))
    engine.add_request("other", "x", SamplingParams(max_tokens=9, allowed_token_ids=[a]))
    outputs = finish(engine)
    stuck, other = outputs["stuck"].outputs[0], outputs["other"].outputs[0]
    assert (stuck.token_ids, stuck.finish_reason) == ([a, a], "banned")
    assert "no token is left" in (stuck.error or "")
    assert (other.token_ids, other.finish_reason) == ([a] * 9, "length")


def test_refused_requests_change_nothing(tiny_model: Path) -> None:
    engine = make(tiny_model, max_num_seqs=2)
    ok = SamplingParams(max_tokens=2)
    (a,) = engine.tokenizer.encode("a", add_special_tokens=False)
    cases: list[tuple[Any, SamplingParams, str]] = [
        ("", ok, "no tokens"),
        ([], ok, "no tokens"),
        ([999], ok, "0 to 319"),
        ([1.5], ok, "whole numbers"),
        ([0] * 256, ok, "length is 256 tokens"),
        (b"abc", ok, "text or a row of token ids"),
        (None, ok, "text or a row of token ids"),
        ({"prompt": "a", "image": 1}, ok, "image"),
        ({}, ok, "prompt_token_ids"),
        ({"prompt": "a", "cache_salt": 3}, ok, "cache_salt"),
        ({"prompt": "a", "cache_salt": "s" * 1025}, ok, "1,024 characters"),
        ("a", SamplingParams(n=3), "max_num_seqs"),
        ("a", SamplingParams(stop_token_ids=[320]), "ends at 319"),
        ("a", SamplingParams(logprobs=321), "-1"),
        ("a", SamplingParams(bad_words=["ab" * 64] * 70), "16,384 tokens together"),
        ("a", SamplingParams(min_tokens=1, stop_token_ids=range(320)), "min_tokens leave no token"),
        (
            "a",
            SamplingParams(min_tokens=1, stop_token_ids=[7, 8], allowed_token_ids=[8, 7, 7]),
            "allowed_token_ids and min_tokens leave no token",
        ),
        ("a", SamplingParams(bad_words=["a"], allowed_token_ids=[a]), "allowed_token_ids and bad_words leave no token"),
    ]
    for prompt, params, words in cases:
        with pytest.raises(BadRequestError, match=words):
            engine.add_request("x", prompt, params)
    engine.add_request("x", "a", ok)
    with pytest.raises(BadRequestError, match="in use"):
        engine.add_request("x", "b", ok)
    assert set(finish(engine)) == {"x"}


@pytest.mark.parametrize(
    ("prefix", "words"),
    [("short", r"pinned_prefixes\[0\] has 5 tokens, and only whole blocks of 16"), ([999] * 20, "999")],
)
def test_a_pinned_prefix_of_the_config_that_cannot_be_is_refused(tiny_model: Path, prefix: Any, words: str) -> None:
    with pytest.raises(QuireError, match=words):
        make(tiny_model, pinned_prefixes=[prefix])


def test_pinned_prefix_survives_pressure(tiny_model: Path) -> None:
    prefix = tuple(range(48))
    engine = make(tiny_model, pinned_prefixes=[prefix], kv_cache_memory_bytes=24 * 16 * 1024)
    assert engine.core.kv.stats.num_pinned == 3
    assert engine.stats.generation_tokens == 0  # warming is nobody's request
    rng = random.Random(1)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    for i in range(20):
        engine.add_request(str(i), [rng.randrange(256) for _ in range(100)], params)
    finish(engine)
    assert engine.core.kv.stats.num_evictions > 0
    engine.add_request("p", [*prefix, 1, 2], params)
    assert finish(engine)["p"].num_cached_tokens == 48
    assert engine.unpin_prefix(prefix) == 48


def test_reset_prefix_cache(tiny_model: Path) -> None:
    engine = make(tiny_model)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add_request("a", list(range(40)), params)
    engine.step()
    assert engine.reset_prefix_cache() is False  # a request holds blocks
    finish(engine)
    assert engine.reset_prefix_cache() is True
    engine.add_request("b", list(range(40)), params)
    assert finish(engine)["b"].num_cached_tokens == 0


def test_metrics_count_what_happened(tiny_model: Path) -> None:
    engine = make(tiny_model)
    for name in "ab":
        engine.add_request(name, list(range(40)), SamplingParams(max_tokens=5, ignore_eos=True))
        finish(engine)
    values = {(m.name, *m.labels.values()): m.value for m in engine.get_metrics()}
    assert values[("vllm:prompt_tokens_total",)] == 80
    assert values[("vllm:generation_tokens_total",)] == 10
    assert values[("vllm:prefix_cache_hits_total",)] == 32
    assert values[("vllm:request_success_total", "length")] == 2
    assert values[("vllm:num_requests_running",)] == 0
    assert values[("quire:kv_blocks",)] == engine.ledger.num_blocks
    assert values[("quire:steps_total",)] == engine.stats.num_steps == 10
    assert values[("vllm:num_requests_waiting_by_reason", "capacity")] == 0
    # Two prompts, of 40 and (32 are cached) 8 tokens, and eight decodes.
    assert values[("vllm:iteration_tokens_total",)] == 40 + 8 + 8
    assert [values[("vllm:iteration_tokens_total", le)] for le in ("1.0", "8.0", "32.0", "64.0", "+Inf")] == [
        *(8, 9, 9, 10, 10),
    ]


def test_request_metrics(tiny_model: Path) -> None:
    engine = make(tiny_model)
    engine.add_request("a", "hello", SamplingParams(max_tokens=5, ignore_eos=True))
    metrics = finish(engine)["a"].metrics
    assert metrics is not None
    assert metrics.queue_s is not None
    assert metrics.first_token_s is not None
    assert metrics.total_s is not None
    assert metrics.inter_token_s is not None
    assert 0 <= metrics.queue_s <= metrics.first_token_s <= metrics.total_s


def test_a_failed_step_kills_the_engine_with_its_cause(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(tiny_model)
    engine.add_request("a", "hello", SamplingParams(max_tokens=5))

    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(engine.core.executor, "submit", broken)
    with pytest.raises(EngineDeadError, match="boom"):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.check_health()
    with pytest.raises(EngineDeadError, match="boom"):
        engine.add_request("b", "hello", SamplingParams(max_tokens=5))
