"""The planner's arithmetic against what a step really allocates: a dry run's tensors are counted."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import torch

from quire.executor import sizing
from quire.executor.batch import PersistentBatch

# In a process of its own: kernels imported under Triton's interpreter, as other tests want them, cannot be run dry.
SCRIPT = textwrap.dedent(
    """
    import contextlib, dataclasses, json, sys, weakref
    import torch
    from triton.backends.compiler import GPUTarget
    import models_harness as harness
    from quire.config import EngineConfig
    from quire.executor import dry_run, sizing
    from quire.kernels.triton import adapters
    from quire.kernels.triton.fp8_linear import Fp8Linear
    from quire.kernels.triton.precompile import collecting

    from torch.utils._python_dispatch import TorchDispatchMode

    live = peak = 0

    class Counting(TorchDispatchMode):  # the bytes of tensors that are alive, as they come and go
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            global live, peak
            out = function(*args, **(kwargs or {}))
            given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.Tensor)]
            storage = out.untyped_storage()
            if storage._cdata not in {each.untyped_storage()._cdata for each in given}:  # no view, nothing in place
                live += storage.nbytes()
                peak = max(peak, live)
                weakref.finalize(storage, forget, storage.nbytes())
            return out

    def forget(nbytes):
        global live
        live -= nbytes

    def peak_of(steps, num_tokens, adapted):
        global live, peak
        batch = steps._batch(num_tokens, 8, num_tokens // 8)
        if adapted:
            packed = torch.empty(steps.bank.rows_length(num_tokens), dtype=torch.int32, device="meta")
            batch.adapters = steps.bank.unpack_rows(packed, num_tokens)
        tokens = torch.empty(num_tokens, dtype=torch.int64, device="meta")
        batches = [batch] * len(steps.decoder.layout.windows)
        for mode in (contextlib.nullcontext(), Counting()):  # the first makes scratch memory that stays
            live = peak = 0
            with mode:
                steps.decoder.forward(tokens, batches, [steps.cache] * steps.spec.num_layers)
        return peak

    def narrow_product(matrix, x, row_scales):  # on no device it would be multiplied in float32
        return torch.empty((len(x), matrix.out_features), dtype=torch.bfloat16, device="meta")

    Fp8Linear._multiply_narrow = narrow_product
    adapters._SPLIT_K = 8  # as many parts of A x as large models have
    for case in sys.argv[1:]:
        name, dtype, length, rank, quantization = case.split("/")
        spec = harness.spec_of(harness.tiny_model(name))
        if rank:
            spec = dataclasses.replace(spec, intermediate_size=512)  # so that the MLP's rows are the widest
        num_tokens, lora = 8 * int(length), {"enable_lora": True, "max_lora_rank": int(rank)} if rank else {}
        config = EngineConfig(
            model="tiny", dtype=dtype, max_model_len=int(length), max_num_batched_tokens=num_tokens, max_num_seqs=8,
            quantization=quantization or None, **lora,
        )
        with collecting(GPUTarget("cuda", 90, 32)):
            steps = dry_run.DryRun(config, spec)
            plain, adapted = (peak_of(steps, num_tokens, each) for each in (False, bool(rank)))
        sizes = (8, num_tokens, int(length), 16, 1)
        slack = sizing.step_slack_bytes(8, int(length), 16, 1)
        bound = sizing.adapted_step_bytes(config, spec, dtype, plain + slack, *sizes) - slack
        print(json.dumps([plain, sizing.layers_bytes(spec, dtype, num_tokens), adapted, bound]))
    """
)


def run_dry(*cases: str) -> list[list[int]]:
    """A case: model/dtype/length of each of 8 prompts/rank of adapters or nothing/quantization or nothing."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *cases],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_layers_hold_what_the_planner_says() -> None:
    cases = ["llama/bfloat16/64//", "llama/float32/64//", "qwen2/float16/64//", "gemma3/bfloat16/64//"]
    for case, (peak, foretold, *_) in zip(cases, run_dry(*cases), strict=True):
        assert peak == foretold, case


def test_a_step_with_adapters_holds_no_more_than_is_reckoned() -> None:
    """Of many rows, and of few, whose parts of A x are added up later."""
    cases = ["llama/bfloat16/256/64/", "llama/bfloat16/128/64/", "llama/float32/256/16/", "qwen2/float16/256/16/"]
    cases += ["gemma3/bfloat16/256/16/", "llama/bfloat16/256/16/fp8", "llama/bfloat16/32/64/fp8"]
    found = run_dry(*cases)
    for case, (_, _, peak, bound) in zip(cases, found, strict=True):
        assert peak <= bound, case
    without, with_product, *_ = found[0]
    assert without < with_product  # the kernel that activates what it multiplies is what an engine measures


def test_the_persistent_batch_holds_what_the_planner_says() -> None:
    for lengths in ((7, 33, 4, 1), (16, 64, 16, 3)):
        num_rows, max_model_len, block_size, num_groups = lengths
        batch = PersistentBatch(
            num_rows=num_rows,
            max_model_len=max_model_len,
            block_size=block_size,
            device=torch.device("cpu"),
            num_groups=num_groups,
        )
        assert sizing.batch_bytes(*lengths) == batch.tokens.nbytes + batch.block_tables.nbytes
