"""The engine on CUDA: the same tokens as on a CPU, whatever graphs, overlap, preemption and swap do."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fakes
import pytest

from quire import LLMEngine, SamplingParams
from quire.cli.main import main
from quire.config import EngineConfig
from quire.errors import BadRequestError
from quire.lora.request import LoRARequest
from quire.outputs import RequestOutput
from quire.plan import StepPlan

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.write_model_with_margins(tmp_path_factory.mktemp("gpu"))


def make(weights: Path, **kwargs: Any) -> LLMEngine:
    values = {"kv_cache_memory_bytes": 4 << 20, "dtype": "float32"} | kwargs
    return LLMEngine.from_config(EngineConfig(model=str(weights), **values))


def requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(7)
    head = [rng.randrange(256) for _ in range(40)]
    found = []
    for i in range(count):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
        params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 40), ignore_eos=True, logprobs=2)
        found.append((head + prompt if i % 3 == 0 else prompt, params))
    return found


def run_all(
    engine: LLMEngine,
    work: list[tuple[list[int], SamplingParams]],
    adapters: Sequence[LoRARequest | None] = (None,),
) -> list[RequestOutput]:
    """adapters: the requests take them in turn."""
    for i, (prompt, params) in enumerate(work):
        engine.add_request(str(i), prompt, params, lora_request=adapters[i % len(adapters)])
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        engine.core.kv.check()
    assert engine.core.kv.num_used_blocks == 0
    return [done[str(i)] for i in range(len(work))]


def same_up_to_ties(ours: list[RequestOutput], theirs: list[RequestOutput], margin: float = 5e-3) -> None:
    """Tokens agree until the first step at which the likeliest two were too close for rounding to tell apart."""
    assert sum(same_until_a_tie(a, b, margin) for a, b in zip(ours, theirs, strict=True)) > 100


def same_until_a_tie(ours: RequestOutput, theirs: RequestOutput, margin: float = 5e-3) -> int:
    """How many tokens could be compared."""
    compared = 0
    logprobs = theirs.outputs[0].logprobs
    assert logprobs is not None
    for mine, truth, entry in zip(ours.outputs[0].token_ids, theirs.outputs[0].token_ids, logprobs, strict=True):
        first, second = sorted((v.logprob for v in entry.values()), reverse=True)[:2]
        if first - second < margin:
            break
        assert mine == truth, f"{mine} instead of {truth}, of which {entry}"
        compared += 1
    return compared


@pytest.fixture(scope="module")
def on_cpu(weights: Path) -> list[RequestOutput]:
    return run_all(make(weights, device="cpu", num_threads=1), requests(24))


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"enforce_eager": True},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"block_size": 4},
        {"block_size": 128},
        {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 24, "preemption": "recompute"},
        {"kv_cache_memory_bytes": 24 * 16 * 1024, "preemption": "swap", "swap_space_gb": 0.01},
    ],
    ids=str,
)
def test_the_cpus_tokens(weights: Path, on_cpu: list[RequestOutput], kwargs: dict[str, Any]) -> None:
    engine = make(weights, device="cuda", **kwargs)
    same_up_to_ties(run_all(engine, requests(24)), on_cpu)
    if "preemption" in kwargs:
        assert engine.core.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("level", ["host", "host and swap", "disk"])
def test_levels_below_bring_the_same_tokens(weights: Path, tmp_path: Path, level: str, dtype: str) -> None:
    """Chats that a small cache evicts between their turns: tokens of an engine that has no levels."""
    rng = random.Random(5)
    head = [rng.randrange(256) for _ in range(40)]
    chats = [head + [rng.randrange(256) for _ in range(rng.randint(1, 40))] for _ in range(12)]
    work = []
    for _ in range(3):
        for chat in chats:
            chat += [rng.randrange(256) for _ in range(rng.randint(1, 12))]
            params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 20), ignore_eos=True, logprobs=2)
            work.append((list(chat), params))
    sizes: dict[str, Any] = {"dtype": dtype, "kv_cache_memory_bytes": None, "num_gpu_blocks_override": 28}
    sizes["max_num_seqs"] = 4
    below = {
        "host": {"kv_offloading_size": 0.02},
        "host and swap": {"kv_offloading_size": 0.01, "swap_space_gb": 0.01, "preemption": "swap"},
        "disk": {"kv_disk_path": str(tmp_path), "kv_disk_size": 32 << 20},
    }
    expected = run_all(make(weights, device="cuda", **sizes), work)
    engine = make(weights, device="cuda", **sizes, **below[level])
    for store in engine.built.executor.executor.stores:
        store.load_s = lambda num_blocks: 0.0  # type: ignore[method-assign]  # else so small a model is computed
    for _ in range(2):
        found = run_all(engine, work)
        for ours, theirs in zip(found, expected, strict=True):
            same_until_a_tie(ours, theirs, 5e-3 if dtype == "float32" else 0.2)
        engine.core.settle(30.0)
        engine.core.kv.check()
    tiers = engine.core.kv.tiers
    assert tiers is not None and all(counters.num_loaded > 20 for counters in tiers.counters.levels.values())
    engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_a_prompts_layers_leave_while_its_step_runs(tmp_path: Path, dtype: str, enforce_eager: bool) -> None:
    """Two engines on one GPU. What arrives is, byte by byte, what was computed, and most of it before its step ended:
    the device is slowed down in each layer, so that threads which send could keep up."""
    import torch

    from quire.executor.stores import address_of
    from quire.scheduler.traffic import FetchReport, SendReport

    weights = fakes.write_tiny_model(tmp_path, num_hidden_layers=6, max_position_embeddings=2048)
    values: dict[str, Any] = {"dtype": dtype, "load_format": "dummy", "enforce_eager": enforce_eager}
    values |= {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 640, "max_num_seqs": 8}
    here, there = (make(weights, device="cuda", kv_listen=str(tmp_path / name), **values) for name in "ab")
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
    prompt = [(i * 31) % 251 for i in range(1400)]  # in chunks of more tokens than any captured step has
    stores, layer_hook = here.core.executor.worker.stores, here.core.executor.worker.stores.layer_hook
    hooked: list[int] = []

    def slow_hook(step: int) -> Any:
        hook = layer_hook(step)
        if hook is None:
            return None

        def on_written(layer: int) -> None:
            hooked.append(layer)
            hook(layer)
            torch.cuda._sleep(20_000_000)  # cycles: some 10 ms

        return on_written

    stores.layer_hook = slow_hook
    here.add_request("0", prompt, params)
    scheduler = here.core.scheduler
    scheduler.traffic.send(scheduler.requests["0"], address_of(there.core.executor.stores))
    reports: list[SendReport] = []
    done: list[RequestOutput] = []
    while not done:
        done += [output for output in here.step() if output.finished]
        reports += scheduler.traffic.take_reports()
    assert reports and not any(report.has_failed for report in reports) and reports[-1].num_tokens >= 1392
    assert hooked[:10] == [*range(5), *range(5)]
    usage = stores.stores[0].usage()
    # One layer in six is left by each chunk that runs layer by layer, and a little that is on its way.
    assert usage["num_bytes_beside"] > 0.6 * (usage["num_bytes_beside"] + usage["num_bytes_behind"])
    tokens = [*prompt, *done[0].outputs[0].token_ids]
    there.core.scheduler.traffic.fetch(1, tokens, None, None)
    fetched: list[FetchReport] = []
    while not fetched:
        there.step()
        fetched += there.core.scheduler.traffic.take_reports()
    assert fetched[0].num_tokens >= 1392
    torch.cuda.synchronize()
    caches = [engine.core.executor.worker.cache.device_blocks for engine in (here, there)]
    found = [{block.block_hash: block.block_id for block in engine.core.kv.cache.blocks()} for engine in (here, there)]
    assert len(found[1]) >= 1392 // 16
    for block_hash, block_id in found[1].items():
        assert torch.equal(caches[1][:, block_id], caches[0][:, found[0][block_hash]])
    [again] = run_all(there, [(prompt, params)])
    assert again.num_cached_tokens >= 1392
    same_until_a_tie(again, done[0], 5e-3 if dtype == "float32" else 0.2)
    for engine in (here, there):
        engine.core.settle(30.0)
        engine.core.kv.check()
        engine.close()


def test_a_lone_request_waits_on_the_device_for_what_is_loaded(weights: Path) -> None:
    """Its step is submitted with the load, behind which it runs: the tokens are those of a prompt that is computed."""
    engine = make(weights, device="cuda", kv_offloading_size=0.02)
    tiers, executor = engine.core.kv.tiers, engine.core.executor
    assert tiers is not None and tiers.host is not None
    tiers.host.load_s = lambda num_blocks: 0.0  # type: ignore[method-assign]  # else so small a model is computed
    plans: list[StepPlan] = []
    submit = executor.submit
    executor.submit = lambda plan: plans.append(plan) or submit(plan)  # type: ignore[method-assign, func-returns-value]
    rng = random.Random(4)
    for _ in range(12):
        params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 6), ignore_eos=True, logprobs=2)
        work = [([rng.randrange(256) for _ in range(rng.randint(33, 200))], params)]
        [computed] = run_all(engine, work)
        engine.core.settle(30.0)
        assert engine.reset_prefix_cache()
        before = len(plans)
        [loaded] = run_all(engine, work)
        assert plans[before].awaits_loads and loaded.num_cached_tokens >= 32
        same_until_a_tie(loaded, computed)
    engine.close()


def test_blocks_cross_the_link_whole(weights: Path) -> None:
    """More than the staging buffer holds, in runs and singly, there and back."""
    import torch

    from quire.executor import kv_cache
    from quire.plan import Move

    before, kv_cache._PIECE_BYTES = kv_cache._PIECE_BYTES, 5 * 16 * 1024
    try:
        engine = make(weights, device="cuda", kv_offloading_size=0.02)
    finally:
        kv_cache._PIECE_BYTES = before
    cache = engine.core.executor.worker.cache
    assert cache.host_blocks.is_pinned() and not cache.host_blocks.any()
    cache.device_blocks.normal_()
    blocks = cache.device_blocks.clone()
    num = min(40, cache.spare_block // 2, len(cache.host_blocks))
    hosts = list(range(num))
    random.Random(1).shuffle(hosts)
    hosts[: num // 2] = sorted(hosts[: num // 2])
    cache.move(Move(1, False, list(zip(range(num), hosts, strict=True))))
    cache.move(Move(2, True, list(zip(range(num, 2 * num), hosts, strict=True))))
    cache.forget_moves()
    assert torch.equal(cache.device_blocks[:, num : 2 * num], blocks[:, :num])
    engine.close()


def test_a_mixture_of_experts_has_the_cpus_tokens(tmp_path: Path) -> None:
    """With a shared expert and a layer without any; in graphs and, for prompts, without."""
    import torch
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    path = fakes.write_tiny_model(tmp_path)
    torch.manual_seed(0)
    shape = {
        "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 64, "initializer_range": 0.3, "num_hidden_layers": 3,
    }  # fmt: skip
    llama = {key: value for key, value in fakes.TINY_LLAMA.items() if key not in ("architectures", "model_type")}
    Qwen2MoeForCausalLM(Qwen2MoeConfig(**(llama | shape))).save_pretrained(path)
    expected = run_all(make(path, device="cpu", num_threads=1), requests(24))
    for kwargs in ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}):
        same_up_to_ties(run_all(make(path, device="cuda", **kwargs), requests(24)), expected)
    half = run_all(make(path, device="cuda", dtype="bfloat16"), requests(24))
    assert all(output.finished for output in half)


@pytest.mark.parametrize("measures", [False, True])
def test_an_8_bit_cache_holds_twice_the_blocks_and_stays_close(
    weights: Path, on_cpu: list[RequestOutput], measures: bool
) -> None:
    """Each token's logprob, given the same history, is near the float32 one; also with scales of the first requests,
    after which steps are captured."""
    wide = make(weights, device="cuda", dtype="bfloat16")
    narrow = make(weights, device="cuda", dtype="bfloat16", kv_cache_dtype="fp8", calculate_kv_scales=measures)
    assert narrow.ledger.num_blocks == 2 * wide.ledger.num_blocks
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    work = [(output.prompt_token_ids + output.outputs[0].token_ids, params) for output in on_cpu]
    found, exact = logprobs(run_all(narrow, work)), logprobs(run_all(wide, work))
    mean_difference = sum(abs(a - b) for a, b in zip(found, exact, strict=True)) / len(exact)
    assert mean_difference < 0.1 * abs(sum(exact) / len(exact))


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_8_bit_weights_stay_close(weights: Path, on_cpu: list[RequestOutput], kv: str) -> None:
    """In large steps, from graphs, and one at a time: each token's logprob is near the one of wide weights."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    work = [(output.prompt_token_ids + output.outputs[0].token_ids, params) for output in on_cpu]
    exact = logprobs(run_all(make(weights, device="cuda", dtype="bfloat16"), work))
    narrow = make(weights, device="cuda", dtype="bfloat16", quantization="fp8", kv_cache_dtype=kv)
    for outputs in (run_all(narrow, work), [run_all(narrow, [one])[0] for one in work]):
        found = logprobs(outputs)
        mean_difference = sum(abs(a - b) for a, b in zip(found, exact, strict=True)) / len(exact)
        assert mean_difference < 0.15 * abs(sum(exact) / len(exact))
    more = requests(48)
    for output, (_, wanted) in zip(run_all(narrow, more), more, strict=True):
        assert len(output.outputs[0].token_ids) == wanted.max_tokens


