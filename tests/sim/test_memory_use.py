"""The account of KV memory against a map of every slot, on runs whose every read and write is checked."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from sim_executor import verified

from quire.sim import CostModel, SimRequest, StepView
from quire.sim.memory_use import Usage, run_policy
from quire.sim.reservation import Allocator, Buddy, FirstFit, next_power_of_two, reservation_policies

NUM_SLOTS, MAX_LEN = 210, 48
COST = CostModel()


def arrivals(num: int = 40) -> list[SimRequest]:
    rng = random.Random(3)
    return [SimRequest(0.0, rng.randint(1, 20), rng.randint(1, 24)) for _ in range(num)]


@pytest.mark.parametrize("allocator", [Buddy, FirstFit])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_regions_slot_by_slot(index: int, allocator: Callable[[int], Allocator]) -> None:
    policy = reservation_policies(MAX_LEN)[index]
    checked = 0

    def look(view: StepView, usage: Usage) -> None:
        nonlocal checked
        slots = ["free"] * NUM_SLOTS
        for seq in view.running:
            admission = tables[seq.seq_id]
            prompt, output = seq.num_prompt_tokens, seq.request.max_tokens
            asked = {"max": MAX_LEN, "pow2": prompt + next_power_of_two(output), "oracle": prompt + output - 1}
            num_asked = min(MAX_LEN, asked[policy.key])
            num_given = next_power_of_two(num_asked) if allocator is Buddy else num_asked
            for i in range(num_given):
                assert slots[admission + i] == "free", "two requests have one slot"
                if i < seq.num_computed_tokens:
                    slots[admission + i] = "token"
                elif i < prompt + output - 1:
                    slots[admission + i] = "reserved"
                else:
                    slots[admission + i] = "internal" if i < num_asked else "rounding"
        counts = (slots.count(kind) for kind in ("token", "reserved", "internal", "rounding", "free"))
        assert usage == Usage(*counts)
        checked += 1

    tables: dict[int, int] = {}

    def follow(view: StepView, usage: Usage) -> None:
        starts = {admission.row: admission.tables[0][1][0] for admission in view.plan.admitted}
        tables.update({seq.seq_id: starts[seq.row] for seq in view.running if seq.row in starts})
        look(view, usage)

    run = run_policy(
        arrivals(),
        policy,
        num_slots=NUM_SLOTS,
        max_model_len=MAX_LEN,
        cost=COST,
        allocator=allocator,
        make_executor=verified(COST),
        on_step=follow,
    )
    assert checked == run.num_steps > 20
    assert run.num_preemptions == 0


def test_blocks_slot_by_slot() -> None:
    block_size = 4
    tables: dict[int, list[int]] = {}

    def look(view: StepView, usage: Usage) -> None:
        by_row = {seq.row: seq for seq in view.running}
        for admission in view.plan.admitted:
            tables[by_row[admission.row].seq_id] = list(admission.tables[0][1])
        for row, _, new in view.plan.appended:
            tables[by_row[row].seq_id] += new
        slots = ["free"] * (NUM_SLOTS // block_size * block_size)
        for seq in view.running:
            for i, block in enumerate(tables[seq.seq_id]):
                for offset in range(block_size):
                    assert slots[block * block_size + offset] == "free"
                    is_token = i * block_size + offset < seq.num_computed_tokens
                    slots[block * block_size + offset] = "token" if is_token else "internal"
        assert usage == Usage(slots.count("token"), 0, slots.count("internal"), 0, slots.count("free"))

    run = run_policy(
        arrivals(),
        None,
        num_slots=NUM_SLOTS,
        max_model_len=MAX_LEN,
        cost=COST,
        block_size=block_size,
        make_executor=verified(COST),
        on_step=look,
    )
    assert run.usage.tokens > 70


def test_averages_by_hand() -> None:
    """Three requests of 4 in and 4 out, room for one region of 8: they run one after the other."""
    one_by_one = [SimRequest(0.0, 4, 4)] * 3
    policy = reservation_policies(8)[0]
    run = run_policy(one_by_one, policy, num_slots=10, max_model_len=8, cost=COST, allocator=FirstFit)
    assert (run.width, run.max_width, run.num_steps) == (1.0, 1, 12)
    # 8 steps have somebody waiting; the first fifth of them, one, is not counted. Tokens held: 4 5 6 7, 4 5 6 7.
    assert run.usage.tokens == pytest.approx(100 * (5 + 6 + 7 + 4 + 5 + 6 + 7) / 7 / 10)
    assert run.usage.internal == pytest.approx(10.0)  # the eighth slot: the last token sampled needs no KV
    assert run.usage.free == pytest.approx(20.0)
