"""Adapters (LoRA) on top of matrices: the slots of one device, and products that add what adapters change.

For each matrix W that it changes, an adapter has two thin ones, and the product becomes W x + B (A x). A bank holds the
thin matrices of as many adapters as may be in one step. A slot is one run of numbers, so that an adapter enters it in
one copy. In it lie, for each fused matrix of the model,

    A    [parts * max_rank, in]    each of the matrices that are fused has an A: the first one's, then the next one's
    B    [max_rank, out]           transposed, with the adapter's scale in it; a column belongs to one of the parts

Rows past an adapter's rank are zero. Where a norm's weight is folded into W, it is in A too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.composed import ComposedLinear
from quire.kernels.interface import (
    ALL,
    AdapterRows,
    AttentionBatch,
    AttentionSpec,
    LinearWeight,
    Norm,
    Normed,
    Ops,
    Rotary,
)
from quire.kernels.stored_rows import StoredRows

RANK_UNIT = 16  # what a tensor core multiplies: slots are made for a multiple of it


class LowRankPair(NamedTuple):
    """What an adapter has for one matrix of the checkpoint."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float


class PackedAdapter(NamedTuple):
    """An adapter as it lies in a slot."""

    values: Tensor  # [slot_values]
    ranks: Tensor  # [matrices] int32


@dataclass(slots=True, frozen=True)
class AdapterSite:
    """A matrix of the checkpoint that adapters may change, and where it is."""

    module: str  # model.layers.0.self_attn.q_proj
    matrix: AdaptedLinear
    first_row: int  # in the fused matrix
    part: tuple[slice, ...] | None = None  # rows and columns that are here, of a model that is split; None: all
    head_order: Sequence[int] | None = None  # of a head's rows, where the decoder has them in another


@dataclass(slots=True, frozen=True, eq=False)
class LowRank:
    """One fused matrix's place in the slots of a bank."""

    bank: AdapterBank
    index: int  # among the bank's matrices
    a_start: int  # in a slot
    b_start: int
    part_rows: tuple[int, ...]  # how many rows of the fused matrix each of its parts has
    in_features: int

    @property
    def shrunk_width(self) -> int:
        """How many numbers A x has for each token."""
        return len(self.part_rows) * self.bank.max_rank

    def a(self, slot: Tensor) -> Tensor:
        """slot: [slot_values] -> [parts * max_rank, in], a view."""
        return slot[self.a_start : self.b_start].view(self.shrunk_width, self.in_features)

    def b(self, slot: Tensor) -> Tensor:
        """-> [max_rank, out], a view."""
        rank, width = self.bank.max_rank, sum(self.part_rows)
        return slot[self.b_start : self.b_start + rank * width].view(rank, width)