def test_a_checkpoint_in_8_bits_is_served_as_the_cpu_reads_it(weights: Path, tmp_path: Path) -> None:
    """The same file on both: the CPU has its numbers exactly, the GPU rounds only what it multiplies them with."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    path = tmp_path / "fp8"
    shutil.copytree(weights, path)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        scales = tensors[name].abs().amax(dim=1, keepdim=True) / 448
        tensors |= {name: (tensors[name] / scales).to(torch.float8_e4m3fn), f"{name}_scale": scales}
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    (path / "config.json").write_text(json.dumps(config))
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    work = [(prompt, params) for prompt, _ in requests(12)]
    exact = logprobs(run_all(make(path, device="cpu"), work))
    gpu = make(path, device="cuda", dtype="bfloat16")
    found = logprobs([run_all(gpu, [one])[0] for one in work])
    mean_difference = sum(abs(a - b) for a, b in zip(found, exact, strict=True)) / len(exact)
    assert mean_difference < 0.1 * abs(sum(exact) / len(exact))


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    """Logprobs of the prompts' tokens."""
    found = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        found += [next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry is not None]
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_with_prompts_give_the_same_from_graphs(weights: Path, dtype: str) -> None:
    """All of their shapes captured beforehand, against none."""
    work = requests(40)
    with_graphs, without = make(weights, dtype=dtype, max_num_seqs=24), make(weights, dtype=dtype, enforce_eager=True)
    while with_graphs.core.prepare_more():
        pass
    assert with_graphs.core.executor.worker.graphs.num_captures > 20
    # A few at a time, so that prompts come while others decode.
    for start in range(0, len(work), 8):
        ours, theirs = (run_all(engine, work[start : start + 8]) for engine in (with_graphs, without))
        for mine, other in zip(ours, theirs, strict=True):
            if dtype == "float32":
                same_until_a_tie(mine, other)
            assert len(mine.outputs[0].token_ids) == len(other.outputs[0].token_ids)


