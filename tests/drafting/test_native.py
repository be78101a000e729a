"""The native lines choose what those in plain Python do."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from quire.drafting.history import END_OF_ANSWER
from quire.drafting.lines import Lines, Rules, Step
from quire.drafting.native import NativeLines, is_built
from quire.step_costs import DraftCosts

pytestmark = pytest.mark.skipif(not is_built(), reason="the native library is not built")


def costs_of(rng: random.Random) -> DraftCosts:
    """Steps whose costs rise, jump or fall with the number of drafts."""
    numbers = sorted(rng.sample(range(1, 60), rng.randrange(6)))
    seconds = [rng.uniform(0.0, 2e-2) for _ in numbers]
    return DraftCosts(1e-2, rng.choice([0.0, 1e-4, 2e-3]), numbers, seconds)


def run_both(rng: random.Random) -> int:
    """Sequences come and go, copy themselves, each other and earlier answers, with and without steps in flight. Returns
    how many drafts both have chosen."""
    rules = Rules(
        gram=rng.randint(1, 4),
        depth=rng.randint(4, 30),
        most=rng.randint(1, 30),
        factor=rng.choice([0.5, 1.0, 30.0]),
        min_chance=rng.choice([0.0, 0.02, 0.1]),
    )
    native, plain = NativeLines(rules), Lines(rules)
    vocab = rng.choice([2, 5, 400])
    answers = [rng.randrange(vocab) for _ in range(50)]
    lines: dict[int, list[int]] = {}
    num_drafts = 0
    for _ in range(40):
        if len(lines) < 6 and rng.random() < 0.3:
            slot, scope = next(i for i in range(7) if i not in lines), rng.choice([None, 0, 1])
            lines[slot] = [rng.randrange(vocab) for _ in range(rng.randrange(1, 400))]
            for each in (native, plain):
                each.open(slot, scope)
                each.enter(slot, lines[slot])
        if lines and rng.random() < 0.1:
            slot = rng.choice([*lines])
            tokens = lines.pop(slot)
            answers = [*answers, *tokens][-500:]
            for each in (native, plain):
                each.close(slot)
                each.remember(slot % 2, [*tokens, END_OF_ANSWER])
        if rng.random() < 0.05:
            aged = rng.randrange(2)
            for each in (native, plain):
                each.age(aged)
        step = Step(max(1, len(lines)), rng.choice([0, 3, 1000]), trust=rng.choice([1.0, 0.5]))
        for slot in rng.sample([*lines], len(lines)):
            source = rng.choice([answers, lines[slot]])
            start = rng.randrange(len(source))
            new = rng.choice([source[start : start + rng.randrange(9)], [rng.randrange(vocab)], []])
            lines[slot] += new
            step.keys.append(100 + slot)
            step.slots.append(slot)
            step.num_new.append(len(new))
            step.num_unknown.append(rng.choice([0, 0, 1, 5]))
            step.new_tokens += new
        costs = costs_of(rng)
        drafts = native.step(step, costs)
        expected = step.expected
        assert drafts == plain.step(step, costs) and expected == step.expected
        num_drafts += sum(map(len, drafts.values()))
    return num_drafts


def test_both_choose_the_same_drafts_whatever_comes() -> None:
    assert sum(run_both(random.Random(seed)) for seed in range(60)) > 3000


def test_a_guess_may_outlive_the_answers_that_it_is_of() -> None:
    rules = Rules(gram=2, depth=8, most=3, factor=8.0, min_chance=0.0)
    native = NativeLines(rules)
    free = DraftCosts(plain_s=1.0, more_s=0.0)
    native.remember(0, [*range(100), END_OF_ANSWER])
    native.open(0, 0)
    native.enter(0, [500, 4, 5])
    for at in range(6, 20):
        assert native.step(Step(1, 9, 1.0, [1], [0], [0], [0]), free) == {1: [at, at + 1, at + 2]}
        assert native.step(Step(1, 9, 1.0, [1], [0], [1], [2], [at]), free) == {1: [at + 3, at + 4, at + 5]}
        native.age(0)  # twice, and they are forgotten


def test_memory_is_bounded_by_the_tokens_and_given_back() -> None:
    native = NativeLines(Rules(gram=2, depth=8, most=8, factor=8.0, min_chance=0.0))
    tokens = [*range(30_000), 5, 6]
    for slot in range(4):
        native.open(slot, 0)
        native.enter(slot, tokens)
        native.remember(0, tokens)
    assert 8 * 12 * len(tokens) < native.num_bytes < 8 * 18 * len(tokens)
    for slot in range(4):
        native.close(slot)
    native.age(0)
    native.age(0)
    assert native.num_bytes == 0


def test_drafting_needs_no_torch() -> None:
    code = "import sys; from quire.drafting.native import is_built; is_built(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
