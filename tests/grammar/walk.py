"""A writer without a model: any token that the mask allows, but for a liking of those that close something."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from quire.grammar import GrammarCompiler, lower
from quire.grammar.constraint import Constraint
from quire.structured import StructuredOutputsParams
from quire.text import Tokenizer


def constraint_of(compiler: GrammarCompiler, **kind: object) -> Constraint:
    grammar = lower(StructuredOutputsParams(**kind))  # type: ignore[arg-type]
    compiler.check(grammar)
    matcher, strings = compiler.matchers(grammar)
    return Constraint(matcher, strings=strings)


def allowed(constraint: Constraint, vocab_size: int) -> npt.NDArray[np.bool_]:
    words = np.empty(-(-vocab_size // 32), dtype=np.int32)
    constraint.fill(words)
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size).astype(bool)


@cache
def _closing(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    ends = tokenizer.end_token_ids
    tokens = range(tokenizer.vocab_size)
    return np.array([token in ends or tokenizer.token_bytes(token)[:1] in b'"}],' for token in tokens])


def write(constraint: Constraint, tokenizer: Tokenizer, seed: int, max_tokens: int = 150) -> tuple[list[int], bool]:
    """The tokens, and whether it came to an end."""
    rng, tokens = np.random.default_rng(seed), []
    while len(tokens) < max_tokens:
        options = allowed(constraint, tokenizer.vocab_size)
        if rng.random() < 0.6:
            closing = options & _closing(tokenizer)
            options = closing if closing.any() else options
        assert options.any(), tokenizer.decode(tokens)
        token = int(rng.choice(np.flatnonzero(options)))
        if token in tokenizer.end_token_ids:
            return tokens, True
        tokens.append(token)
        constraint.advance((token,))
    return tokens, False