def test_a_capture_without_memory_leaves_the_others_right(weights: Path, on_cpu: list[RequestOutput]) -> None:
    import torch

    from quire.executor.captured import is_out_of_memory

    engine = make(weights, device="cuda")
    memory, stream = engine.core.executor.worker.graphs.memory, torch.cuda.current_stream()
    with pytest.raises(RuntimeError) as caught:
        memory.capture(lambda: [torch.ones(size, dtype=torch.uint8, device="cuda") for size in (1, 1 << 44)])
    assert is_out_of_memory(caught.value) and torch.cuda.current_stream() == stream
    before = memory.num_captures
    while engine.core.prepare_more():
        pass
    assert memory.num_captures > before + 20
    same_up_to_ties(run_all(engine, requests(24)), on_cpu)


@pytest.mark.parametrize("eager", [False, True])
def test_steps_of_many_sizes_take_no_more_memory_than_the_largest(weights: Path, eager: bool) -> None:
    import torch

    engine = make(weights, dtype="bfloat16", enforce_eager=eager, max_num_seqs=64, max_num_batched_tokens=4096)
    while engine.core.prepare_more():
        pass
    before = torch.cuda.memory_reserved()
    rng = random.Random(3)
    for _ in range(30):
        work = [
            ([rng.randrange(200) for _ in range(rng.randint(1, 60))], SamplingParams(max_tokens=rng.randint(1, 6)))
            for _ in range(rng.randint(1, 64))
        ]
        run_all(engine, work)
    assert torch.cuda.memory_reserved() - before <= 8 << 20


