"""What a step takes on a GPU beside weights and cache, measured by running the largest one."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.executor.batch import PersistentBatch, StepInputs
from quire.executor.sizing import step_slack_bytes
from quire.models.decoder import Decoder
from quire.models.spec import ModelSpec
from quire.plan import StepPlan


def measure_activation_bytes(
    decoder: Decoder,
    spec: ModelSpec,
    *,
    device: torch.device,
    kv_dtype: torch.dtype,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_seq_len: int,
) -> int:
    """Bytes at the peak of a step with as many prompt tokens and as many sampled rows as there may be, and a little
    more for what such a step has beside. Its layers come one after the other: a few show the peak of all."""
    decoder, kept = decoder.excerpt()
    inputs, num_blocks = prompts_step(decoder, device, block_size, max_num_batched_tokens, max_seq_len)
    shape = (num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)
    # All layers write to the same blocks: what they hold does not matter, only what the step allocates.
    kv = torch.zeros(shape, dtype=kv_dtype, device=device)
    # Once before it counts: libraries allocate workspaces of their own the first time.
    decoder.forward(inputs.token_ids, inputs.attention, [kv] * len(kept))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    hidden = decoder.forward(inputs.token_ids, inputs.attention, [kv] * len(kept))
    logits = scratch = None
    if spec.pooler is not None:
        logits = decoder.normalized(hidden).float()
    else:
        rows = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        logits = decoder.gathered_logits(hidden, rows)
        scratch = None if logits is None else _sampling_scratch(logits)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del hidden, logits, scratch, kv
    torch.cuda.empty_cache()
    return peak + step_slack_bytes(max_num_seqs, max_seq_len, block_size, len(decoder.layout.windows))


def hold_activation_memory(num_bytes: int, device: torch.device) -> bool:
    """Give torch's allocator the memory of the largest step as one piece, to cut all steps' tensors out of.

    Otherwise it asks the driver for a piece of each size that it meets and keeps them all, and steps of many sizes come
    to hold several times what the largest needs. After everything that stays: it would be cut out of this, too. False
    where there is no room for it: steps then have what they find one by one.
    """
    if device.type != "cuda":
        return True
    try:
        torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return False
    return True


def let_go_of_held_memory(device: torch.device) -> None:
    """Give back what is held for steps, before something is made that stays."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _sampling_scratch(logits: Tensor) -> Tensor:
    """Sampling holds the weights of a part of the rows at a time beside the logits."""
    return torch.empty_like(logits[: max(1, len(logits) // 8)])


def prompts_step(
    decoder: Decoder, device: torch.device, block_size: int, num_tokens: int, max_seq_len: int
) -> tuple[StepInputs, int]:
    """A step of whole prompts, each as long as a sequence may be, and how many blocks it takes."""
    lengths = [max_seq_len] * (num_tokens // max_seq_len)
    if num_tokens % max_seq_len:
        lengths.append(num_tokens % max_seq_len)
    blocks_each = -(-max(lengths) // block_size)
    num_groups = len(decoder.layout.windows)
    batch = PersistentBatch(
        num_rows=len(lengths), max_model_len=max(lengths), block_size=block_size, device=device, num_groups=num_groups
    )
    plan = StepPlan(0)
    for row, length in enumerate(lengths):
        blocks = list(range(row * blocks_each, (row + 1) * blocks_each))
        batch.admit(row, [0] * length, 0, [(0, blocks)] * num_groups)
        plan.spans.add(row, length, False)
    return batch.prepare(plan), len(lengths) * blocks_each
