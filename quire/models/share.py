"""What one rank holds of a model that is split among several: which heads, columns, words and layers.

    tensor parallel    every matrix is split. q, k, v, gate and up by their outputs, so that a rank has whole heads and
                       whole columns of the MLP; output and down by their inputs, so that each is summed over the
                       ranks; embedding and head by words of the vocabulary.
    pipeline parallel  whole layers: a stage hands its hidden states to the next. The first has the embedding, the last
                       the head.

Shares need not be equal. Ranks with fewer KV heads than there are ranks keep copies of one and divide its query heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quire.errors import ConfigError
from quire.models.kv_layout import KVLayout
from quire.models.spec import ExpertsSpec, ModelSpec
from quire.models.tensors import tensor_kinds

# Columns of the MLP are divided in units of a quantized file's blocks: of 256, where shares are nearly equal then (even
# shares of many are whole blocks anyway), or of 32. Words are divided in units of a kernel's panels.
_COLUMN_UNIT, _LONG_COLUMN_UNIT, _NEARLY_EQUAL = 32, 256, 16
_WORD_UNIT = 64


@dataclass(slots=True, frozen=True)
class Cut:
    """The rows, columns or heads from `start` up to `stop`, out of `total`."""

    start: int
    stop: int
    total: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __mul__(self, width: int) -> Cut:
        """The same part where each row, column or head is `width` things."""
        return Cut(self.start * width, self.stop * width, self.total * width)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def is_whole(self) -> bool:
        return len(self) == self.total

    @classmethod
    def whole(cls, total: int) -> Cut:
        return cls(0, total, total)

    @classmethod
    def part(cls, total: int, index: int, count: int, unit: int = 1) -> Cut:
        """The index-th of `count` parts, as equal as they can be; cut between units where each part has one."""
        unit = unit if total // unit >= count else 1
        units = -(-total // unit)
        return cls(min(total, units * index // count * unit), min(total, units * (index + 1) // count * unit), total)


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelShare:
    """One rank's share: its place among the ranks, and what it holds."""

    tensor_rank: int = 0
    tensor_size: int = 1
    stage: int = 0
    num_stages: int = 1
    heads: Cut
    kv_heads: Cut
    columns: Cut  # of the MLP
    expert_columns: Cut | None = None  # of each expert
    shared_expert_columns: Cut | None = None
    words: Cut
    layers: Cut

    @classmethod
    def whole(cls, spec: ModelSpec) -> ModelShare:
        return share_of(spec, 0)

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the final norm and the head."""
        return self.stage == self.num_stages - 1

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """The model as this rank sees it, for everything that depends on shapes."""
        return replace(
            spec,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.columns),
            experts=self._experts(spec.experts),
            vocab_size=len(self.words),
            num_layers=len(self.layers),
            layers=spec.layers[self.layers.slice],
            tie_embeddings=spec.tie_embeddings or self.num_stages > 1,  # no stage has more than one of the two
        )

    def _experts(self, experts: ExpertsSpec | None) -> ExpertsSpec | None:
        if experts is None or self.expert_columns is None:
            return None
        shared = self.shared_expert_columns
        return replace(
            experts,
            intermediate_size=len(self.expert_columns),
            shared_intermediate_size=None if shared is None else len(shared),
        )

    def layout(self, layout: KVLayout) -> KVLayout:
        """The places of this rank's layers in its part of a block. Groups are those of the whole model: all ranks have
        the same block tables."""
        if self.layers.is_whole:
            return layout
        groups = layout.groups[self.layers.slice]
        slots = tuple(groups[:i].count(group) for i, group in enumerate(groups))
        return replace(layout, num_slots=max(slots) + 1, groups=groups, slots=slots)


def share_of(spec: ModelSpec, rank: int, tensor_size: int = 1, num_stages: int = 1) -> ModelShare:
    """The ranks of one stage are neighbours. ConfigError, naming what fits, where the model cannot be split so."""
    check_degrees(spec, tensor_size, num_stages)
    index = rank % tensor_size
    heads, kv_heads = _attention_cut(spec, index, tensor_size)
    experts = spec.experts
    shared = None if experts is None else experts.shared_intermediate_size
    return ModelShare(
        tensor_rank=index,
        tensor_size=tensor_size,
        stage=rank // tensor_size,
        num_stages=num_stages,
        heads=heads,
        kv_heads=kv_heads,
        columns=_columns_cut(spec.intermediate_size, index, tensor_size),
        expert_columns=None if experts is None else _columns_cut(experts.intermediate_size, index, tensor_size),
        shared_expert_columns=None if shared is None else _columns_cut(shared, index, tensor_size),
        words=Cut.part(spec.vocab_size, index, tensor_size, _WORD_UNIT),
        layers=_layers_cut(spec, rank // tensor_size, num_stages),
    )


def check_degrees(spec: ModelSpec, tensor_size: int, num_stages: int) -> None:
    if tensor_size > 1 and spec.wide_qk_norm:
        raise ConfigError(
            f"tensor_parallel_size={tensor_size}: {spec.architecture} has a norm over all heads, of which a rank has "
            "some: use pipeline_parallel_size"
        )
    if tensor_size > 1 and spec.experts is not None and spec.experts.has_bias:
        raise ConfigError(
            f"tensor_parallel_size={tensor_size}: {spec.architecture} has experts with biases, which ranks would each "
            "add: use pipeline_parallel_size"
        )
    if tensor_size > (most := max_tensor_size(spec)):
        raise ConfigError(
            f"tensor_parallel_size={tensor_size} is more than the {most} ranks among which {spec.num_heads} query and "
            f"{spec.num_kv_heads} KV heads, {spec.intermediate_size} columns and {spec.vocab_size} words can be split: "
            f"use 1 to {most}"
        )
    if num_stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} is more than the model's {spec.num_layers} layers: use 1 to "
            f"{spec.num_layers}"
        )


def max_tensor_size(spec: ModelSpec) -> int:
    """Any degree up to this one fits: shares need not be equal."""
    columns = [spec.intermediate_size]
    if spec.experts is not None:
        columns += [spec.experts.intermediate_size, spec.experts.shared_intermediate_size or spec.num_heads]
    return min(spec.num_heads, *columns, spec.vocab_size)


def largest_share(spec: ModelSpec, tensor_size: int = 1, num_stages: int = 1) -> ModelShare:
    """The share of the rank that needs most memory: as an engine counts it, by its KV and then by its weights."""
    shares = [share_of(spec, rank, tensor_size, num_stages) for rank in range(tensor_size * num_stages)]

    def needs(share: ModelShare) -> tuple[int, int, bool]:
        num_weights = sum(kind.count * math.prod(kind.shape) for kind in tensor_kinds(share.spec(spec)))
        return len(share.kv_heads) * len(share.layers), num_weights, share.is_last

    return max(shares, key=needs)


def _layers_cut(spec: ModelSpec, stage: int, num_stages: int) -> Cut:
    """Stages that take equally long. The last has the head, which is as much work as several layers are, but only for
    tokens that are sampled from: every second one, as in traffic with prompts as long as answers."""
    attention = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    inner = spec.intermediate_size
    if (experts := spec.experts) is not None:
        inner = experts.top_k * experts.intermediate_size + (experts.shared_intermediate_size or 0)
    head = 0.5 * spec.vocab_size / (attention + (3 if spec.gated_mlp else 2) * inner)  # in layers
    each = (spec.num_layers + head) / num_stages

    def boundary(index: int) -> int:
        """Every stage has a layer."""
        if index == num_stages:
            return spec.num_layers
        return min(max(round(each * index), index), spec.num_layers - (num_stages - index))

    return Cut(boundary(stage), boundary(stage + 1), spec.num_layers)


def _columns_cut(columns: int, index: int, count: int) -> Cut:
    has_long_units = columns // _LONG_COLUMN_UNIT >= _NEARLY_EQUAL * count
    return Cut.part(columns, index, count, _LONG_COLUMN_UNIT if has_long_units else _COLUMN_UNIT)


def _attention_cut(spec: ModelSpec, index: int, count: int) -> tuple[Cut, Cut]:
    """Query and KV heads: whole KV groups, or where there are more ranks than those, a part of one."""
    group = spec.num_heads // spec.num_kv_heads
    if count <= spec.num_kv_heads:
        kv_heads = Cut.part(spec.num_kv_heads, index, count)
        return kv_heads * group, kv_heads
    # Rank i belongs to KV head i * heads // ranks; those of one head divide its query heads.
    head = index * spec.num_kv_heads // count
    owners = [rank for rank in range(count) if rank * spec.num_kv_heads // count == head]
    part = Cut.part(group, index - owners[0], len(owners))
    first = head * group
    return Cut(first + part.start, first + part.stop, spec.num_heads), Cut(head, head + 1, spec.num_kv_heads)
