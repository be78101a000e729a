from __future__ import annotations

from pathlib import Path

import pytest

from quire.grammar import GrammarCompiler
from quire.text import Tokenizer
from quire.weights import open_checkpoint


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_checkpoint(smollm2).gguf_metadata or {}, source=str(smollm2))


@pytest.fixture(scope="session")
def compiler(smollm2_tokenizer: Tokenizer) -> GrammarCompiler:
    tokenizer = smollm2_tokenizer
    return GrammarCompiler(lambda: (tokenizer, tokenizer.end_token_ids), vocab_size=tokenizer.vocab_size)
