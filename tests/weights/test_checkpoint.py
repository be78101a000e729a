from __future__ import annotations

import tracemalloc
from pathlib import Path

import fakes
import pytest
import torch

from quire.errors import ModelError, WeightsError
from quire.models.architectures import spec_from_config
from quire.models.tensors import checkpoint_tensors
from quire.weights import open_checkpoint
from quire.weights.checkpoint import TensorEntry, match_tensors

FILE = Path("model.safetensors")


def entry(name, shape=(2,), file=FILE):
    return TensorEntry(name, name, shape, "F32", file, 0, 8)


def match(entries, shapes, ignored=()):
    return match_tensors(entries, shapes, lambda name: name in ignored, source=FILE)


def test_keeps_the_order_and_drops_what_is_ignored():
    shapes = {"a": (2,), "b": (2,)}
    entries = [entry("b"), entry("rotary"), entry("a")]
    assert [e.name for e in match(entries, shapes, ignored={"rotary"})] == ["b", "a"]


def test_missing_unexpected_twice_misshapen():
    shapes = {"a": (2,), "b": (2,)}
    with pytest.raises(WeightsError, match="1 tensor of the model missing: b"):
        match([entry("a")], shapes)
    with pytest.raises(WeightsError, match="1 tensor that the model has no place for: c"):
        match([entry("a"), entry("b"), entry("c")], shapes)
    with pytest.raises(WeightsError, match=r"tensor a stands in both model.safetensors and other.safetensors"):
        match([entry("a"), entry("a", file=Path("other.safetensors")), entry("b")], shapes)
    with pytest.raises(WeightsError, match=r"tensor b has shape \[3\], the model's config asks for \[2\]"):
        match([entry("a"), entry("b", (3,))], shapes)


def test_long_lists_are_cut():
    shapes = {f"t{i}": (2,) for i in range(9)}
    with pytest.raises(WeightsError, match="9 tensors of the model missing: t0, t1, t2, t3, t4 and 4 more"):
        match([], shapes)


# What a header or a config may claim, and what would be believed if nobody counted. All of it is refused in no time and
# without memory for it.
CLAIMS = [10**3, 10**7, 10**9, 2**31 - 1, 2**32 - 1]
WINDOW = {"gemma3.attention.sliding_window": 16}  # which that architecture must have


def open_small(path):
    """Open a model as the engine does, with a limit on the memory that this takes."""
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        checkpoint.check(spec_from_config(checkpoint.config, source=str(path)))
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 << 20


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_an_honest_gguf_file_is_checked_and_taken(write_gguf, arch):
    open_small(write_gguf(arch, metadata=WINDOW))


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize(
    "key", ["block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv"]
)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_numbers_of_a_gguf_header_are_held_against_its_tensors(write_gguf, arch, key, claim):
    path = write_gguf(arch, metadata=WINDOW | {f"{arch}.{key}": claim})
    with pytest.raises(ModelError) as caught:
        open_small(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "head_dim"]
)
def test_numbers_of_a_config_are_held_against_the_tensors(write_safetensors, key, claim):
    shapes = checkpoint_tensors(spec_from_config(fakes.TINY_LLAMA, source="test"))
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    open_small(write_safetensors(tensors, config=fakes.TINY_LLAMA))
    path = write_safetensors(tensors, config=fakes.TINY_LLAMA | {key: claim})
    with pytest.raises(ModelError) as caught:
        open_small(path)
    assert str(path) in str(caught.value)
