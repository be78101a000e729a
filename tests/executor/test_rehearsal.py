"""Which kernels a model needs, found without a GPU; and that they compile for one."""

from __future__ import annotations

import subprocess
import sys
import textwrap

# In a process of its own: kernels imported under Triton's interpreter, as other tests want them, cannot be compiled.
SCRIPT = textwrap.dedent(
    """
    from collections import Counter
    from triton.backends.compiler import GPUTarget
    import models_harness as harness
    from quire.config import EngineConfig
    from quire.executor.rehearsal import needed_kernels
    from quire.kernels.triton.precompile import compile_stages

    spec = harness.spec_of(harness.tiny_model({model!r}))
    config = EngineConfig.from_kwargs(model="tiny", dtype="bfloat16", max_num_seqs=32, kv_cache_dtype={kv!r})
    target = GPUTarget("cuda", 90, 32)
    needed = needed_kernels(config, spec, target)
    for jobs in needed:
        print(sorted(Counter(job.kernel.__name__ for job in jobs)))
    norms = [job for job in needed.prompts if job.kernel.__name__ == "norm_kernel"]
    winners = [job for job in needed.start if job.kernel.__name__ == "winner_kernel"]
    compile_stages({{"norms": norms, "nothing": [], "winners": winners}}, target, when_done=print)
    """
)
START = ["bound_kernel", "chunk_kernel", "decode_kernel", "finish_kernel", "gather_kernel"]


def rehearse(tmp_path, model: str, kv: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(model=model, kv=kv)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "TRITON_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_step_of_each_kind_is_rehearsed_and_its_kernels_compile(tmp_path) -> None:
    prompts, start, later, *stages = rehearse(tmp_path, "llama", "auto")
    assert "prefill_kernel" in prompts and "act_mul_kernel" in prompts and "rope_kernel" in prompts
    assert all(name in start for name in START)
    assert "prefix_kernel" in later
    assert stages == ["norms", "nothing", "winners"]
    assert list((tmp_path / "cache").rglob("norm_kernel.cubin")) and list((tmp_path / "cache").rglob("winner_*.cubin"))


def test_an_8_bit_cache_is_scaled_with_a_wide_one_first(tmp_path) -> None:
    prompts, *_ = rehearse(tmp_path, "gemma3", "fp8")
    assert "rope_kernel" in prompts
