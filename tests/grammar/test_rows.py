from __future__ import annotations

import random

import numpy as np
from grammar.walk import allowed

from quire import StructuredOutputsParams
from quire.grammar import GrammarCompiler, lower
from quire.grammar.constraint import Constraint
from quire.grammar.rows import ConstrainedLine, RowConstraints
from quire.params import SamplingSpec, ThinkingSpec

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "note": {"type": "string"}}}


def make_lines(compiler: GrammarCompiler) -> list[ConstrainedLine]:
    """Rows at other places of a grammar, in a thought, after a failure."""
    chance = random.Random(1)
    ids = {"begin_id": None, "end_id": None, "closing_ids": (7, 8)}
    thinking = ThinkingSpec(begin="<think>", end="</think>", is_open=True, budget=2, **ids)  # type: ignore[arg-type]
    lines = []
    for i in range(12):
        matcher, _ = compiler.matchers(lower(StructuredOutputsParams(json=SCHEMA)))
        constraint = Constraint(matcher, thinking if i == 3 else None, lambda tokens: bytes(len(tokens)))
        for _ in range(i):
            constraint.advance([chance.choice(allowed_ids(compiler, constraint))])
        if i == 5:
            constraint.advance([0, 0, 0])  # no grammar allows it
        lines.append(ConstrainedLine(i, i, constraint))
    return lines


def allowed_ids(compiler: GrammarCompiler, constraint: Constraint) -> list[int]:
    return [int(token) for token in np.flatnonzero(allowed(constraint, compiler.vocab_size))]


def test_masks_are_the_same_in_one_thread_and_in_many(compiler: GrammarCompiler) -> None:
    lines = make_lines(compiler)
    drafts = [[1, 2] if i % 4 == 0 else [] for i in range(len(lines))]
    serial = RowConstraints(compiler).begin_masks(lines, drafts).finish()
    assert np.array_equal(serial, RowConstraints(compiler, num_threads=3).begin_masks(lines, drafts).finish())


def test_tokens_are_followed_the_same_in_one_thread_and_in_many(compiler: GrammarCompiler) -> None:
    alone, threads, chance = RowConstraints(compiler), RowConstraints(compiler, num_threads=3), random.Random(2)
    serial, parallel = make_lines(compiler), make_lines(compiler)
    for _ in range(6):
        tokens = []
        for line in serial:
            may_come = allowed_ids(compiler, line.constraint) or [1]
            tokens.append([chance.choice(may_come) for _ in range(chance.choice([1, 1, 1, 0]))])
        tokens[7] = [0]  # no grammar allows it
        alone.advance(serial, tokens)
        threads.advance(parallel, tokens)
        none: list[list[int]] = [[] for _ in serial]
        assert np.array_equal(alone.begin_masks(serial, none).finish(), threads.begin_masks(parallel, none).finish())
        assert [line.constraint.forced() for line in serial] == [line.constraint.forced() for line in parallel]


def test_rows_at_once_use_other_lexers_and_rows_in_turn_the_same(compiler: GrammarCompiler) -> None:
    """Copies of one matcher would wait for each other."""
    grammar = lower(StructuredOutputsParams(json=SCHEMA))
    spec = SamplingSpec(grammar=grammar)
    rows = RowConstraints(compiler, num_threads=3)
    for row in range(13):
        rows.admit(row, spec, [])
    assert sorted(rows._num_users[grammar]) == [2, 2, 2, 2, 2, 3], "two lexers for each thread"
    rows.fork(0, 13)
    assert rows._lexers[13] == rows._lexers[0]
    for row in range(14):
        rows.release(row)
    assert not rows._num_users and not rows._lexers
    for row in range(3):
        rows.admit(row, spec, [])
        assert rows._lexers[row] == (grammar, 0)
        rows.release(row)
