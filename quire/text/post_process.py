"""The tokens that encoding adds around a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers


def add_ends(backend: tokenizers.Tokenizer, *, bos_token_id: int | None, eos_token_id: int | None) -> None:
    """Makes `encode` begin every text with the one and end it with the other; None adds nothing."""
    from tokenizers.processors import TemplateProcessing

    ids = {"bos": bos_token_id, "eos": eos_token_id}
    # The template goes by names of ours, because a token's own text may hold characters that templates give a meaning.
    special = [
        {"id": name, "ids": [token_id], "tokens": [backend.id_to_token(token_id)]}
        for name, token_id in ids.items()
        if token_id is not None
    ]
    single = [*(["bos"] if bos_token_id is not None else []), "$A", *(["eos"] if eos_token_id is not None else [])]
    backend.post_processor = TemplateProcessing(single=single, special_tokens=special)
