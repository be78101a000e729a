"""A dry run of the steps that an engine will make: the model's own code on tensors that have shapes and no memory. It
shows which kernels they launch."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

from quire.config import EngineConfig
from quire.executor import sizing
from quire.executor.decode_graphs import MAX_GROUPS, common_sizes
from quire.kernels.adapters import AdapterBank
from quire.kernels.interface import AttentionBatch
from quire.kernels.shared_prefix import packed_length, unpack_shared_prefixes
from quire.kernels.triton import TritonOps
from quire.kernels.triton.invariant import InvariantOps
from quire.kernels.triton.precompile import KernelJob, collecting
from quire.kernels.triton.sampling_filter import draw_each_way
from quire.models.decoder import Decoder
from quire.models.spec import LayerSpec, ModelSpec, RopeSpec

_META = torch.device("meta")
_SHORT_PROMPT = 64
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn}


class NeededKernels(NamedTuple):
    """The kernels to compile, by when they are needed. Each stands in one of the lists."""

    prompts: list[KernelJob]  # the largest step, which the start-up measures first
    start: list[KernelJob]  # what else the start-up launches itself
    later: list[KernelJob]  # what requests may need after it


def needed_kernels(config: EngineConfig, spec: ModelSpec, target: GPUTarget) -> NeededKernels:
    steps = DryRun(config, spec)
    with collecting(target) as prompts:
        steps.prompts(steps.max_len)
    with collecting(target) as start:
        for size in common_sizes(steps.max_num_seqs):
            for adapted in steps.kinds:
                steps.decode(size, shares=False, adapted=adapted)
        draw_each_way(spec.vocab_size, _META)
    with collecting(target) as later:
        for adapted in steps.kinds:
            steps.prompts(_SHORT_PROMPT, adapted=adapted)
        for size in sorted({16, 128, min(256, steps.max_num_seqs), steps.max_num_seqs}):  # one of each class
            for adapted in steps.kinds:
                steps.decode(min(size, steps.max_num_seqs), shares=True, adapted=adapted)
                for num_tokens in (2, 16, 64, 128):  # short chunks have smaller tiles
                    steps.mixed(size - 1, num_tokens, adapted=adapted)
        steps.logits(sizing.num_graph_rows(steps.max_num_seqs))
        if spec.experts is not None:  # their tiles follow the number of tokens
            for power in range(steps.max_tokens.bit_length()):
                steps.mixed(0, 1 << power, adapted=False)
    return NeededKernels(
        list(prompts.values()),
        [job for key, job in start.items() if key not in prompts],
        [job for key, job in later.items() if key not in prompts and key not in start],
    )


class _DryDecoder(Decoder):
    """No step reads the numbers of a rotary table here, and computing them takes more of torch than all the rest."""

    def _rope_table(self, rope: RopeSpec) -> Tensor:
        return torch.empty((self.max_position, self.spec.head_dim), dtype=torch.float32, device=_META)


class DryRun:
    """The model on the meta device, with as few layers as show all that they launch."""

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        name = sizing.activation_dtype(config, spec, "cuda")
        dtype = _DTYPES[name]
        self.config = config
        self.max_len = config.max_model_len or spec.max_position
        self.max_num_seqs, self.max_tokens = sizing.batch_limits(config, spec, "cuda")
        self.kinds = (False, True) if config.enable_lora else (False,)  # without adapters, and with them
        quantization, packed = sizing.weight_quantization(config, spec, "cuda"), sizing.packed_layout(config, spec)
        if config.batch_invariant:
            ops: TritonOps = InvariantOps(_META, dtype)
        else:
            ops = TritonOps(_META, dtype, quantization=quantization, packed=packed)
        self.bank = None
        if config.enable_lora:
            self.bank = AdapterBank(
                config.max_loras, config.max_lora_rank, device=_META, dtype=dtype, tile=ops.adapter_tile
            )
        kept = _one_of_each(spec)
        self.spec = replace(spec, num_layers=len(kept), layers=kept)
        self.decoder = _DryDecoder(
            self.spec, ops, device=_META, dtype=dtype, max_position=self.max_len, adapters=self.bank
        )
        self.decoder.finish_loading()
        shape = (self.max_tokens // config.block_size + 1, 2, spec.num_kv_heads, config.block_size, spec.head_dim)
        self.wide_cache = torch.empty(shape, dtype=dtype, device=_META)
        self.cache = torch.empty(shape, dtype=_DTYPES[sizing.kv_dtype(config, name)], device=_META)
        self.offsets = None
        if self.cache.element_size() == 1 and spec.ignores_key_shifts:
            of_heads = (len(kept), spec.num_kv_heads, spec.head_dim)
            self.offsets = torch.empty(of_heads, dtype=torch.float32, device=_META)
            self.decoder.set_kv_offsets(self.offsets)

    def prompts(self, length: int, *, adapted: bool = False) -> None:
        """Run as many prompts of this length as a step takes."""
        length = min(length, self.max_len)
        num_seqs = -(-self.max_tokens // length)
        self._run(self._batch(self.max_tokens, num_seqs, length), self.cache, adapted)
        self.logits(self.max_num_seqs)  # the start-up measures them for as many rows as there may be
        if self.cache.element_size() == 1:  # its scales and offsets are found with a cache that needs none
            self.decoder.set_kv_offsets(None)
            self._run(self._batch(self.max_tokens, num_seqs, length), self.wide_cache)
            self.decoder.set_kv_offsets(self.offsets)

    def mixed(self, num_decodes: int, num_tokens: int, *, adapted: bool) -> None:
        """Decodes beside one chunk of a prompt."""
        batch = self._batch(num_decodes + num_tokens, num_decodes + 1, num_tokens, num_decodes)
        self._run(batch, self.cache, adapted)

    def logits(self, num_rows: int) -> None:
        hidden = torch.empty((num_rows, self.spec.hidden_size), dtype=self.decoder.dtype, device=_META)
        self.decoder.logits(hidden, None)

    def decode(self, size: int, *, shares: bool, adapted: bool) -> None:
        batch = self._batch(size, size, 1, size)
        # As they lie in the graphs' own tensor: whether a row is aligned decides which kernel is compiled.
        step = torch.empty((3, sizing.padded_size(self.max_num_seqs)), dtype=torch.int64, device=_META)[:, :size]
        batch.positions = step[1]
        if shares:
            packed = torch.empty(packed_length(size, MAX_GROUPS), dtype=torch.int32, device=_META)
            batch.shared = unpack_shared_prefixes(packed, size, MAX_GROUPS)
        tokens = torch.empty((self.max_num_seqs + 1, self.max_len + 1), dtype=torch.int64, device=_META)
        self.decoder.ops.place_decodes(step, tokens, batch.block_tables, self.config.block_size)
        self._run(batch, self.cache, adapted)

    def _batch(self, num_tokens: int, num_seqs: int, max_query_len: int, num_decodes: int = 0) -> AttentionBatch:
        num_blocks = -(-self.max_len // self.config.block_size)
        return AttentionBatch(
            positions=torch.empty(num_tokens, dtype=torch.int64, device=_META),
            slots=torch.empty(num_tokens, dtype=torch.int64, device=_META),
            query_starts=torch.empty(num_seqs + 1, dtype=torch.int32, device=_META),
            kv_lens=torch.empty(num_seqs, dtype=torch.int32, device=_META),
            block_tables=torch.empty((num_seqs, num_blocks), dtype=torch.int32, device=_META),
            max_query_len=max_query_len,
            max_kv_len=self.max_len,
            num_decodes=num_decodes,
        )

    def _run(self, batch: AttentionBatch, cache: Tensor, adapted: bool = False) -> None:
        if adapted:
            assert self.bank is not None
            num_tokens = len(batch.positions)
            packed = torch.empty(self.bank.rows_length(num_tokens), dtype=torch.int32, device=_META)
            batch.adapters = self.bank.unpack_rows(packed, num_tokens)
        token_ids = torch.empty(batch.positions.shape, dtype=torch.int64, device=_META)
        hidden = self.decoder.forward(
            token_ids, [batch] * len(self.decoder.layout.windows), [cache] * self.spec.num_layers
        )
        self.decoder.logits(hidden[: len(batch.kv_lens)], None)


def _one_of_each(spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """Each kind of layer, twice: what a layer is followed by matters too, and the last is followed by nothing."""
    kinds: list[LayerSpec] = []
    for layer in spec.layers:
        if layer not in kinds:
            kinds.append(layer)
    return (*kinds, *kinds)
