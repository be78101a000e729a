"""Block arithmetic of traffic, against counting and against the real scheduler."""

from __future__ import annotations

import random

import pytest

from quire.kv import KVManager
from quire.lab.traffic import Kind, fit_mix, mix_needs
from quire.scheduler import SchedulerConfig
from quire.sim import CostModel, SimRequest, SimRun, StepView


@pytest.mark.parametrize("block_size", [4, 16, 128])
@pytest.mark.parametrize(("prompt_len", "output_len"), [(1, 1), (16, 1), (15, 2), (17, 40), (300, 129)])
def test_sums_are_what_counting_gives(prompt_len: int, output_len: int, block_size: int) -> None:
    kind = Kind(prompt_len, output_len)
    held = [prompt_len + i for i in range(output_len)]  # tokens with KV in each of its steps
    assert kind.block_steps(block_size) == sum(-(-n // block_size) for n in held)
    assert kind.token_steps() == sum(held)
    assert kind.blocks_at_end(block_size) == -(-held[-1] // block_size)


def test_needs_of_a_mix_by_hand() -> None:
    # One holds 1 block in 2 steps; the other, three times as rare, 2 blocks in each of 12.
    needs = mix_needs([Kind(2, 2, 3.0), Kind(5, 4, 1.0)], 4)
    assert needs.mean_blocks == pytest.approx((3 * 2 * 1 + 4 * 2) / (3 * 2 + 4))
    assert needs.max_blocks == 2
    tokens, slots = 3 * (2 + 3) + (5 + 6 + 7 + 8), 4 * (3 * 2 + 8)
    assert needs.waste_percent == pytest.approx(100 * (1 - tokens / slots))
    fit = fit_mix(needs, 101, 1)
    assert (fit.always, fit.typical) == (50, int(100 / needs.mean_blocks))


def test_as_many_run_at_once_as_was_foretold() -> None:
    """A long queue through the real scheduler: the mean width is the typical one, within the noise of lengths."""
    mix = [Kind(40, 60, 3.0), Kind(200, 100, 1.0)]
    num_blocks = 500
    rng = random.Random(0)
    kinds = rng.choices(mix, [kind.share for kind in mix], k=500)
    kv = KVManager(num_blocks=num_blocks, block_size=16, enable_prefix_caching=False)
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=4096, max_model_len=400, preemption="recompute")
    run = SimRun.build(kv, config, cost=CostModel())
    widths: list[int] = []

    def look(view: StepView) -> None:
        if view.num_waiting:
            widths.append(len(view.running))

    run.run([SimRequest(0.0, kind.prompt_len, kind.output_len) for kind in kinds], on_step=look)
    steady = widths[len(widths) // 4 :]
    fit = fit_mix(mix_needs(mix, 16), num_blocks, kv.num_watermark_blocks)
    assert sum(steady) / len(steady) == pytest.approx(fit.typical, rel=0.1)
    assert min(steady) >= fit.always
