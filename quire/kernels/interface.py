"""What a kernel backend offers to the decoder: `Ops`, chosen once and passed down, and the matrices that it makes.

Every backend computes the same functions as `kernels/reference`, which is plain torch: oracle and fallback. A matrix
does its own products, each together with what follows it in a layer, so that a variant may run the two in one launch.
Activations are [tokens, features]. The KV cache of one layer is one tensor

    kv: [num_blocks, 2, num_kv_heads, block_size, head_dim]        (index 0 of dim 1 is K, 1 is V)

so that one KV head's part of a block is one contiguous tile, and one block of one layer is one contiguous run of
bytes: what swap and copy-on-write move. How the numbers of a tile lie in it is the backend's own (kernels/cpu: keys
side by side, native/kv.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.adapters import AdaptedLinear, AdapterBank
    from quire.kernels.stored_rows import StoredRows


PREFIX_ALIGN = 128  # shared prefixes are cut to a multiple of this many tokens: whole blocks, whole tiles of any kernel


@dataclass(slots=True)
class SharedPrefixes:
    """Which decodes of a step begin with the same blocks, so that those need to be read only once for all of them.

    It says nothing that the block tables do not say, so a backend may ignore it. The number of groups is that of the
    tensors: a group without members is empty, so that a captured step serves any grouping. `kernels/shared_prefix.py`
    finds the groups.
    """

    members: Tensor  # [num_decodes] int32: sequences, group after group; those of no group come last
    group_starts: Tensor  # [groups + 1] int32: group g is members[group_starts[g] : group_starts[g + 1]]
    group_lens: Tensor  # [groups] int32: tokens that the group shares, a multiple of PREFIX_ALIGN
    seq_lens: Tensor  # [num_decodes] int32: tokens that each sequence shares, fewer than it has; 0 without a group


@dataclass(slots=True, frozen=True)
class Norm:
    """An RMS norm: x / rms(x) * weight, computed in float32. (Gemma's 1 + weight is made so when it is loaded.)

    With a bias it is a LayerNorm, which takes each row's mean away first and adds the bias at the end.
    """

    weight: Tensor  # [features]
    eps: float
    bias: Tensor | None = field(default=None, kw_only=True)
    is_biased: bool = field(default=True, kw_only=True)  # whether a checkpoint has the bias; else it is zeros
    is_folded: bool = False  # the weight is in the matrix that follows, and all ones here: see LinearWeight.fold_norm
    quantizes: bool = False  # the matrix that follows multiplies rows in 8 bits: many rows are left so


@dataclass(slots=True, frozen=True)
class Unscaled:
    """Normalized rows without their factors 1 / rms(row), which are left to the product that follows: it is linear."""

    x: Tensor  # [tokens, features]: the residual stream times the norm's weight, or the stream where that is folded
    # [parts, tokens] float32: a token's parts add up to its sum of squares. None: it has yet to be taken from x.
    square_sums: Tensor | None
    eps: float


@dataclass(slots=True, frozen=True)
class Quantized:
    """Rows in 8-bit floats (e4m3): x, times a scale for each row where there are such, times a factor."""

    x: Tensor  # [tokens, features] float8_e4m3fn
    scales: Tensor | None  # [tokens] float32
    factor: float = 1.0


# What a norm, an activation or attention leaves for the product after it. Only a backend looks inside: its matrices
# take what its other operations leave.
Normed: TypeAlias = "Tensor | Unscaled | Quantized"


@dataclass(slots=True)
class AdapterRows:
    """Which of a step's tokens have an adapter, and which slot of the bank it is in: `kernels/adapters.py`.

    Tokens of one adapter stand side by side in `order`, cut into tiles. Tile i is order[tiles[0, i] : tiles[1, i]], of
    the adapter in slot tiles[2, i], or of none where that is -1; it may be empty, so that a captured step serves any
    tokens.
    """

    order: Tensor  # [tokens] int32
    tiles: Tensor  # [3, tiles] int32


@dataclass(slots=True)
class AttentionBatch:
    """Where one step's tokens stand. Sequence i's new tokens are rows query_starts[i] .. query_starts[i+1]-1.

    All sequences' K and V of a layer are written before any of them is read, so that a sequence may read blocks that
    another one writes in the same step.
    """

    positions: Tensor  # [tokens] int64: each token's position in its sequence
    slots: Tensor  # [tokens] int64: block_id * block_size + offset, where the token's K and V go
    query_starts: Tensor  # [seqs + 1] int32
    kv_lens: Tensor  # [seqs] int32: tokens with KV after this step, this step's included
    block_tables: Tensor  # [seqs, max_blocks] int32; entries past a sequence's length are arbitrary
    max_query_len: int
    max_kv_len: int
    num_decodes: int  # leading sequences with exactly one new token
    shared: SharedPrefixes | None = None
    adapters: AdapterRows | None = None  # None: no token has one
    # Of the pass that runs: what a backend works out once for all layers that are alike.
    # Not handed on by dataclasses.replace, whose batch may have other sequences.
    decode_pieces: dict[object, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(slots=True, frozen=True)
class PackedBatch:
    """Whole sequences one after the other, as an encoder takes them: their keys are rows of the step itself."""

    lengths: list[int]
    starts: Tensor  # [seqs + 1] int32: sequence i is rows starts[i] .. starts[i+1]-1

    @property
    def max_len(self) -> int:
        return max(self.lengths)


@dataclass(slots=True, frozen=True)
class AttentionSpec:
    """One layer's attention, apart from the data."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a token sees itself and the window - 1 before it
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    # [num_heads] float32: a head's logits fall by so much a token of distance (ALiBi)
    slopes: Tensor | None = field(default=None, compare=False)
    # likewise: a logit of each head that no key has, which takes a share of the softmax (gpt-oss)
    sinks: Tensor | None = field(default=None, compare=False)
    # An 8-bit cache holds (k - k_offset) / k_scale and v / v_scale; nothing of this where it is as wide as k and v.
    k_scale: float = 1.0
    v_scale: float = 1.0
    k_offset: Tensor | None = field(default=None, compare=False)  # [num_kv_heads, head_dim] float32
    leaves_wide: bool = False  # the product after it takes rows in the activations' dtype, in 8 bits never


@dataclass(slots=True, frozen=True)
class Rotary:
    """What one layer does to q and k before they meet: an RMS norm of each head, where there is one, then rotation."""

    cos_sin: Tensor  # [max_positions, head_dim] float32: cos in the first half, sin in the second
    q_norm: Tensor | None = None  # [head_dim] (Qwen3, Gemma 3)
    k_norm: Tensor | None = None
    eps: float = 1e-6


ALL = slice(None)


class LinearWeight(Protocol):
    """A matrix [out_features, in_features], perhaps with a bias, in the layout and precision of one variant.

    `Ops.new_linear` chooses the variant, once: dense, packed, or one that stands for a matrix split among devices.
    Whoever has a LinearWeight calls it and never asks what it is. A variant has to load and to multiply;
    `kernels/composed.py` makes the other operations of these, and a variant overrides those that it has in one launch.
    """

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def has_bias(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...

    # -- loading, before the first product

    @property
    def keeps_quantized(self) -> bool:
        """Whether it is worth handing over QuantizedRows: other variants take them too, and unpack them."""

    def load_rows(
        self, first_row: int, matrix: Tensor | StoredRows, *, rows: slice = ALL, columns: slice = ALL
    ) -> None:
        """Fill the rows from first_row on with a part of a checkpoint's matrix, which is copied and converted.

        A fused matrix is filled from several tensors. A device that holds a part of the model takes some of a tensor's
        rows (where the product's outputs are split) or columns (where its inputs are). Blocks of a quantized file stay
        packed; columns that would cut one are a WeightsError.
        """

    def load_bias(self, first_row: int, bias: Tensor) -> None:
        """Likewise for the bias, where there is one."""

    def randomize(self, std: float, seed: int) -> None:
        """Fill matrix and bias with normal noise (dummy weights), where they live."""

    def fold_norm(self, norm: Norm) -> Norm:
        """Take over the weight of the norm whose result this matrix multiplies; -> what is left of the norm.

        The matrix's columns are multiplied by it, for good, and the norm's own weight becomes ones: the rows can then
        be multiplied before they are normalized. Once, after loading. A variant that cannot do so changes nothing, and
        returns the norm as it is.
        """

    # -- products

    def multiply(self, x: Normed) -> Tensor:
        """x: [tokens, in] -> [tokens, out], bias included, in the activations' dtype.

        It is left to the caller to add it (`Ops.add_norm`), say after it was summed over devices.
        """

    def multiply_add_norm(
        self, x: Normed, residual: Tensor, norm: Norm | None, branch_norm: Norm | None = None
    ) -> Normed:
        """residual += the product, in place, itself normalized first where there is a branch_norm (Gemma 3).

        Returns what `norm` leaves of the sum for the next product, or residual where there is no norm: it is
        add_norm(normalize(multiply(x), branch_norm), residual, norm).
        """

    def multiply_act(self, x: Normed, activation: str) -> Normed:
        """act_mul(multiply(x), activation)"""

    def multiply_activate(self, x: Normed, activation: str) -> Tensor:
        """activate(multiply(x), activation)"""

    def multiply_rope_write(
        self, x: Normed, rotary: Rotary, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        """rope_and_write(multiply(x), ...)"""

    # -- a vocabulary's matrix

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        """token_ids: [tokens] int64 -> [tokens, in_features], a tensor of its own: rows of the matrix, times scale."""

    def logits(self, hidden: Tensor, softcap: float | None = None, out: Tensor | None = None) -> Tensor:
        """hidden: [rows, in] -> float32 [rows, out], capped where asked; into `out` where given."""


class SharedExpert(NamedTuple):
    """What an expert that every token has adds to a mixture."""

    branch: Tensor  # [tokens, hidden]
    gate: Tensor | None  # [tokens, 1]: its sigmoid weighs the branch


class Experts(Protocol):
    """Gated MLPs of one shape, of which each token has the few that a router chooses. See `Ops.new_experts`."""

    @property
    def router(self) -> LinearWeight: ...
    @property
    def gate_ups(self) -> Sequence[LinearWeight]:
        """Each expert's matrix of gate and up."""

    @property
    def downs(self) -> Sequence[LinearWeight]: ...

    def fold_norm(self, norm: Norm) -> Norm:
        """See LinearWeight.fold_norm: of the router and of every expert's gate and up."""

    def multiply(self, x: Normed, shared: SharedExpert | None = None) -> Tensor:
        """x: [tokens, hidden] -> the same: each token's experts, each times its weight, and the shared one."""

    def multiply_add_norm(
        self, x: Normed, residual: Tensor, norm: Norm | None, shared: SharedExpert | None = None
    ) -> Normed:
        """add_norm(multiply(x, shared), residual, norm)"""


@dataclass(slots=True, frozen=True)
class PlainLayer:
    """A decoder's layer of five operations: queries, keys and values; attention; its output; and the two products of a
    gated MLP. A norm stands before attention and before the MLP."""

    attention: AttentionSpec
    group: int  # KV group, through whose block tables it reads and writes
    rotary: Rotary
    qkv: LinearWeight
    output: LinearWeight
    mlp_norm: Norm
    gate_up: LinearWeight
    down: LinearWeight
    activation: str
    next_norm: Norm  # of the layer after it


class LayerStack(Protocol):
    """Layers that run in one call."""

    def run(self, x: Normed, residual: Tensor, kv: Sequence[Tensor], batches: Sequence[AttentionBatch]) -> Normed:
        """x: what the first layer's norm left -> what the norm after the last layer leaves. The residual stream is
        changed in place, and x may be overwritten. kv: each layer's cache, and perhaps those of later layers; a list
        that was given before must still hold the same caches."""


class PlacedDecodes(NamedTuple):
    """Where the tokens of a decode-only step stand, one of each sequence: see AttentionBatch."""

    token_ids: Tensor  # [seqs] int64
    slots: Tensor  # [seqs] int64
    kv_lens: Tensor  # [seqs] int32
    block_tables: Tensor  # [seqs, max_blocks] int32; what is past a sequence's length is arbitrary


class Ops(Protocol):
    """One backend on one device: it makes the matrices, and does what is done between their products."""

    name: str

    def supported_block_sizes(self, head_dim: int) -> tuple[int, ...]: ...

    def new_linear(
        self, out_features: int, in_features: int, *, bias: bool = False, is_sensitive: bool = False
    ) -> LinearWeight:
        """is_sensitive: a vocabulary's or a router's, or one that a quantized checkpoint leaves as it was. A backend
        may hold it in more bits than the others."""

    def new_adapted(self, matrix: LinearWeight, bank: AdapterBank) -> AdaptedLinear:
        """The matrix with the adapters of a bank on top."""

    def adapter_tile(self, num_tokens: int) -> int | None:
        """Tokens in a tile of AdapterRows, in a step of so many; None: all that an adapter has."""

    def new_experts(
        self,
        num_experts: int,
        inner: int,
        hidden: int,
        *,
        top_k: int,
        normalizes: bool,
        activation: str,
        is_sensitive: bool = False,
        bias: bool = False,
    ) -> Experts:
        """So many MLPs with `inner` columns each. A token has the top_k with the largest weights, which are a softmax
        over all experts' logits; normalizes: made to sum to 1; is_sensitive: as `new_linear` has it; bias: of the
        router and of every matrix."""

    def new_stack(self, layers: Sequence[PlainLayer]) -> LayerStack | None:
        """These layers in one call, with the very bits of their operations one by one; None where the backend would
        gain nothing, or does not have one of the operations."""

    def normalize(self, x: Tensor, norm: Norm) -> Tensor:
        """The norm of each row. A folded norm's weight is ones."""

    def norm(self, residual: Tensor, norm: Norm) -> Normed:
        """normalize, for a product that follows; residual is not changed before that."""

    def add_norm(self, branch: Tensor, residual: Tensor, norm: Norm | None) -> Normed:
        """residual += branch, in place; returns norm(residual, norm), or residual where there is no norm."""

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up: [tokens, 2 * n] -> activation(first half) * second half; activation is silu, gelu_tanh, or
        clamped_silu, which is gpt-oss's: silu(1.702 * gate) / 1.702 of a gate of at most 7, times an up within 7
        of 0, plus 1."""

    def rope_and_write(
        self,
        qkv: Tensor,  # [tokens, (heads + 2 * kv_heads) * head_dim], as the fused projection gives it
        rotary: Rotary,
        kv: Tensor,
        batch: AttentionBatch,
        spec: AttentionSpec,
    ) -> Tensor:
        """Normalize and rotate q and k (half-split rotary), write k and v to their slots; returns q.

        q: [tokens, heads * head_dim], contiguous.
        """

    def attention(self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Normed:
        """Causal attention of each new token over its sequence's blocks -> [tokens, heads * head_dim]."""

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Activate each element of an MLP without a gate: silu, gelu, gelu_tanh or relu. May use x's memory."""

    def packed_attention(self, qkv: Tensor, batch: PackedBatch, spec: AttentionSpec) -> Tensor:
        """Attention of each token over all of its sequence. qkv: as the fused projection gives it
        -> [tokens, heads * head_dim]."""

    def place_decodes(self, step: Tensor, tokens: Tensor, block_tables: Tensor, block_size: int) -> PlacedDecodes:
        """Out of a batch's tokens [rows, positions] and tables [rows, blocks], what stands where `step` says.

        step: [3, seqs] int64: each sequence's row, the position of its token, and its tokens up to and with that.
        """
