"""Answers that must fit a schema, a regular expression or a grammar: checked and compiled here, and followed token by
token beside the sampler. llguidance does the parsing; nothing here knows torch.

What follows tokens (`rows.py`, `constraint.py`) needs numpy and is not imported here: the server's process has none.
"""

from quire.grammar.compiler import GrammarCompiler, end_token_ids, open_tokenizer
from quire.grammar.lowering import NO_GRAMMAR, lower

__all__ = ["NO_GRAMMAR", "GrammarCompiler", "end_token_ids", "lower", "open_tokenizer"]
