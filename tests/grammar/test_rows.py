from __future__ import annotations

import random

import numpy as np

from quire import StructuredOutputsParams
from quire.grammar import GrammarCompiler, lower
from quire.grammar.constraint import Constraint
from quire.grammar.rows import ConstrainedLine, RowConstraints
from quire.params import ThinkingSpec

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "note": {"type": "string"}}}


def test_masks_are_the_same_in_one_thread_and_in_many(compiler: GrammarCompiler) -> None:
    """Masks of rows at other places of a grammar, with drafts and without, in a thought, after a failure."""
    rows, chance = RowConstraints(compiler), random.Random(1)
    ids = {"begin_id": None, "end_id": None, "closing_ids": (7, 8)}
    thinking = ThinkingSpec(begin="<think>", end="</think>", is_open=True, budget=2, **ids)  # type: ignore[arg-type]
    lines, drafts = [], []
    for i in range(12):
        matcher = compiler.matcher(lower(StructuredOutputsParams(json=SCHEMA)))
        constraint = Constraint(matcher, thinking if i == 3 else None, lambda tokens: bytes(len(tokens)))
        for _ in range(i):
            words = np.empty((1, -(-compiler.vocab_size // 32)), dtype=np.int32)
            constraint.fill(words[0])
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            constraint.advance([int(chance.choice(allowed))])
        if i == 5:
            constraint.advance([0, 0, 0])  # no grammar allows it
        lines.append(ConstrainedLine(i, i, constraint))
        drafts.append([1, 2] if i % 4 == 0 else [])
    serial, parallel = (rows.masks(lines, drafts, in_parallel=many) for many in (False, True))
    assert np.array_equal(serial, parallel)
