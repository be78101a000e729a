from __future__ import annotations

import tokenizers
from tokenizers import models

from quire.text.post_process import add_ends


def test_tokens_with_template_characters_are_added_as_they_are() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "$b:1 x": 1, "": 2}, unk_token="a"))
    add_ends(backend, bos_token_id=1, eos_token_id=2)
    assert backend.encode("a").ids == [1, 0, 2]
    add_ends(backend, bos_token_id=None, eos_token_id=None)
    assert backend.encode("a").ids == [0]