def test_a_plan_has_the_engines_blocks(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the block, for what the last start served."""
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))
    engine = make(weights, dtype="bfloat16", kv_cache_memory_bytes=None, gpu_memory_utilization=0.08)
    capsys.readouterr()
    assert main(["plan", str(weights), "--dtype", "bfloat16", "--gpu-memory-utilization", "0.08", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["exact"] and plan["chosen"]["ledger"]["num_blocks"] == engine.ledger.num_blocks


def test_bf16_runs_everything_at_once(weights: Path) -> None:
    engine = make(weights, device="cuda", dtype="bfloat16")
    work = requests(12)
    work += [
        (
            list(range(30)),
            SamplingParams(
                n=3, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=1, max_tokens=20, repetition_penalty=1.1
            ),
        )
    ]
    outputs = run_all(engine, work)
    assert len(outputs[-1].outputs) == 3
    assert all(c.finish_reason in ("length", "stop") for o in outputs for c in o.outputs)


def test_ten_thousand_requests_leave_nothing_behind(weights: Path) -> None:
    """Random lengths, aborts at random moments, preemption by swap and recompute: memory steady, outputs right."""
    import torch

    rng = random.Random(11)
    engine = make(weights, device="cuda", kv_cache_memory_bytes=96 * 16 * 1024, swap_space_gb=0.01, max_num_seqs=64)
    kept: list[RequestOutput] = []
    added = 0
    memory: list[int] = []
    while added < 10_000 or engine.has_unfinished_requests():
        while added < 10_000 and engine.get_num_unfinished_requests() < 96:
            prompt = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
            keep = added % 100 == 0
            params = SamplingParams(
                temperature=0.0 if keep else 0.8,
                max_tokens=rng.randint(1, 30),
                ignore_eos=True,
                logprobs=2 if keep else None,
                detokenize=False,
            )
            engine.add_request(f"{'kept' if keep else 'r'}{added}", prompt, params)
            added += 1
        if rng.random() < 0.2:
            engine.abort_request(f"r{rng.randrange(added)}")
        kept += [o for o in engine.step() if o.finished and o.request_id.startswith("kept")]
        if engine.stats.num_steps % 500 == 0:
            engine.core.kv.check()
            memory.append(torch.cuda.memory_allocated())
    assert engine.core.kv.num_used_blocks == 0
    assert engine.core.scheduler.stats.num_swap_preemptions > 0
    assert max(memory[2:]) - min(memory[2:]) < 32 << 20
    assert len(kept) == 100
    alone = make(weights, device="cpu", num_threads=1)
    for i, output in enumerate(kept):
        params = SamplingParams(
            temperature=0.0, max_tokens=len(output.outputs[0].token_ids), ignore_eos=True, logprobs=2, detokenize=False
        )
        alone.add_request(str(i), output.prompt_token_ids, params)
    done: dict[str, RequestOutput] = {}
    while alone.has_unfinished_requests():
        done |= {o.request_id: o for o in alone.step() if o.finished}
    same_up_to_ties(kept, [done[str(i)] for i in range(len(kept))])


@pytest.mark.parametrize("keep_kv", [False, True])
def test_a_sleeping_engine_gives_its_memory_back_and_wakes_with_its_graphs(weights: Path, keep_kv: bool) -> None:
    import torch

    engine = make(
        weights,
        dtype="bfloat16",
        enable_sleep_mode=True,
        kv_cache_memory_bytes=1 << 30,
        max_num_seqs=16,
    )
    work = requests(8)
    before = run_all(engine, work)
    worker = engine.built.executor.executor.worker  # type: ignore[union-attr]
    addresses = [layer.data_ptr() for layer in worker.cache.layers]
    for _ in range(2):
        used = torch.cuda.mem_get_info()[0]
        engine.sleep(keep_kv=keep_kv)
        assert engine.is_sleeping() and torch.cuda.mem_get_info()[0] - used >= 1 << 30
        with pytest.raises(BadRequestError, match="sleeps"):
            engine.add_request("asleep", [1], SamplingParams())
        engine.wake_up()
        assert [layer.data_ptr() for layer in worker.cache.layers] == addresses
        after = run_all(engine, work)
        assert [one.outputs[0].token_ids for one in after] == [one.outputs[0].token_ids for one in before]
        assert bool(after[0].num_cached_tokens) == keep_kv
    engine.close()
