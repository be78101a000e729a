"""What a kernel backend offers to the decoder. One object, chosen once, passed down; nothing is looked up globally.

Every backend computes the same functions as `kernels/reference`, which is plain torch: oracle and fallback.
Activations are [tokens, features]. The KV cache of one layer is one tensor

    kv: [num_blocks, 2, num_kv_heads, block_size, head_dim]        (index 0 of dim 1 is K, 1 is V)

so that one KV head's part of a block is one contiguous tile, and one block of one layer is one contiguous run of
bytes: what swap and copy-on-write move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


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
class Unscaled:
    """Normalised rows, but for a factor: a backend may leave it to the product that follows, which is linear."""

    x: Tensor  # [tokens, features]: the residual stream times the norm's weight, unless that is folded
    # [parts, tokens] float32: of the residual stream; a token's parts add up to its sum of squares. None: x is the
    # stream itself, to be looked at.
    square_sums: Tensor | None
    eps: float


@dataclass(slots=True, frozen=True)
class FoldedNorm:
    """A norm whose weight is in the columns of the matrix that follows it: only the rows' factors are left to do."""

    ones: Tensor  # what is left of the weight, for kernels that want one


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


@dataclass(slots=True, frozen=True)
class AttentionSpec:
    """One layer's attention, apart from the data."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a token sees itself and the window - 1 before it
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    k_scale: float = 1.0  # an 8-bit cache holds k / k_scale and v / v_scale; 1 where the cache is as wide as k and v
    v_scale: float = 1.0


QUANTIZED_BLOCK = 32  # inputs that share a scale


@dataclass(slots=True, frozen=True)
class QuantizedRows:
    """Rows of a matrix as a quantized file holds them: weight = code * scale + minimum, exact in float32."""

    codes: NDArray[np.int8]  # [rows, in_features]
    scales: NDArray[np.float32]  # [rows, in_features / QUANTIZED_BLOCK]
    minima: NDArray[np.float32] | None  # likewise; None: all zero
    has_4_bits: bool = False  # codes are 0 to 15


class LinearWeight(Protocol):
    """A matrix [out_features, in_features] in whatever layout and precision its backend multiplies fastest.

    Rows arrive piecewise (`load_rows`), so fused matrices are filled from a checkpoint's separate tensors without a
    second copy of the model.
    """

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

    @property
    def keeps_quantized(self) -> bool:
        """Whether `load_quantized` may take a quantized file's rows as they are."""

    def load_rows(self, first_row: int, rows: Tensor) -> None:
        """Fill the rows from first_row on with `rows`: [n, in_features], any float dtype, from any device."""

    def load_quantized(self, first_row: int, rows: QuantizedRows) -> bool:
        """Keep the rows as they are. False, and nothing changed, where they do not go with earlier ones."""

    def load_bias(self, first_row: int, bias: Tensor) -> None:
        """Likewise for the bias; only where new_linear was asked for one."""

    def randomize(self, std: float, seed: int) -> None:
        """Fill with normal noise (dummy weights), where the weight lives."""


class PlacedDecodes(NamedTuple):
    """Of a step with one token of each sequence: see AttentionBatch."""

    token_ids: Tensor  # [seqs] int64
    slots: Tensor  # [seqs] int64
    kv_lens: Tensor  # [seqs] int32
    block_tables: Tensor  # [seqs, max_blocks] int32; what is past a sequence's length is arbitrary


class Ops(Protocol):
    """The operations of one backend on one device."""

    name: str
    folds_norms: bool  # whether norms may come as FoldedNorm

    def supported_block_sizes(self, head_dim: int) -> tuple[int, ...]: ...

    def new_linear(self, out_features: int, in_features: int, *, bias: bool = False) -> LinearWeight: ...

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """x: [tokens, in] -> [tokens, out], in the activations' dtype; bias added where there is one."""

    def embed(self, token_ids: Tensor, weight: LinearWeight, scale: float | None = None) -> Tensor:
        """token_ids: [tokens] int64 -> [tokens, in_features]: rows of the matrix (tied or not), times scale."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight, computed in float32. (Gemma's 1 + weight is folded in at load.)"""

    def fold_norm(self, norm: Tensor, weight: LinearWeight) -> FoldedNorm:
        """Multiply the matrix's columns by the weight of the norm before it. Only where `folds_norms`."""

    def norm(self, residual: Tensor, norm: Tensor | FoldedNorm, eps: float) -> Tensor | Unscaled:
        """rms_norm, for a product that follows; residual is not changed before that."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x, in place; returns rms_norm(residual)."""

    def rope_and_write(
        self,
        qkv: Tensor,  # [tokens, (heads + 2 * kv_heads) * head_dim], as the fused projection gives it
        cos_sin: Tensor,  # [max_positions, head_dim]: cos in the first half, sin in the second, float32
        kv: Tensor,
        batch: AttentionBatch,
        spec: AttentionSpec,
        q_norm: Tensor | None = None,  # [head_dim]: per-head RMS norm before rotation (Qwen3, Gemma 3)
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """Normalise and rotate q and k (half-split rotary), write k and v to their slots; returns q.

        q: [tokens, heads * head_dim], contiguous.
        """

    def attention(self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
        """Causal attention of each new token over its sequence's blocks -> [tokens, heads * head_dim]."""

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up: [tokens, 2 * n] -> activation(first half) * second half; activation is 'silu' or 'gelu_tanh'."""

    def logits(
        self, hidden: Tensor, weight: LinearWeight, softcap: float | None = None, out: Tensor | None = None
    ) -> Tensor:
        """hidden: [rows, in] -> float32 [rows, out], capped where asked; into `out` where given."""

    def place_decodes(self, step: Tensor, tokens: Tensor, block_tables: Tensor, block_size: int) -> PlacedDecodes:
        """Out of a batch's tokens [rows, positions] and tables [rows, blocks], what stands where `step` says.

        step: [3, seqs] int64: each sequence's row, the position of its token, and its tokens up to and with that.
        """

    # Three pairs of the above. `kernels/composed.py` has them as such; a backend may run a pair in one launch.

    def linear_rope_write(
        self,
        x: Tensor | Unscaled,
        weight: LinearWeight,
        cos_sin: Tensor,
        kv: Tensor,
        batch: AttentionBatch,
        spec: AttentionSpec,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """rope_and_write(linear(x, weight), ...)"""

    def linear_add_norm(
        self,
        x: Tensor,
        weight: LinearWeight,
        residual: Tensor,
        norm: Tensor | FoldedNorm | None,
        eps: float,
        branch_norm: Tensor | None = None,
    ) -> Tensor | Unscaled:
        """residual += linear(x, weight), in place; returns rms_norm(residual, norm), or residual where there is none.

        branch_norm: an RMS norm of the product before it is added (Gemma 3).
        """

    def linear_act(self, x: Tensor | Unscaled, weight: LinearWeight, activation: str) -> Tensor:
        """act_mul(linear(x, weight), activation)"""
