"""Which layers share blocks, and that engines compute the same with and without groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest

from quire import LLM, SamplingParams
from quire.models.architectures import spec_from_config
from quire.models.kv_layout import KVLayout, kv_layout
from quire.models.spec import LayerSpec, ModelSpec

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 6,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
}
SMALL = {"kv_cache_memory_bytes": 130 << 10, "max_model_len": 120, "max_num_batched_tokens": 16, "max_num_seqs": 8}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 12}


def spec_of(windows: list[int | None]) -> ModelSpec:
    spec = spec_from_config(fakes.TINY_LLAMA, source="test")
    layers = tuple(LayerSpec(rope=spec.layers[0].rope, window=window) for window in windows)
    return replace(spec, num_layers=len(layers), layers=layers)


def test_one_group_where_all_layers_are_alike() -> None:
    assert kv_layout(spec_of([None] * 4), None) == KVLayout((None,), 4, (0, 0, 0, 0), (0, 1, 2, 3))
    assert kv_layout(spec_of([64] * 4), None).windows == (64,)
    assert kv_layout(spec_of([64, None] * 2), 64).windows == (None,)  # no sequence is longer than the window


def test_groups_of_equal_size_full_attention_first() -> None:
    layout = kv_layout(spec_of([8, 8, 8, 8, 8, None] * 3), None)
    assert (layout.windows, layout.num_slots) == ((None, 8, 8, 8, 8, 8), 3)
    assert layout.groups[5] == layout.groups[11] == layout.groups[17] == 0
    for group in range(6):
        assert sorted(s for g, s in zip(layout.groups, layout.slots, strict=True) if g == group) == [0, 1, 2]


def test_a_little_padding_saves_groups() -> None:
    layout = kv_layout(spec_of([8] * 22 + [None] * 4), None)  # as in Gemma 3 1B
    assert (layout.num_slots, len(layout.windows)) == (4, 1 + 6)
    layout = kv_layout(spec_of([8] * 5 + [None] * 4), None)  # a third would be empty
    assert layout.num_slots == 1


@pytest.mark.parametrize(("config", "num_groups"), [(QWEN, 6), (MISTRAL, 1)], ids=["qwen", "mistral"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {**SMALL, "preemption": "recompute"},
        {**SMALL, "preemption": "swap", "swap_space_gb": 0.01},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_the_same_tokens_with_and_without_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], num_groups: int, settings: dict[str, Any]
) -> None:
    model = str(fakes.write_tiny_model(tmp_path / "model", **config))
    prompts = [[(7 * i + 3 * j) % 250 for j in range(5 + 9 * i)] for i in range(9)] + [[1, 2, 3] * 25]
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=3, ignore_eos=True, n=2)

    def run(**more: Any) -> tuple[LLM, list[Any]]:
        llm = LLM(model=model, load_format="dummy", device="cpu", num_threads=1, block_size=4, seed=1, **more)
        outputs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]  # the second finds prefixes
        llm.llm_engine.core.kv.check()
        return llm, [[c.token_ids for c in output.outputs] for each in outputs for output in each]

    grouped, ours = run(**{"kv_cache_memory_bytes": 8 << 20, **settings})
    assert len(grouped.llm_engine.core.kv.windows) == num_groups
    if "preemption" in settings and num_groups > 1:
        assert grouped.llm_engine.core.scheduler.stats.num_preemptions > 0
    whole = lambda spec, _: KVLayout((None,), spec.num_layers, (0,) * spec.num_layers, tuple(range(spec.num_layers)))  # noqa: E731
    monkeypatch.setattr("quire.executor.build.kv_layout", whole)
    _, theirs = run(kv_cache_memory_bytes=8 << 20)
    assert ours == theirs
