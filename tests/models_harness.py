"""Runs a Decoder over paged KV by hand-written schedules, with any Ops: one harness for the tests of every backend.

model = tiny_model("llama")                         # a random transformers model
steps = chunked([len(s) for s in sequences], 5)     # who computes how many tokens in each step
logits = run_paged(spec_of(model), model.state_dict(), ops, sequences, steps, block_size=16)
expected = [oracle_logits(model, s) for s in sequences]
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.kernels.cpu import CpuOps, unavailable_reason
from quire.kernels.interface import AdapterRows, AttentionBatch, Ops
from quire.kernels.reference import ReferenceOps
from quire.models.architectures import spec_from_config
from quire.models.decoder import Decoder
from quire.models.spec import ModelSpec

# One step: (sequence, number of its next tokens), in any order.
Step = list[tuple[int, int]]

# What stands in block tables past a sequence's length: to use it is to crash.
GARBAGE_BLOCK = 1_000_000_007


def cpu_backends() -> Iterator[Ops]:
    """The backends that a CPU has."""
    yield ReferenceOps("cpu", torch.float32)
    if unavailable_reason() is None:
        yield CpuOps(num_threads=1)


def load_decoder(
    spec: ModelSpec,
    state_dict: Mapping[str, Tensor],
    ops: Ops,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_position: int = 256,
    **parts: Any,
) -> Decoder:
    """A Decoder filled from a transformers state dict: every slot once, nothing left over."""
    decoder = Decoder(spec, ops, device=device, dtype=dtype, max_position=max_position, **parts)
    slots = decoder.weight_slots()
    for name, slot in slots.items():
        tensor = state_dict[name]
        assert tuple(tensor.shape) == slot.shape, f"{name}: {tuple(tensor.shape)} for a slot of {slot.shape}"
        slot.load(tensor if slot.part is None else tensor[slot.part])
    left_over = [name for name in state_dict if name not in slots and not decoder.is_ignored_weight(name)]
    assert not left_over, left_over
    decoder.finish_loading()
    return decoder


class PagedRun:
    """Sequences over one KV cache whose blocks start as NaN. They are handed out in shuffled order, in each KV group in
    another one."""

    adapters: AdapterRows | None = None  # of the next step

    def __init__(
        self,
        decoder: Decoder,
        sequences: Sequence[Sequence[int]],
        block_size: int,
        *,
        device: torch.device | str = "cpu",
        kv_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        shared_prefix: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        """shared_prefix: {sequence: (other, num_blocks)}: begins with the other's blocks and never computes them."""
        self.decoder = decoder
        self.sequences = [list(sequence) for sequence in sequences]
        self.block_size = block_size
        self.device = device
        spec = decoder.share.spec(decoder.spec)
        shared_prefix = shared_prefix or {}
        lengths = [-(-len(sequence) // block_size) for sequence in self.sequences]
        num_blocks = sum(lengths) + 3
        self.tables: list[list[list[int]]] = []  # of each group, of each sequence
        for group in range(len(decoder.layout.windows)):
            free = random.Random(seed + group).sample(range(num_blocks), num_blocks)
            self.tables.append([[free.pop() for _ in range(length)] for length in lengths])
        self.num_computed = [0] * len(self.sequences)
        for sequence, (other, num_shared) in shared_prefix.items():
            assert (
                self.sequences[sequence][: num_shared * block_size] == self.sequences[other][: num_shared * block_size]
            )
            for tables in self.tables:
                tables[sequence][:num_shared] = tables[other][:num_shared]
            self.num_computed[sequence] = num_shared * block_size
        shape = (num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)
        self.kv = [
            torch.full(shape, float("nan"), device=device).to(kv_dtype) for _ in range(spec.num_layers)
        ]  # fmt: skip

    def step(self, step: Step) -> dict[int, Tensor]:
        """Runs one step; the logits of each sequence's new tokens, by sequence."""
        order = sorted(step, key=lambda item: item[1] != 1)  # decodes first
        token_ids = self._token_ids(order)
        batches = [self._batch(order, tables) for tables in self.tables]
        with torch.inference_mode():
            hidden = self.decoder.forward(token_ids, batches, self.kv)
            indices = torch.arange(len(token_ids), device=self.device)
            logits = self.decoder.gathered_logits(hidden, indices)
        starts = batches[0].query_starts.tolist()
        for sequence, num_tokens in order:
            self.num_computed[sequence] += num_tokens
        if logits is None:
            return {}  # another rank's
        logits = logits.cpu()
        return {sequence: logits[starts[i] : starts[i + 1]] for i, (sequence, _) in enumerate(order)}

    def _token_ids(self, order: Step) -> Tensor:
        spans = [(self.sequences[sequence], self.num_computed[sequence], count) for sequence, count in order]
        token_ids = [token for tokens, first, count in spans for token in tokens[first : first + count]]
        return torch.tensor(token_ids, device=self.device)

    def _batch(self, order: Step, sequence_tables: list[list[int]]) -> AttentionBatch:
        positions: list[int] = []
        slots: list[int] = []
        starts, kv_lens = [0], []
        for sequence, num_tokens in order:
            first = self.num_computed[sequence]
            assert num_tokens > 0 and first + num_tokens <= len(self.sequences[sequence])
            for position in range(first, first + num_tokens):
                positions.append(position)
                block = sequence_tables[sequence][position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
            starts.append(len(positions))
            kv_lens.append(first + num_tokens)
        width = max(len(table) for table in sequence_tables) + 2
        tables = torch.full((len(order), width), GARBAGE_BLOCK, dtype=torch.int32)
        for i, (sequence, _) in enumerate(order):
            used = sequence_tables[sequence][: -(-kv_lens[i] // self.block_size)]
            tables[i, : len(used)] = torch.tensor(used, dtype=torch.int32)
        query_lens = [num_tokens for _, num_tokens in order]
        return AttentionBatch(
            positions=torch.tensor(positions, device=self.device),
            slots=torch.tensor(slots, device=self.device),
            query_starts=torch.tensor(starts, dtype=torch.int32, device=self.device),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=self.device),
            block_tables=tables.to(self.device),
            max_query_len=max(query_lens),
            max_kv_len=max(kv_lens),
            num_decodes=query_lens.count(1),
            adapters=self.adapters,
        )


def run_paged(
    spec: ModelSpec,
    state_dict: Mapping[str, Tensor],
    ops: Ops,
    sequences: Sequence[Sequence[int]],
    schedule: Sequence[Step],
    block_size: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
    shared_prefix: Mapping[int, tuple[int, int]] | None = None,
) -> list[Tensor]:
    """Each sequence's logits [computed tokens, vocab], after running the schedule."""
    decoder = load_decoder(spec, state_dict, ops, device=device, dtype=dtype)
    run = PagedRun(
        decoder,
        sequences,
        block_size,
        device=device,
        kv_dtype=kv_dtype or dtype,
        seed=seed,
        shared_prefix=shared_prefix,
    )
    parts: list[list[Tensor]] = [[] for _ in sequences]
    for step in schedule:
        for sequence, logits in run.step(step).items():
            parts[sequence].append(logits)
    return [torch.cat(part) for part in parts]


def whole(lengths: Sequence[int]) -> list[Step]:
    """All prompts at once."""
    return [list(enumerate(lengths))]


def chunked(lengths: Sequence[int], chunk: int) -> list[Step]:
    """Every step computes the next `chunk` tokens of each sequence."""
    steps = range(0, max(lengths), chunk)
    return [[(i, min(chunk, n - first)) for i, n in enumerate(lengths) if n > first] for first in steps]


def token_by_token(lengths: Sequence[int]) -> list[Step]:
    return chunked(lengths, 1)


def mixed(lengths: Sequence[int], seed: int = 0) -> list[Step]:
    """Random steps: each sequence arrives at some time, prefills in uneven chunks and decodes its last third."""
    rng = random.Random(seed)
    done = [0] * len(lengths)
    arrivals = [rng.randrange(4) for _ in lengths]
    steps: list[Step] = []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        step: Step = []
        for i, length in enumerate(lengths):
            prompt = length - length // 3
            if done[i] == length or len(steps) < arrivals[i]:
                continue
            num_tokens = 1 if done[i] >= prompt else rng.randint(1, min(9, prompt - done[i]))
            done[i] += num_tokens
            step.append((i, num_tokens))
        rng.shuffle(step)
        if step:
            steps.append(step)
        else:
            arrivals = [max(0, a - 1) for a in arrivals]
    return steps


SCHEDULES = {
    "whole": whole,
    "chunked": lambda lengths: chunked(lengths, 7),
    "token_by_token": token_by_token,
    "mixed": mixed,
}


def random_sequences(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


_TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
_GEMMA = {"head_dim": 32, "num_hidden_layers": 4, "sliding_window": 8, "query_pre_attn_scalar": 24}
_GEMMA_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]

# name -> (transformers model class, config class, what its config adds to _TINY)
TINY_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biases": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "num_key_value_heads": 1},
    ),
    "llama-llama3": ("LlamaForCausalLM", "LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "llama-linear": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1000.0}},
    ),
    "llama-yarn": ("LlamaForCausalLM", "LlamaConfig", {"rope_parameters": _YARN_ROPE}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 32}),
    "qwen3-window": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_GEMMA, "layer_types": _GEMMA_LAYERS}),
    "gemma3-softcap": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **_GEMMA,
            "layer_types": _GEMMA_LAYERS,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
}


def tiny_model(name: str, seed: int = 0) -> Any:
    """A random transformers model in float32, with every norm and bias away from its usual start."""
    import transformers

    model_class, config_class, changes = TINY_MODELS[name]
    config = getattr(transformers, config_class)(**{**_TINY, **changes}, architectures=[model_class])
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in parameter_name and "gemma" not in name else 0.0, 0.3)
    return model


def spec_of(model: Any) -> ModelSpec:
    return spec_from_config(model.config.to_dict(), source="config.json")


def oracle_logits(model: Any, sequence: Sequence[int]) -> Tensor:
    """transformers' logits of every token: [tokens, vocab]."""
    with torch.inference_mode():
        return model(torch.tensor([list(sequence)])).logits[0].float()
