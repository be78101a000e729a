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
    import contextlib, json, sys, weakref
    import torch
    from triton.backends.compiler import GPUTarget
    import models_harness as harness
    from quire.config import EngineConfig
    from quire.executor import dry_run, sizing
    from quire.kernels.triton.precompile import collecting

    from torch.utils._python_dispatch import TorchDispatchMode

    length = 64
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

    for case in sys.argv[1:]:
        name, dtype = case.split("/")
        spec = harness.spec_of(harness.tiny_model(name))
        config = EngineConfig(
            model="tiny", dtype=dtype, max_model_len=length, max_num_batched_tokens=8 * length, max_num_seqs=8
        )
        with collecting(GPUTarget("cuda", 90, 32)):
            steps = dry_run.DryRun(config, spec)
            batch = steps._batch(8 * length, 8, length)
            tokens = torch.empty(8 * length, dtype=torch.int64, device="meta")
            batches = [batch] * len(steps.decoder.layout.windows)
            for mode in (contextlib.nullcontext(), Counting()):  # the first makes scratch memory that stays
                live = peak = 0
                with mode:
                    steps.decoder.forward(tokens, batches, [steps.cache] * steps.spec.num_layers)
        print(json.dumps([case, peak, sizing.layers_bytes(spec, dtype, 8 * length)]))
    """
)
CASES = ["llama/bfloat16", "llama/float32", "qwen2/float16", "gemma3/bfloat16"]


def test_layers_hold_what_the_planner_says() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *CASES],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case for case, *_ in found] == CASES
    for case, peak, foretold in found:
        assert peak == foretold, case


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
