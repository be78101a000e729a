"""Arithmetic that turns a model's shape into bytes. No torch: the executor sizes itself with it, the planner foretells.

Dtypes are names here: float32, bfloat16, float16; fp8 for a cache; int8, fp8, and gguf, and w4a16 and w8a16 (whole
numbers in groups, with activations in 16 bits) for matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from quire.config import EngineConfig
from quire.kernels.stored_rows import PackedLayout
from quire.models.spec import IntegerFormat, ModelSpec
from quire.models.tensors import TensorKind, adaptable_matrices, tensor_kinds

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
# The most sequences of a captured decode step. A larger one computes for longer than launching it takes, and its graph
# would hold logits for all its rows.
MAX_GRAPH_SEQS = 512
# The padded numbers of decodes and of prompt tokens of captured steps that mix both.
MIXED_DECODES = (0, 8, 16, 32, 64, 128, 256)
MIXED_TOKENS = (64, 128, 192, 256, 320, 384, 512)
MAX_MIXED_DECODES, MAX_MIXED_TOKENS = MIXED_DECODES[-1], MIXED_TOKENS[-1]
MAX_MIXED_PROMPTS = 16
# Matrix products of 448 rows take a third longer than those of 456, and around it times jump about.
_SLOW_ROWS = 448
_LARGEST_SIZES = (432, 456, MAX_GRAPH_SEQS)  # of decode steps with more than 416 sequences
_GRAPH_WORKSPACE_BYTES = 32 << 20  # cuBLAS's, of the stream on which steps are captured
_GRAPH_LAYER_BYTES = 34 * 1024  # 1.08 MB more in use for each of 62 captures of a model with 32 layers


def padded_size(num_seqs: int) -> int:
    """Rows that a decode step is captured for: powers of two while they are small, then steps of 8 and 16, and what
    multiplies fast above 416. At most a fifth of a large batch is padding."""
    if num_seqs <= 8:
        return 1 << (num_seqs - 1).bit_length()
    if 416 < num_seqs <= MAX_GRAPH_SEQS:
        return next(size for size in _LARGEST_SIZES if size >= num_seqs)
    step = 8 if num_seqs <= 256 else 16
    return -(-num_seqs // step) * step


def padded_decodes(num_decodes: int) -> int:
    """The decodes that a mixed step is captured for; where there are more than in any, the most there are."""
    return next((size for size in MIXED_DECODES if size >= num_decodes), MAX_MIXED_DECODES)


def is_slow(num_rows: int) -> bool:
    """Whether a captured step of so many rows would take longer than one of a few more."""
    return num_rows == _SLOW_ROWS


def mixed_sizes() -> list[tuple[int, int]]:
    """The decodes and prompt tokens that mixed steps are captured for."""
    return [(size, tokens) for tokens in MIXED_TOKENS for size in MIXED_DECODES if not is_slow(size + tokens)]


def smooth_prompt_tokens(num_decodes: int) -> int:
    """Prompt tokens of a step that readers should not notice: as many as a GPU multiplies in less than twice the time
    in which it reads the weights. That is the ratio of its two rates, whatever the model. Counted in whole tiles of a
    matrix product, beside decodes as they are padded."""
    return min(320, 384 - padded_decodes(num_decodes))


def num_graph_rows(max_num_seqs: int) -> int:
    """Rows of logits that the largest captured step has."""
    return max(padded_size(min(max_num_seqs, MAX_GRAPH_SEQS)), padded_decodes(max_num_seqs)) + MAX_MIXED_PROMPTS


def activation_dtype(config: EngineConfig, spec: ModelSpec, device: str) -> str:
    """What `dtype="auto"` means on a device ("cpu" or "cuda")."""
    if config.dtype != "auto":
        return config.dtype
    if device == "cpu":
        return "float32"
    # Norms keep an encoder's states small, so that the finer of the two types holds them.
    return "float16" if spec.dtype == "float16" or (spec.is_encoder and spec.dtype == "float32") else "bfloat16"


def kv_dtype(config: EngineConfig, dtype: str) -> str:
    return dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def weight_quantization(config: EngineConfig, spec: ModelSpec, device: str) -> str | None:
    """In what fewer bits the layers' matrices are held, if in any. A CPU unpacks a checkpoint's own 8-bit floats, and
    chooses for each of its matrices in whole numbers."""
    if config.quantization or device == "cpu":
        return config.quantization
    if spec.fp8 is not None:
        return "fp8"
    layout = packed_layout(config, spec)
    return None if layout is None else f"w{layout.bits}a16"


def packed_layout(config: EngineConfig, spec: ModelSpec) -> PackedLayout | None:
    """How a GPU holds a checkpoint in whole numbers, as its config tells; None where it is in others, or unpacked: for
    adapters, for ranks, and in 32 bits."""
    if config.quantization == "gguf":
        return PackedLayout(4, 32, has_offsets=True, has_order=False)  # that of Q4_K, the most common type
    stored = spec.integers
    if stored is None or config.quantization or config.enable_lora or config.num_ranks > 1:
        return None
    if activation_dtype(config, spec, "cuda") == "float32":
        return None
    has_offsets = stored.has_zeros and not stored.is_symmetric
    return PackedLayout(stored.bits, stored.group or 0, has_offsets, stored.has_order)


def matrix_value_bytes(dtype: str) -> float:
    """Bytes that one number of a matrix takes, without its share of the scales."""
    return {"w4a16": 0.5, "w8a16": 1.0, "gguf": 0.6}.get(dtype) or DTYPE_BYTES[dtype]


def batch_limits(config: EngineConfig, spec: ModelSpec, device: str) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens, chosen by device where the user did not.

    On a CPU a step of 512 tokens already multiplies at full speed, and shorter steps keep decodes smooth.
    """
    on_gpu = device == "cuda"
    tokens = config.max_num_batched_tokens
    max_num_seqs = config.max_num_seqs or min(1024 if on_gpu else 64, tokens or 1024)
    if tokens is None:
        tokens = max(8192 if on_gpu else 512, max_num_seqs)
        if not config.enable_chunked_prefill or spec.is_encoder:
            tokens = max(tokens, config.max_model_len or spec.max_position)
    return max_num_seqs, tokens


