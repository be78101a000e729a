"""Random tiny models that embed and classify, saved by transformers, each with a word tokenizer that knows pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "tree",
    "red",
    "blue",
    "big",
    "small",
    "who",
    "where",
    "is",
    "was",
    "and",
    "or",
]

ENCODER: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 66,
    "initializer_range": 0.3,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
DECODER: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


def write_tokenizer(path: Path, *, has_types: bool = True) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    names = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", *WORDS]
    letters = [letter for c in "abcdefghijklmnopqrstuvwxyz" for letter in (f"##{c}",)]
    vocab = {word: i for i, word in enumerate(dict.fromkeys([*names, *letters]))}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    second = 1 if has_types else 0
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.enable_truncation(5)  # as published files have it; the engine must not cut texts so
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def save(path: Path, architecture: str, *, seed: int = 0, **changes: Any) -> Any:
    """A random model under `path`; returns it, as transformers runs it."""
    import torch
    import transformers

    made = getattr(transformers, architecture)
    is_encoder = "ert" in architecture
    torch.manual_seed(seed)
    model = made(made.config_class(**((ENCODER if is_encoder else DECODER) | changes)))
    for parameter in model.parameters():  # biases and norms would be zeros and ones, whose absence nobody would notice
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(path)
    write_tokenizer(path, has_types="oberta" not in architecture)
    return model.eval()


def add_sentence_files(path: Path, mode: str = "mean_tokens", *, normalizes: bool = True, **lengths: int) -> None:
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [
        {"idx": i, "path": "" if i == 0 else f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(
        json.dumps({f"pooling_mode_{mode}": True, "pooling_mode_max": False})
    )
    (path / "sentence_bert_config.json").write_text(json.dumps(lengths))
