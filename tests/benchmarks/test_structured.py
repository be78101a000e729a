from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import structured


def test_every_schema_is_measured_beside_free_text(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(structured, "_NUM_FIRST_TOKENS", 2)
    kwargs = '{"load_format": "dummy", "max_model_len": 128, "kv_cache_memory_bytes": 4194304}'
    flags = ["--num-seqs", "2", "--num-out", "5", "--turns", "1", "--kwargs", kwargs]
    assert structured.main([str(tiny_model), *flags]) == 0
    shown = capsys.readouterr().out
    assert all(shown.count(name) == 2 for name in structured.SCHEMAS) and structured.FREE in shown
    assert structured.main(["smollm2", "--kwargs", "{"]) == 2


def test_the_shapes_tokens_are_pieces_of_text_and_end_in_special_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "import this and that, or return the other thing; while it lasts"
    monkeypatch.setattr(structured, "_sources", lambda: iter([words] * 3))
    tokenizer = structured._train_tokenizer(280, 290)
    assert tokenizer.get_vocab_size() == 290 and tokenizer.id_to_token(289) == "<|special 9|>"
    ids = tokenizer.encode("while it returns").ids
    assert tokenizer.decode(ids) == "while it returns" and len(ids) < 16