def cpu_step_bytes(spec: ModelSpec, max_num_seqs: int, max_tokens: int) -> int:
    """An upper bound from shapes: what one layer holds at once for every token, and logits for every row, of which
    sampling makes a scaled copy and scratch. All in float32."""
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    per_token = 4 * spec.hidden_size + qkv + 2 * spec.num_heads * spec.head_dim + 3 * spec.intermediate_size
    if (experts := spec.experts) is not None:  # rows in the order of experts, and one expert's, which may have all
        per_token += experts.top_k * (spec.hidden_size + 1) + spec.hidden_size + 2 * experts.num_experts
        per_token += 3 * max(experts.intermediate_size, experts.shared_intermediate_size or 0)
    return max_tokens * per_token * 4 + 3 * logits_bytes(spec, max_num_seqs)


def cuda_step_bytes(
    spec: ModelSpec, dtype: str, max_num_seqs: int, max_tokens: int, max_seq_len: int, block_size: int, num_groups: int
) -> int:
    """What the engine will measure: the most that a step holds at once, in its layers or while it samples."""
    row_bytes = spec.hidden_size * DTYPE_BYTES[dtype]
    logits = logits_bytes(spec, max_num_seqs)
    sampling = (max_tokens + 2 * max_num_seqs) * row_bytes + logits + logits // 8
    return max(layers_bytes(spec, dtype, max_tokens), sampling) + step_slack_bytes(
        max_num_seqs, max_seq_len, block_size, num_groups
    )


def step_slack_bytes(max_num_seqs: int, max_seq_len: int, block_size: int, num_groups: int) -> int:
    """What a step takes beside the tensors that count: its rows of block tables, small ones, and the ends of pieces
    that nothing fits into."""
    return table_bytes(max_num_seqs, max_seq_len, block_size, num_groups) + (16 << 20)


