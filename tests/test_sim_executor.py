"""The simulated executor keeps the contract, and notices plans that break it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sim_executor import SimExecutor
from sim_language import ToyLanguage

from quire.params import SamplingSpec
from quire.plan import Admission, Fork, Move, Spans, StepPlan
from quire.request import FinishReason
from quire.sim import CostModel, SimClock

SPEC = SamplingSpec(temperature=0.0)


def executor(**fields: object) -> SimExecutor:
    return SimExecutor(**{"num_blocks": 8, "num_host_blocks": 4, "block_size": 4, "max_num_seqs": 4, **fields})


def admission(
    row: int, tokens: list[int], blocks: list[int], computed: int = 0, spec: SamplingSpec = SPEC
) -> Admission:
    return Admission(row, tokens, computed, len(tokens), [(0, blocks)], spec)


def one_span(row: int, num_tokens: int, samples: bool = True) -> Spans:
    return Spans([row], [num_tokens], [samples])


def run(sim: SimExecutor, plan: StepPlan) -> list[list[int]]:
    return sim.collect(sim.submit(plan)).tokens


def started() -> SimExecutor:
    """Row 0 has six computed tokens in blocks 0 and 1, and a seventh that it sampled."""
    sim = executor()
    run(sim, StepPlan(0, admitted=[admission(0, [1, 2, 3, 4, 5, 6], [0, 1])], spans=one_span(0, 6)))
    return sim


def test_tokens_depend_on_the_history_and_the_spec_alone() -> None:
    whole, chunked = executor(), executor()
    prompt = [1, 2, 3, 4, 5, 6]
    [[a]] = run(whole, StepPlan(0, admitted=[admission(0, prompt, [0, 1])], spans=one_span(0, 6)))
    assert run(chunked, StepPlan(0, admitted=[admission(3, prompt, [5, 2])], spans=one_span(3, 4, False))) == []
    [[b]] = run(chunked, StepPlan(1, spans=one_span(3, 2)))
    assert a == b
    [[c]] = run(chunked, StepPlan(2, spans=one_span(3, 1)))
    again = executor()
    [[d]] = run(again, StepPlan(0, admitted=[admission(0, [*prompt, a], [0, 1])], spans=one_span(0, 7)))
    assert c == d


def test_seed_and_index_make_a_difference_unless_greedy() -> None:
    language = ToyLanguage()
    specs = [SamplingSpec(seed=s, index=i) for s in range(3) for i in range(3)]
    assert len({language.next_token(99, spec, 0) for spec in specs}) == 9
    assert language.next_token(99, SamplingSpec(temperature=0, seed=1), 0) == language.next_token(99, SPEC, 0)


def test_end_tokens_are_banned_until_min_tokens_are_out() -> None:
    language = ToyLanguage(vocab_size=2)
    spec = SamplingSpec(temperature=0.0, min_tokens=3, end_token_ids=(0,))
    tokens = {n: {language.next_token(f, spec, n) for f in range(50)} for n in (0, 2, 3)}
    assert tokens == {0: {1}, 2: {1}, 3: {0, 1}}


def test_forks_share_tokens_and_table_and_sample_on_their_own() -> None:
    sim = executor()
    plan = StepPlan(
        0,
        admitted=[admission(0, [1, 2, 3], [0], spec=SamplingSpec(seed=5, index=0))],
        spans=one_span(0, 3),
        forks=[Fork(0, 2, SamplingSpec(seed=5, index=1))],
    )
    [[a], [b]] = run(sim, plan)
    assert a != b
    row, fork = sim.rows[0], sim.rows[2]
    assert row is not None and fork is not None
    assert [table.block_ids for table in row.tables + fork.tables] == [[0], [0]]
    assert (row.token_ids, fork.token_ids) == ([1, 2, 3, a], [1, 2, 3, b])


def test_swapped_blocks_come_back_elsewhere() -> None:
    sim = started()
    row = sim.rows[0]
    assert row is not None
    tokens = list(row.token_ids)
    assert run(sim, StepPlan(1, released=[0], moves=[Move(0, False, [(0, 3), (1, 2)])])) == []
    back = admission(0, tokens, [6, 5], computed=6)
    assert run(sim, StepPlan(2, moves=[Move(1, True, [(6, 3), (5, 2)])])) == []
    assert len(run(sim, StepPlan(3, admitted=[back], spans=one_span(0, 1)))) == 1


# -- plans that break the contract


def plan_of_row_0(**fields: object) -> StepPlan:
    return StepPlan(1, **{"spans": one_span(0, 1), **fields})


BROKEN: dict[str, tuple[Callable[[], StepPlan], str]] = {
    "a span on a free row": (lambda: plan_of_row_0(spans=one_span(1, 1)), "row 1 is named but holds nothing"),
    "a release of a free row": (lambda: plan_of_row_0(released=[2]), "row 2 is named but holds nothing"),
    "a token that is not there": (lambda: plan_of_row_0(spans=one_span(0, 2)), "has no token at 7"),
    "an empty span": (lambda: plan_of_row_0(spans=one_span(0, 0)), "empty span"),
    "a row twice": (lambda: plan_of_row_0(spans=Spans([0, 0], [1, 1], [True, True])), "two spans"),
    "a live row given out": (lambda: plan_of_row_0(admitted=[admission(0, [1], [4])]), "before it was released"),
    "drafts that the span has no room for": (
        lambda: plan_of_row_0(spans=Spans([0], [1], [True], {0: [7]})),
        "1 tokens and drafts",
    ),
    "drafts beyond the table": (
        lambda: plan_of_row_0(spans=Spans([0], [4], [True], {0: [7, 7, 7]})),
        "room for 8 tokens, its span ends at 10",
    ),
    "a table too short": (
        lambda: plan_of_row_0(admitted=[admission(1, [1] * 5, [4])], spans=one_span(1, 5)),
        "room for 4 tokens, its span ends at 5",
    ),
    "a block twice in a table": (lambda: plan_of_row_0(admitted=[admission(1, [1] * 5, [4, 4])]), "a block twice"),
    "a write into a block of another": (
        lambda: plan_of_row_0(admitted=[admission(1, [9, 9], [1])], spans=one_span(1, 2)),
        "writes block 1, which row 0",
    ),
    "a read of nothing": (
        lambda: plan_of_row_0(admitted=[admission(1, [1, 2, 3, 4, 5, 7], [4, 5], computed=4)], spans=one_span(1, 2)),
        "reads position 0 in block 4: never written",
    ),
    "a read of another prefix": (
        lambda: plan_of_row_0(admitted=[admission(1, [1, 2, 3, 9, 5, 7], [0, 5], computed=4)], spans=one_span(1, 2)),
        "reads position 3 in block 0: of another prefix",
    ),
    "two copies to one block": (lambda: plan_of_row_0(copies=[(0, 4), (1, 4)]), "write a block twice"),
    "a step left out": (lambda: StepPlan(5, spans=one_span(0, 1)), "step 5 after 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plans_are_noticed(name: str) -> None:
    make_plan, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message):
        started().submit(make_plan())


def test_a_sound_plan_passes_the_same_checks() -> None:
    shares = admission(1, [1, 2, 3, 4, 5, 7], [0, 5], computed=4)
    plan = plan_of_row_0(admitted=[shares], spans=Spans([0, 1], [1, 2], [True, True]))
    assert len(run(started(), plan)) == 2


def test_room_is_needed_before_a_write() -> None:
    sim = started()
    for step in (1, 2):
        run(sim, StepPlan(step, spans=one_span(0, 1)))
    with pytest.raises(AssertionError, match="room for 8 tokens"):
        sim.submit(StepPlan(3, spans=one_span(0, 1)))


def test_a_missed_copy_on_write_is_noticed() -> None:
    def forked() -> SimExecutor:
        sim = executor()
        run(
            sim,
            StepPlan(
                0,
                admitted=[admission(0, [1, 2, 3], [0], spec=SamplingSpec(seed=5))],
                spans=one_span(0, 3),
                forks=[Fork(0, 1, SamplingSpec(seed=5, index=1))],
            ),
        )
        return sim

    both = Spans([0, 1], [1, 1], [True, True])
    run(forked(), StepPlan(1, copies=[(0, 4)], remapped=[(1, 0, 0, 4)], spans=both))
    with pytest.raises(AssertionError, match="writes block 0, which row 1"):
        forked().submit(StepPlan(1, spans=both))
    with pytest.raises(AssertionError, match="reads position 0 in block 4: never written"):
        forked().submit(StepPlan(1, remapped=[(1, 0, 0, 4)], spans=both))


def test_a_block_given_away_before_its_transfer_is_done_is_noticed() -> None:
    def swap_and_return(other_blocks: list[int]) -> None:
        sim = executor(transfer_steps=1)
        run(sim, StepPlan(0, admitted=[admission(0, [1, 2, 3], [0])], spans=one_span(0, 3)))
        row = sim.rows[0]
        assert row is not None
        other = admission(1, [7, 8], other_blocks)
        run(sim, StepPlan(1, released=[0], moves=[Move(0, False, [(0, 2)])], admitted=[other], spans=one_span(1, 2)))
        back = admission(0, row.token_ids, [5], computed=3)
        run(sim, StepPlan(2, moves=[Move(1, True, [(5, 2)])]))
        run(sim, StepPlan(3))
        run(sim, StepPlan(4, admitted=[back], spans=one_span(0, 1)))

    swap_and_return([4])
    with pytest.raises(AssertionError, match="of another prefix"):
        swap_and_return([0])


def test_depth_and_collection_order_are_kept() -> None:
    sim = executor(depth=2)
    sim.submit(StepPlan(0, admitted=[admission(0, [1, 2], [0])], spans=one_span(0, 2)))
    sim.submit(StepPlan(1, spans=one_span(0, 1)))
    with pytest.raises(AssertionError, match="more than 2"):
        sim.submit(StepPlan(2, spans=one_span(0, 1)))
    with pytest.raises(AssertionError, match="step 1 is collected, 0 is due"):
        sim.collect(1)


# -- extras of a result


def test_transfers_are_reported_when_they_are_due() -> None:
    sim = executor(transfer_steps=2)
    run(sim, StepPlan(0, admitted=[admission(0, [1, 2, 3], [0])], spans=one_span(0, 3)))
    done = [sim.collect(sim.submit(StepPlan(1, released=[0], moves=[Move(7, False, [(0, 0)])]))).moved]
    done += [sim.collect(sim.submit(StepPlan(step))).moved for step in (2, 3, 4)]
    assert done == [[], [], [7], []]


def test_logprobs_and_faults() -> None:
    sim = executor(fault=lambda tokens: "sick" if tokens[0] == 9 else None)
    spec = SamplingSpec(logprobs=2, prompt_logprobs=1)
    result = sim.collect(
        sim.submit(
            StepPlan(
                0,
                admitted=[admission(0, [1, 2, 3], [0], spec=spec), admission(1, [9], [1])],
                spans=Spans([1, 0], [1, 3], [True, True]),
            )
        )
    )
    assert result.failed == {0: (FinishReason.ERROR, "sick")}
    assert [entry.token_id for entry in result.prompt_logprobs[0]] == [2, 3]
    assert list(result.logprobs) == [1]
    assert ([result.logprobs[1][0].token_id], len(result.logprobs[1][0].top_token_ids)) == (result.tokens[1], 2)


def test_time_passes_when_steps_are_collected() -> None:
    clock = SimClock(10.0)
    sim = executor(depth=2, clock=clock, cost=CostModel(overhead_s=0.5, weights_s=1.0, token_s=1e-6))
    sim.submit(StepPlan(0, admitted=[admission(0, [1, 2], [0])], spans=one_span(0, 2)))
    sim.submit(StepPlan(1, spans=one_span(0, 1)))
    assert clock() == 10.0
    first = sim.collect(0)
    assert first.timings.total_s == pytest.approx(1.5)
    assert clock() == pytest.approx(11.5)
    sim.collect(1)
    assert clock() == pytest.approx(13.0)
