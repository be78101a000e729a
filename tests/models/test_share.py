"""What a rank holds: shares of every kind add up to the model, and ranks together give its logits."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import models_harness as harness
import pytest
import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.reference import ReferenceOps
from quire.models.decoder import Decoder
from quire.models.kv_layout import kv_layout
from quire.models.share import Cut, ModelShare, largest_share, max_tensor_size, share_of
from quire.models.tensors import checkpoint_tensors
from tests.models.families import EXPERTS, saved, tiny_model

LENGTHS = (23, 9, 1)


class ThreadRanks:
    """Ranks as threads of one process, with what parallel/ranks.py offers."""

    def __init__(self, tensor_size: int, num_stages: int) -> None:
        self.tensor_size = tensor_size
        self.barriers = [threading.Barrier(tensor_size, timeout=60) for _ in range(num_stages)]
        self.parts: list[list[Any]] = [[None] * tensor_size for _ in range(num_stages)]
        self.hidden = [[queue.SimpleQueue[Tensor]() for _ in range(tensor_size)] for _ in range(num_stages)]

    def of(self, share: ModelShare) -> ThreadRank:
        return ThreadRank(self, share)


class ThreadRank:
    def __init__(self, world: ThreadRanks, share: ModelShare) -> None:
        self.world, self.share = world, share

    def _all(self, part: Tensor) -> list[Tensor]:
        parts, barrier = self.world.parts[self.share.stage], self.world.barriers[self.share.stage]
        parts[self.share.tensor_rank] = part.clone()
        barrier.wait()
        found = list(parts)
        barrier.wait()
        return found

    def sum(self, x: Tensor) -> Tensor:
        return x.copy_(sum(self._all(x)[1:], start=torch.zeros_like(x)).add_(self._all(x)[0]))

    def gather(self, part: Tensor, out: Tensor | None = None) -> Tensor | None:
        parts = self._all(part)
        return torch.cat(parts, dim=1) if self.share.tensor_rank == 0 else None

    def send_hidden(self, hidden: Tensor) -> None:
        self.world.hidden[self.share.stage + 1][self.share.tensor_rank].put(hidden)

    def receive_hidden(self, into: Tensor) -> Tensor:
        return into.copy_(self.world.hidden[self.share.stage][self.share.tensor_rank].get(timeout=60))


def run_split(name: str, tensor_size: int, num_stages: int, path: Path) -> tuple[list[Tensor], list[Tensor]]:
    """A tiny model's logits from ranks, and transformers' own."""
    if name in EXPERTS:
        model = tiny_model(EXPERTS[name])
        spec, weights = saved(model, path)
    else:
        model = harness.tiny_model(name)
        spec, weights = harness.spec_of(model), model.state_dict()
    sequences = harness.random_sequences(model.config.vocab_size, LENGTHS)
    world = ThreadRanks(tensor_size, num_stages)
    found: list[list[Tensor]] = [[] for _ in sequences]
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            share = share_of(spec, rank, tensor_size, num_stages)
            layout = share.layout(kv_layout(spec, 256))
            ops = ReferenceOps("cpu", torch.float32)
            decoder = harness.load_decoder(spec, weights, ops, layout=layout, share=share, ranks=world.of(share))
            run = harness.PagedRun(decoder, sequences, 8)
            for step in harness.mixed(LENGTHS):
                for sequence, logits in run.step(step).items():
                    found[sequence].append(logits)
        except BaseException as error:
            failures.append(error)
            for barrier in world.barriers:
                barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(tensor_size * num_stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    return [torch.cat(parts) for parts in found], [harness.oracle_logits(model, s) for s in sequences]


@pytest.mark.parametrize("degrees", [(2, 1), (3, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "qwen2-moe"])
def test_ranks_together_give_the_logits_of_transformers(name: str, degrees: tuple[int, int], tmp_path: Path) -> None:
    logits, expected = run_split(name, *degrees, tmp_path)
    for got, want in zip(logits, expected, strict=True):
        assert got.shape == want.shape
        assert (got - want).abs().max().item() <= 1e-4


@pytest.mark.parametrize("heads", [(9, 3), (8, 8), (8, 1), (12, 2)])
def test_every_head_column_and_word_is_somewhere(heads: tuple[int, int]) -> None:
    spec = replace(
        harness.spec_of(harness.tiny_model("llama")), num_heads=heads[0], num_kv_heads=heads[1], vocab_size=1000
    )
    group = heads[0] // heads[1]
    for size in range(1, heads[0] + 1):
        shares = [share_of(spec, rank, size) for rank in range(size)]
        for cuts in ([s.heads for s in shares], [s.columns for s in shares], [s.words for s in shares]):
            assert [cut.start for cut in cuts[1:]] == [cut.stop for cut in cuts[:-1]]
            assert cuts[0].start == 0 and cuts[-1].stop == cuts[-1].total and min(map(len, cuts)) > 0
        for share in shares:
            # Whole groups, or a part of one: kernels know no other.
            assert len(share.heads) % len(share.kv_heads) == 0
            assert {head // group for head in range(share.heads.start, share.heads.stop)} == set(
                range(share.kv_heads.start, share.kv_heads.stop)
            )
        sizes = [len(share.columns) for share in shares]
        assert max(sizes) - min(sizes) <= 32
        assert len(largest_share(spec, size).kv_heads) == max(len(share.kv_heads) for share in shares)


def test_degrees_that_do_not_fit_are_refused_with_those_that_do() -> None:
    spec = replace(harness.spec_of(harness.tiny_model("llama")), num_heads=9, num_kv_heads=3)
    assert max_tensor_size(spec) == 9
    with pytest.raises(ConfigError, match="use 1 to 9"):
        share_of(spec, 0, 10)
    with pytest.raises(ConfigError, match=f"use 1 to {spec.num_layers}"):
        share_of(spec, 0, 1, spec.num_layers + 1)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_dummy_weights_are_parts_of_the_same_matrices(name: str) -> None:
    spec = harness.spec_of(harness.tiny_model(name))

    def drawn(rank: int, size: int) -> Decoder:
        share = share_of(spec, rank, size)
        ops = ReferenceOps("cpu", torch.float32)
        ranks: Any = ThreadRanks(size, 1).of(share)
        decoder = Decoder(spec, ops, device="cpu", dtype=torch.float32, max_position=64, share=share, ranks=ranks)
        for index, slot in enumerate(decoder.weight_slots().values()):
            slot.randomize(0.02, index)
        return decoder

    whole = drawn(0, 1)
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    full = whole._layers[0].attention.qkv.weight  # type: ignore[attr-defined]
    down = whole._layers[1].mlp.down.weight  # type: ignore[attr-defined]
    for rank in range(2):
        part = drawn(rank, 2)
        share = part.share
        qkv = part._layers[0].attention.qkv
        q, k, v = full.split([q_rows, kv_rows, kv_rows])
        head_dim = spec.head_dim
        cuts = [q[(share.heads * head_dim).slice], *(x[(share.kv_heads * head_dim).slice] for x in (k, v))]
        assert torch.equal(qkv.weight, torch.cat(cuts))  # type: ignore[attr-defined]
        mine = part._layers[1].mlp.down.part.weight  # type: ignore[attr-defined]
        assert torch.equal(mine, down[:, share.columns.slice])
        bias, whole_bias = qkv.bias, whole._layers[0].attention.qkv.bias  # type: ignore[attr-defined]
        if bias is not None:
            rows = (share.heads * head_dim).slice
            assert torch.equal(bias[: len(share.heads) * head_dim], whole_bias[:q_rows][rows])


def test_a_stage_needs_its_own_layers_only() -> None:
    spec = harness.spec_of(harness.tiny_model("gemma3"))
    ops = ReferenceOps("cpu", torch.float32)
    names: list[set[str]] = []
    for stage in range(2):
        share = share_of(spec, stage, 1, 2)
        layout = share.layout(kv_layout(spec, 64))
        assert len(layout.groups) == len(share.layers) and layout.windows == kv_layout(spec, 64).windows
        decoder = Decoder(spec, ops, device="cpu", dtype=torch.float32, max_position=64, layout=layout, share=share)
        names.append(set(decoder.weight_slots()))
        assert all(decoder.is_ignored_weight(name) for name in checkpoint_tensors(spec) if name not in names[-1])
        assert not decoder.is_ignored_weight("model.layers.99.mlp.up_proj.weight")
    assert names[0] | names[1] == set(checkpoint_tensors(spec))
    assert names[0] & names[1] == {"model.embed_tokens.weight"}  # the head of a model that ties the two


def test_cuts() -> None:
    assert [len(Cut.part(10, i, 3)) for i in range(3)] == [3, 3, 4]
    assert [Cut.part(100, i, 2, 32).slice for i in range(2)] == [slice(0, 64), slice(64, 100)]
    assert [len(Cut.part(40, i, 3, 32)) for i in range(3)] == [13, 13, 14]  # no unit for each: cut anywhere
    assert Cut(1, 3, 4) * 8 == Cut(8, 24, 32) and not Cut(1, 3, 4).is_whole and Cut.whole(4).is_whole


def test_stages_are_cut_where_they_take_equally_long() -> None:
    """The head is half as much work as its weights say: prompts do without it."""
    spec = harness.spec_of(harness.tiny_model("llama"))
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    smollm2 = replace(spec, num_layers=30, layers=spec.layers[:1] * 30, vocab_size=49152, **shape)
    assert [len(share_of(smollm2, rank, 1, 2).layers) for rank in range(2)] == [17, 13]
    assert [len(share_of(smollm2, rank, 1, 3).layers) for rank in range(3)] == [11, 12, 7]
    small = replace(
        smollm2, num_layers=3, layers=smollm2.layers[:3]
    )  # whose head is more than all layers: each stage still has one
    assert [share_of(small, rank, 1, 3).layers.slice for rank in range(3)] == [slice(0, 1), slice(1, 2), slice(2, 3)]