class AdapterBank:
    """As many slots as a step may have adapters."""

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        tile: Callable[[int], int | None],
    ) -> None:
        """tile: of a step of so many tokens, see Ops.adapter_tile."""
        self.num_slots = num_slots
        self._tile = tile
        self.max_rank = -(-max_rank // RANK_UNIT) * RANK_UNIT
        self._rows: AdapterRows | None = None
        self.num_products = 0  # of the step that runs, for backends that count them
        self.sites: dict[str, AdapterSite] = {}  # by module
        self._grouped: AdapterRows | None = None  # what _groups is about
        self._groups: list[tuple[int, Tensor]] = []
        self.slot_values = self.num_matrices = 0
        self._device, self._dtype = torch.device(device), dtype

    @property
    def rows(self) -> AdapterRows | None:
        """Which tokens of the running step have an adapter; None: none of them."""
        return self._rows

    @rows.setter
    def rows(self, rows: AdapterRows | None) -> None:
        self._rows, self.num_products = rows, 0

    def allocate(self, sites: Iterable[AdapterSite]) -> None:
        """Once all matrices are known, and before the first step."""
        self.sites = {site.module: site for site in sites}
        first_rows: dict[int, tuple[AdaptedLinear, list[int]]] = {}
        for site in self.sites.values():
            first_rows.setdefault(id(site.matrix), (site.matrix, []))[1].append(site.first_row)
        for index, (matrix, firsts) in enumerate(first_rows.values()):
            rows = tuple(end - first for first, end in zip(firsts, [*firsts[1:], matrix.out_features], strict=True))
            b_start = self.slot_values + len(rows) * self.max_rank * matrix.in_features
            matrix.low_rank = LowRank(self, index, self.slot_values, b_start, rows, matrix.in_features)
            self.slot_values = b_start + self.max_rank * matrix.out_features
        self.num_matrices = len(first_rows)
        self.values = torch.zeros((self.num_slots, self.slot_values), dtype=self._dtype, device=self._device)
        # [matrices, slots]: kernels read a row of it, and rows are aligned.
        shape = (self.num_matrices, -(-self.num_slots // 4) * 4)
        self.ranks = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self.host_ranks = [[0] * self.num_matrices for _ in range(self.num_slots)]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.ranks.nbytes

    def pack(self, pairs: Mapping[str, LowRankPair]) -> PackedAdapter:
        """What an adapter has for the matrices that are here, in the layout of a slot, on the host. Any thread may call
        it; shapes have been checked. Of a matrix whose inputs are split among ranks A x is a part of a sum, and so is
        B (A x): what the ranks make of their parts of A, with all of B, is summed with their products."""
        is_gpu = self._device.type == "cuda"  # pinned memory is copied while steps run
        values = torch.zeros(self.slot_values, dtype=self._dtype, pin_memory=is_gpu)
        ranks = torch.zeros(self.num_matrices, dtype=torch.int32)
        for module, pair in pairs.items():
            if (site := self.sites.get(module)) is None:
                continue  # in a layer of another stage
            rank, place = len(pair.a), site.matrix.low_rank
            assert place is not None
            part = [sum(place.part_rows[:i]) for i in range(len(place.part_rows))].index(site.first_row)
            rows, columns = site.part or (ALL, ALL)
            a, b = pair.a[:, columns].float(), pair.b[rows].float() * pair.scale
            if site.matrix.folded is not None:
                a = a * site.matrix.folded
            if site.head_order is not None:
                b = b.view(-1, len(site.head_order), rank)[:, list(site.head_order)].reshape(-1, rank)
            place.a(values)[part * self.max_rank :][:rank] = a
            place.b(values)[:rank, site.first_row : site.first_row + len(b)] = b.T
            ranks[place.index] = max(int(ranks[place.index]), rank)
        return PackedAdapter(values, ranks)

    def write(self, slot: int, packed: PackedAdapter) -> None:
        """Behind the steps that were submitted; a GPU copies when it has run them."""
        self.values[slot].copy_(packed.values, non_blocking=True)
        self.ranks[:, slot].copy_(packed.ranks, non_blocking=True)
        self.host_ranks[slot] = packed.ranks.tolist()

    # -- the rows of a step

    def groups(self) -> list[tuple[int, Tensor]]:
        """Each adapter's slot and its tokens in the running step, for backends that multiply one adapter after the
        other. Found once a step."""
        assert self.rows is not None
        if self._grouped is not self.rows:
            tiles = self.rows.tiles.T.tolist()
            self._groups = [
                (slot, self.rows.order[start:end]) for start, end, slot in tiles if start < end and slot >= 0
            ]
            self._grouped = self.rows
        return self._groups

    def rows_length(self, num_tokens: int) -> int:
        """How many integers an AdapterRows of so many tokens takes in one array."""
        return _aligned(num_tokens) + 3 * self._num_tiles(num_tokens)

    def pack_rows(self, slots: NDArray[Any]) -> NDArray[np.int32]:
        """slots: [tokens], -1 for those without an adapter -> [rows_length]

        A token that is alone and has none is in no tile: where one token is multiplied, a tile means an adapter."""
        num_tokens, tile = len(slots), self._tile(len(slots))
        packed = np.zeros(self.rows_length(num_tokens), dtype=np.int32)
        packed[:num_tokens] = order = np.argsort(slots, kind="stable")
        tiles = packed[_aligned(num_tokens) :].reshape(3, -1)
        ordered, at = slots[order], 0
        cuts = np.flatnonzero(np.diff(ordered, prepend=-2 if num_tokens > 1 else -1, append=self.num_slots)).tolist()
        for start, end in itertools.pairwise(cuts):
            starts = np.arange(start, end, tile or end - start)
            some = tiles[:, at : at + len(starts)]
            some[0], some[1], some[2] = starts, np.minimum(starts + (tile or end), end), ordered[start]
            at += len(starts)
        return packed

    def unpack_rows(self, packed: Tensor, num_tokens: int) -> AdapterRows:
        """packed: int32 [rows_length] or more, on the device -> views into it."""
        tiles = packed[_aligned(num_tokens) : self.rows_length(num_tokens)]
        return AdapterRows(packed[:num_tokens], tiles.view(3, self._num_tiles(num_tokens)))

    def _num_tiles(self, num_tokens: int) -> int:
        """The most that there may be: adapters need not fill their last ones."""
        tile = self._tile(num_tokens)
        return (0 if tile is None else num_tokens // tile) + min(self.num_slots + 1, num_tokens)


class AdaptedLinear(ComposedLinear):
    """A matrix with the adapters of a bank on top. Steps without any run as the matrix alone does."""

    __slots__ = ("bank", "base", "folded", "low_rank")

    def __init__(self, ops: Ops, base: LinearWeight, bank: AdapterBank) -> None:
        super().__init__(ops, base.out_features, base.in_features)
        self.base = base
        self.bank = bank
        self.low_rank: LowRank | None = None  # until the bank is allocated
        self.folded: Tensor | None = None  # the weight of the norm that the matrix took over, on the host

    @property
    def has_bias(self) -> bool:
        return self.base.has_bias

    @property
    def nbytes(self) -> int:
        return self.base.nbytes

    @property
    def keeps_quantized(self) -> bool:
        return self.base.keeps_quantized

    def load_rows(
        self, first_row: int, matrix: Tensor | StoredRows, *, rows: slice = ALL, columns: slice = ALL
    ) -> None:
        self.base.load_rows(first_row, matrix, rows=rows, columns=columns)

    def load_bias(self, first_row: int, bias: Tensor) -> None:
        self.base.load_bias(first_row, bias)

    def randomize(self, std: float, seed: int) -> None:
        self.base.randomize(std, seed)

    def fold_norm(self, norm: Norm) -> Norm:
        weight = self._copied(norm.weight)
        left = self.base.fold_norm(norm)
        self.folded = weight if left.is_folded else None
        return left

    def multiply(self, x: Normed) -> Tensor:
        product = self.base.multiply(x)
        if self.bank.rows is not None:
            assert isinstance(x, Tensor)
            self._add_adapters(product, x)
        return product

    def multiply_add_norm(
        self, x: Normed, residual: Tensor, norm: Norm | None, branch_norm: Norm | None = None
    ) -> Normed:
        if self.bank.rows is None:
            return self.base.multiply_add_norm(x, residual, norm, branch_norm)
        return super().multiply_add_norm(x, residual, norm, branch_norm)

    def multiply_act(self, x: Normed, activation: str) -> Normed:
        return self.base.multiply_act(x, activation) if self.bank.rows is None else super().multiply_act(x, activation)

    def multiply_rope_write(
        self, x: Normed, rotary: Rotary, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        if self.bank.rows is None:
            return self.base.multiply_rope_write(x, rotary, kv, batch, spec)
        return super().multiply_rope_write(x, rotary, kv, batch, spec)

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        raise AssertionError("a vocabulary has no adapters")

    def logits(self, hidden: Tensor, softcap: float | None = None, out: Tensor | None = None) -> Tensor:
        raise AssertionError("a vocabulary has no adapters")

    def _add_adapters(self, product: Tensor, x: Tensor) -> None:
        """product: [tokens, out] += what the adapters of these tokens make of x."""
        place, bank = self.low_rank, self.bank
        assert place is not None
        for slot, tokens in bank.groups():
            rank = bank.host_ranks[slot][place.index]
            if not rank:
                continue
            a, b = place.a(bank.values[slot]), place.b(bank.values[slot])
            some, first = x if len(tokens) == len(x) else x.index_select(0, tokens), 0
            for part, count in enumerate(place.part_rows):
                shrunk = some @ a[part * bank.max_rank :][:rank].T
                columns = slice(first, first + count)
                if len(some) == len(product):
                    product[:, columns].addmm_(shrunk, b[:rank, columns])
                else:
                    product[:, columns].index_add_(0, tokens, shrunk @ b[:rank, columns])
                first += count

    def _copied(self, weight: Tensor) -> Tensor:
        return weight.float().cpu().clone()

    def _load(self, first_row: int, rows: Tensor) -> None:
        raise AssertionError("load_rows hands everything on")


def without_adapters(matrix: LinearWeight) -> LinearWeight:
    return matrix.base if isinstance(matrix, AdaptedLinear) else matrix


def _aligned(num_tokens: int) -> int:
    return -(-num_tokens // 4) * 4
