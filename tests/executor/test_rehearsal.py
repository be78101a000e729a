"""Which kernels a model needs, found without a GPU; and that they compile for one."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
from dataclasses import replace

import models_harness as harness
import pytest

from quire.executor import outlines
from quire.kernels.triton.common import HAS_GLUON
from tests.models.families import EXPERTS, FAMILIES, saved, tiny_model

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
    config = EngineConfig(model="tiny", dtype="bfloat16", max_num_seqs=32, kv_cache_dtype={kv!r})
    target = GPUTarget("cuda", 90, 32)
    needed = needed_kernels(config, spec, target)
    for jobs in needed:
        print(sorted(Counter(job.kernel.__name__ for job in jobs)))
    norms = [job for job in needed.prompts if job.kernel.__name__ == "norm_kernel"]
    winners = [job for job in needed.start if job.kernel.__name__ == "winner_kernel"]
    compile_stages({{"norms": norms, "nothing": [], "winners": winners}}, target, when_done=print)
    """
)
# The same kernels, to the last constant and alignment, from torch's tensors and from their outlines.
JOBS_SCRIPT = textwrap.dedent(
    """
    import pickle, sys
    specs = pickle.load(sys.stdin.buffer)
    if {outlined!r}:
        from quire.executor import outlines
        outlines.install()
    from triton.backends.compiler import GPUTarget
    from quire.config import EngineConfig
    from quire.executor.rehearsal import needed_kernels

    for name, spec in specs.items():
        for dtype, kv, block_size, seqs, quantization in (
            ("bfloat16", "auto", 16, None, None), ("float16", "fp8", 4, 7, None), ("float32", "auto", 128, 40, None),
            ("bfloat16", "fp8", 16, 40, "fp8"),
        ):
            config = EngineConfig(model="x", dtype=dtype, kv_cache_dtype=kv, block_size=block_size,
                                  max_num_seqs=seqs, quantization=quantization)
            for jobs in needed_kernels(config, spec, GPUTarget("cuda", 90, 32)):
                for job in jobs:
                    print(name, dtype, job.kernel.__name__, job.signature, job.constants, job.attributes, job.options)
    assert hasattr(sys.modules["torch"], "cuda") is not {outlined!r}
    """
)
START = ["bound_kernel", "chunk_kernel", "decode_kernel", "finish_kernel", "gather_kernel"]


def rehearse(tmp_path, model: str, kv: str) -> list[str]:
    return run(tmp_path, SCRIPT.format(model=model, kv=kv))


def run(tmp_path, script: str, given: bytes = b"") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=given,
        capture_output=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "TRITON_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


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


def test_outlines_of_tensors_show_the_same_kernels_as_tensors_do(tmp_path) -> None:
    specs = {name: harness.spec_of(harness.tiny_model(name)) for name in harness.TINY_MODELS}
    specs["wide llama"] = replace(specs["llama"], head_dim=64)  # of which prompts have a kernel of their own
    experts, _ = saved(tiny_model(EXPERTS["qwen2-moe-dense-layer"]), tmp_path / "experts")
    assert experts.experts is not None
    specs["experts"] = replace(experts, experts=replace(experts.experts, num_experts=16))
    for name in ("gpt2", "olmo2"):
        specs[name], _ = saved(tiny_model(FAMILIES[name]), tmp_path / name)
    given = pickle.dumps(specs)
    real, outlined = (run(tmp_path, JOBS_SCRIPT.format(outlined=outlined), given) for outlined in (False, True))
    assert len(real) > 500 and outlined == real
    for kernel in ("route_kernel", "picked_kernel", "grouped_kernel", "combine_kernel"):
        assert any(line.startswith(f"experts bfloat16 {kernel}") for line in real)
    assert any(line.startswith("gpt2 bfloat16 activate_kernel") for line in real)
    if HAS_GLUON:
        assert any(line.startswith("wide llama bfloat16 prefill_hopper_kernel") for line in real)


def test_what_outlines_lack_is_missed_loudly() -> None:
    """So that the helper notices, and imports torch."""
    tensor = outlines.Tensor((4, 6), outlines._DTYPES["float32"], outlines.device("meta"))
    with pytest.raises(AttributeError):
        tensor.softmax(0)
    with pytest.raises(AttributeError):
        tensor[tensor]
    part = tensor[1:3, 2]
    assert part.shape == (2,) and part.stride() == (6,) and not part.is_contiguous()
    assert part.data_ptr() - tensor.data_ptr() == (6 + 2) * 4
    assert tensor.view(2, -1).shape == (2, 12) and [len(one) for one in tensor.split([1, 3])] == [1, 3]
