"""Costs by arithmetic: against what one H200 measured, and in the right direction for ranks, stages and links."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.lab.shapes import read_model_spec
from quire.models.spec import ExpertsSpec
from quire.sim.devices import DEVICES, Efficiency, all_reduce_s, read_devices, send_s
from quire.sim.roofline import RooflineCost

SPEC = read_model_spec("llama-3.1-8b")
H200 = DEVICES["h200"]


def decode_s(cost: RooflineCost, num: int, context: int) -> float:
    return cost.step_s([1] * num, [context] * num)


@pytest.mark.parametrize(
    ("counts", "starts", "measured_ms"),
    [
        ([1], [256], 4.18),
        ([1] * 16, [136] * 16, 4.43),
        ([1] * 256, [843] * 256, 14.8),
        ([2000], [0], 45.0),
        ([1] * 64 + [320], [400] * 64 + [0], 10.9),
    ],
)
def test_an_h200s_steps_are_within_a_tenth_of_what_was_measured(
    counts: list[int], starts: list[int], measured_ms: float
) -> None:
    assert 1e3 * RooflineCost(SPEC, H200).step_s(counts, starts) == pytest.approx(measured_ms, rel=0.1)


def test_ranks_divide_reading_and_pay_for_sums() -> None:
    alone, two, eight = (RooflineCost(SPEC, H200, tensor_parallel=n) for n in (1, 2, 8))
    assert (
        decode_s(alone, 32, 1000) > decode_s(two, 32, 1000) > decode_s(eight, 32, 1000) > decode_s(alone, 32, 1000) / 8
    )
    assert alone.network_s(32) == 0 < two.network_s(32)
    slow = RooflineCost(SPEC, replace(H200, has_fast_link=False, link_gb_per_s=25.0), tensor_parallel=2)
    assert slow.step_s([4096], [0]) > two.step_s([4096], [0])


def test_the_sum_is_one_shot_for_small_messages_and_shares_the_work_for_large_ones() -> None:
    assert all_reduce_s(H200, 1, 1e6) == (0.0, "none")
    assert all_reduce_s(H200, 8, 8 * 1024)[1] == "one-shot"
    assert all_reduce_s(H200, 8, 64 << 20)[1] != "one-shot"
    assert all_reduce_s(DEVICES["l4"], 8, 64 << 20)[1] == "ring"


def test_a_full_pipe_raises_throughput_and_an_empty_one_is_a_bubble() -> None:
    """Stages bring memory, not speed, to a single sequence; a wide prefill gains their arithmetic."""
    alone, staged = RooflineCost(SPEC, H200), RooflineCost(SPEC, H200, pipeline_parallel=4)
    assert decode_s(staged, 1, 500) >= decode_s(alone, 1, 500)
    assert staged.step_s([8192], [0]) < 0.3 * alone.step_s([8192], [0])
    assert decode_s(staged, 512, 1000) < decode_s(alone, 512, 1000) / 2


def test_context_adds_to_a_decode_what_the_leaps_assume() -> None:
    cost = RooflineCost(SPEC, H200, tensor_parallel=2, pipeline_parallel=2)
    assert decode_s(cost, 8, 1001) - decode_s(cost, 8, 1000) == pytest.approx(8 * cost.kv_token_s)


def test_bytes_across_machines_take_longer() -> None:
    assert send_s(H200, 1e6, is_within_machine=False) > send_s(H200, 1e6, is_within_machine=True)


def test_the_table_can_be_edited(tmp_path: Path) -> None:
    path = tmp_path / "devices.json"
    path.write_text(
        json.dumps(
            {
                "h200": {"price_per_hour": 2.0},
                "mine": {"memory_gib": 40, "tb_per_s": 1, "tflop_per_s": 100, "link_gb_per_s": 50, "price_per_hour": 1},
            }
        )
    )
    found = read_devices(path)
    assert found["h200"] == replace(H200, price_per_hour=2.0) and found["mine"].per_machine == 8
    for wrong in ('{"h200": {"price": 1}}', '{"new": {"memory_gib": 4}}', "[]", "x", '{"h200": {"tb_per_s": 0}}'):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="devices"):
            read_devices(path)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    """With all of them chosen, experts are a dense MLP in pieces; with few, wide steps read more than narrow ones."""
    chosen_by_all = ExpertsSpec(num_experts=8, top_k=8, intermediate_size=SPEC.intermediate_size // 8, normalizes=True)
    layers = tuple(replace(layer, has_experts=True) for layer in SPEC.layers)
    free = replace(Efficiency(), experts_layer_s=0.0)
    dense = RooflineCost(SPEC, H200)
    for num in (1, 256):
        pieces = RooflineCost(replace(SPEC, layers=layers, experts=chosen_by_all), H200, efficiency=free)
        # Products in pieces do not hide each other's reading as one does, and a router is multiplied, too.
        assert decode_s(dense, num, 100) < decode_s(pieces, num, 100) < 1.1 * decode_s(dense, num, 100)

    few = replace(chosen_by_all, num_experts=64, top_k=2)
    mixed = RooflineCost(replace(SPEC, layers=layers, experts=few), H200, efficiency=free)
    assert decode_s(mixed, 1, 100) < decode_s(dense, 1, 100) / 1.5  # a quarter of the MLPs' numbers
    assert decode_s(mixed, 256, 100) > 3 * decode_s(dense, 256, 100) / 1.5  # nearly all of eight times as many


def test_a_mixture_of_experts_decodes_as_fast_as_an_h200_did() -> None:
    """Qwen3-30B-A3B's shape, 16 sequences: 1,465 to 1,480 tokens/s."""
    spec = replace(
        SPEC,
        vocab_size=151_936,
        hidden_size=2_048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        layers=tuple(replace(SPEC.layers[0], has_experts=True) for _ in range(48)),
        experts=ExpertsSpec(num_experts=128, top_k=8, intermediate_size=768, normalizes=True),
    )
    assert 16 / decode_s(RooflineCost(spec, H200), 16, 72) == pytest.approx(1_470, rel=0.1)
