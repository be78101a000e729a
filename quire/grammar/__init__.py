"""Answers that must fit a schema, a regular expression or a grammar: checked and compiled here, and followed token by
token beside the sampler. llguidance does the parsing; nothing here knows torch."""

from quire.grammar.compiler import GrammarCompiler
from quire.grammar.constraint import Constraint
from quire.grammar.lowering import NO_GRAMMAR, lower
from quire.grammar.rows import ConstrainedLine, RowConstraints
from quire.grammar.vocabulary import end_token_ids, open_tokenizer

__all__ = [
    "NO_GRAMMAR",
    "ConstrainedLine",
    "Constraint",
    "GrammarCompiler",
    "RowConstraints",
    "end_token_ids",
    "lower",
    "open_tokenizer",
]