def table_bytes(num_seqs: int, max_seq_len: int, block_size: int, num_groups: int) -> int:
    return num_groups * num_seqs * -(-max_seq_len // block_size) * 4


def batch_bytes(max_num_seqs: int, max_seq_len: int, block_size: int, num_groups: int) -> int:
    """Bytes of the persistent batch: every sequence's tokens and block tables, and one more of each."""
    tables = table_bytes(max_num_seqs + 1, max_seq_len, block_size, num_groups)
    return (max_num_seqs + 1) * (max_seq_len + 1) * 8 + tables


def layers_bytes(spec: ModelSpec, dtype: str, num_tokens: int) -> int:
    """What a GPU's layers hold at once: the residual stream, and the widest of what stands between two products."""
    q_width = spec.num_heads * spec.head_dim
    qkv_width = q_width + 2 * spec.num_kv_heads * spec.head_dim
    normed = 0 if folds_norms(spec, dtype) else spec.hidden_size
    widest = qkv_width + q_width  # q beside q, k and v
    if not all(layer.has_experts for layer in spec.layers):
        # Gate and up and their product; or what is activated in place, and the product after it.
        inner = 3 * spec.intermediate_size if spec.gated_mlp else spec.intermediate_size + spec.hidden_size
        widest = max(widest, inner)
    for_mlp = spec.hidden_size if spec.parallel_residual else 0  # waits while attention runs
    per_token = (spec.hidden_size + normed + for_mlp + widest) * DTYPE_BYTES[dtype]
    if spec.experts is not None:
        per_token = max(per_token, 2 * spec.hidden_size * DTYPE_BYTES[dtype] + _routed_bytes(spec, dtype))
    return num_tokens * per_token


def _routed_bytes(spec: ModelSpec, dtype: str) -> int:
    """What a GPU's mixture of experts holds for one token: the products of its picks and their weights, the shared
    expert's, its place in any expert's list, and its logits."""
    experts = spec.experts
    assert experts is not None
    values = experts.top_k * (spec.hidden_size + experts.intermediate_size + 1)
    if experts.shared_intermediate_size is not None:
        values += spec.hidden_size + 1
    num_padded = max(16, 1 << (experts.num_experts - 1).bit_length())
    return values * DTYPE_BYTES[dtype] + 4 * experts.num_experts + 4 * num_padded


def logits_bytes(spec: ModelSpec, num_rows: int) -> int:
    return num_rows * spec.vocab_size * 4


def folds_norms(spec: ModelSpec, dtype: str) -> bool:
    """Whether a GPU's norms are folded into the matrices after them. Their rows are then multiplied as they are in the
    residual stream, whose range float16 may not hold; a branch's own norm would still be in the way; and a LayerNorm
    needs the rows' means first."""
    return dtype != "float16" and not spec.sandwich_norms and not spec.layer_norms


def num_graphs(max_num_seqs: int) -> int:
    """How many graphs there are once all decode-only and mixed steps are captured."""
    most_rows = num_graph_rows(max_num_seqs)
    decodes = {padded_size(num) for num in range(1, min(max_num_seqs, MAX_GRAPH_SEQS) + 1)}
    mixed = [size for size, _ in mixed_sizes() if size + MAX_MIXED_PROMPTS <= most_rows]
    return 2 * len(decodes) + len(mixed)  # with and without shared prefixes


def adapter_bytes(config: EngineConfig, spec: ModelSpec, dtype: str) -> int:
    """Bytes of the slots of adapters: the thin matrices of as many as a step may have, for the largest rank, and the
    ranks themselves."""
    if not config.enable_lora:
        return 0
    values = adapter_rank(config) * sum(map(sum, adaptable_matrices(spec).values()))  # both sides of each
    num_mlps = sum(not layer.has_experts for layer in spec.layers)
    ranks = 2 * (spec.num_layers + num_mlps) * -(-config.max_loras // 4) * 4
    return config.max_loras * values * DTYPE_BYTES[dtype] + ranks * 4


def adapter_rank(config: EngineConfig) -> int:
    """The rank that slots are made for: whole tiles of a tensor core."""
    return -(-config.max_lora_rank // 16) * 16


def adapted_step_bytes(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: str,
    step_bytes: int,
    max_num_seqs: int,
    max_tokens: int,
    max_seq_len: int,
    block_size: int,
    num_groups: int,
) -> int:
    """An upper bound of what a GPU's step takes where its tokens may have adapters. step_bytes: what it takes without.

    Adapters are added to a whole product, also where the kernel that multiplies W alone activates it and holds no
    product. Matrices in 8-bit floats then take rows in 16 bits, and hold their product before and after its scaling."""
    if not config.enable_lora:
        return step_bytes
    layers = layers_bytes(spec, dtype, max_tokens)
    if weight_quantization(config, spec, "cuda") == "fp8":
        qkv_width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        rows_and_product = spec.hidden_size + max(qkv_width, 2 * spec.intermediate_size)
        layers += max_tokens * rows_and_product * DTYPE_BYTES[dtype]
    # Rows of x at the rank of three adapters, in float32; of few tokens in up to eight parts, which are added up later.
    shrunk = 3 * adapter_rank(config) * 4 * max(max_tokens, 8 * min(max_tokens, 1024))
    slack = step_slack_bytes(max_num_seqs, max_seq_len, block_size, num_groups)
    return max(step_bytes, layers + slack) + shrunk


def graph_bytes(
    spec: ModelSpec,
    dtype: str,
    max_num_seqs: int,
    max_seq_len: int,
    block_size: int,
    num_groups: int,
    *,
    adapted: bool = False,
) -> int:
    """Bytes of all captured steps together; where steps may have adapters, each is captured with and without. They
    share their tensors, since only one runs at a time, but not what the driver keeps of each: some 34 KiB a layer on an
    H200, and twice as much with adapters."""
    tensors = layers_bytes(spec, dtype, MAX_MIXED_DECODES + MAX_MIXED_TOKENS) + _GRAPH_WORKSPACE_BYTES
    tensors += table_bytes(num_graph_rows(max_num_seqs), max_seq_len, block_size, num_groups)
    kept = (3 if adapted else 1) * num_graphs(max_num_seqs) * spec.num_layers * _GRAPH_LAYER_BYTES
    return tensors + logits_bytes(spec, num_graph_rows(max_num_seqs)) + kept


def matrix_kinds(spec: ModelSpec) -> list[TensorKind]:
    """The tensors that a model holds in matrices, biases included: all but norms, sinks and a classifier's head."""
    beside = ("norm", "self_attn.sinks", "score.")
    return [kind for kind in tensor_kinds(spec) if not any(one in kind.name for one in beside)]


def _num_values(kinds: Iterable[TensorKind]) -> int:
    return sum(kind.count * math.prod(kind.shape) for kind in kinds)


def num_matrix_values(spec: ModelSpec) -> int:
    """Numbers in the matrices, biases included: embedding, head, and those of the layers."""
    return _num_values(matrix_kinds(spec))


def num_norm_values(spec: ModelSpec) -> int:
    """Numbers in the norms, and in sinks and slopes, which stay in float32. A LayerNorm has a bias even where the
    checkpoint has none."""
    weights = _num_values(kind for kind in tensor_kinds(spec) if kind.name.endswith("norm.weight"))
    by_head = spec.num_heads * (spec.num_layers * spec.sinks + (spec.alibi_slopes is not None))
    return weights * (2 if spec.layer_norms else 1) + by_head


def rotary_table_bytes(spec: ModelSpec, max_position: int) -> int:
    """One float32 table for each way of turning that the layers have."""
    kinds: list[object] = []
    for layer in spec.layers:
        if layer.rope not in kinds:
            kinds.append(layer.rope)
    return len(kinds) * max_position * spec.head_dim * 4


def _bytes_beside_fp8(spec: ModelSpec) -> int:
    """Where matrices are in 8-bit floats: the second bytes of those that are not, and of biases, and a scale for each
    row of those that are."""

    def has_two_bytes(kind: TensorKind) -> bool:
        if kind.layer is None or not kind.name.endswith("_proj.weight"):
            return True  # of the vocabulary, a bias, or what chooses among experts
        return kind.layer.wide_attention if kind.name.startswith("self_attn.") else kind.layer.wide_mlp

    kinds = matrix_kinds(spec)
    wide = _num_values(kind for kind in kinds if has_two_bytes(kind))
    return wide + sum(4 * kind.count * kind.shape[0] for kind in kinds if not has_two_bytes(kind))


def weight_bytes(spec: ModelSpec, dtype: str, max_position: int) -> int:
    """All that a model keeps on its device when its matrices are dense in `dtype`; in fp8 those of its layers are, each
    row with a scale, but for those that a checkpoint leaves wide, and the vocabulary's have two bytes a number.

    The native CPU kernels take a little more: they pad matrices to whole panels, and int8 has a scale for each row.
    """
    matrices = int(num_matrix_values(spec) * matrix_value_bytes(dtype))
    if dtype in ("w4a16", "w8a16", "gguf"):
        # Q4_K_M has a sixth of its matrices in 8 bits and the others in 4.
        stored = spec.integers or IntegerFormat(layout="gguf", bits=4, group=32, has_zeros=True)
        vocabulary = _num_values(kind for kind in matrix_kinds(spec) if kind.layer is None)
        in_layers = num_matrix_values(spec) - vocabulary
        scales = in_layers // (stored.group or spec.hidden_size) * (8 if stored.has_zeros else 4)
        # Room for the widest matrix in 16 bits, which products of many rows take.
        widest = max(2 * spec.intermediate_size, spec.num_heads * spec.head_dim) * spec.hidden_size * 2
        matrices += int(vocabulary * (2 - matrix_value_bytes(dtype))) + scales + widest
    if dtype == "fp8":
        matrices += _bytes_beside_fp8(spec)
    return matrices + num_norm_values(spec) * 4 + rotary_table_bytes(spec, max_position)
