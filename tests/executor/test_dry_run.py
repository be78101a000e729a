"""Which kernels a model needs, found without a GPU and without torch; and that they compile for one."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import models_harness as harness
import pytest

from quire.executor import meta_torch
from quire.kernels.triton.common import HAS_GLUON
from quire.models.spec import IntegerFormat
from tests.models.families import EXPERTS, FAMILIES, saved, tiny_model

# In a process of its own: kernels imported under Triton's interpreter, as other tests want them, cannot be compiled.
SCRIPT = textwrap.dedent(
    """
    import pickle, sys
    specs = pickle.load(sys.stdin.buffer)
    if {without_torch!r}:
        from quire.executor import meta_torch
        meta_torch.install()
    from triton.backends.compiler import GPUTarget
    from quire.config import EngineConfig
    from quire.executor.dry_run import needed_kernels
    from quire.kernels.triton.precompile import compile_stages

    target = GPUTarget("cuda", 90, 32)
    for name, spec in specs.items():
        for dtype, kv, block_size, seqs, others in (
            ("bfloat16", "auto", 16, 32, {{}}), ("float16", "fp8", 4, 7, {{}}), ("float32", "auto", 128, 40, {{}}),
            ("bfloat16", "fp8", 16, 40, {{"quantization": "fp8"}}),
            ("bfloat16", "auto", 16, None, {{"enable_lora": True}}),
            ("bfloat16", "auto", 16, 300, {{"batch_invariant": True}}),
        ):
            if others.keys() & {{"enable_lora", "batch_invariant"}} and name != "llama":
                continue
            config = EngineConfig(model="x", dtype=dtype, kv_cache_dtype=kv, block_size=block_size,
                                  max_num_seqs=seqs, **others)
            needed = needed_kernels(config, spec, target)
            for stage, jobs in zip(needed._fields, needed):
                for job in jobs:
                    print(name, dtype, kv, stage, job.kernel.__name__, job.signature, job.constants, job.attributes,
                          job.options)
    assert hasattr(sys.modules["torch"], "cuda") is not {without_torch!r}
    if {without_torch!r}:
        norms = [job for job in needed.prompts if job.kernel.__name__ == "norm_kernel"]
        winners = [job for job in needed.start if job.kernel.__name__ == "winner_kernel"]
        compile_stages({{"norms": norms, "nothing": [], "winners": winners}}, target, when_done=print)
    """
)
MODELS = ("llama-biases", "mistral-window", "qwen3", "gemma3-softcap", "llama")


def run(tmp_path: Path, specs: bytes, *, without_torch: bool) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(without_torch=without_torch)],
        input=specs,
        capture_output=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "TRITON_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def test_a_dry_run_without_torch_shows_the_kernels_that_one_with_torch_does(tmp_path: Path) -> None:
    """To the last constant and alignment."""
    specs = {"wide llama": harness.spec_of(harness.tiny_model("llama"))}
    specs["wide llama"] = replace(specs["wide llama"], head_dim=64)  # of which prompts have a kernel of their own
    experts, _ = saved(tiny_model(EXPERTS["qwen2-moe-dense-layer"]), tmp_path / "experts")
    assert experts.experts is not None
    specs["experts"] = replace(experts, experts=replace(experts.experts, num_experts=16))
    integers = IntegerFormat(layout="gptq", bits=4, group=32, has_zeros=True)
    specs["packed"] = replace(specs["wide llama"], integers=integers, hidden_size=128, intermediate_size=128)
    for name in ("gpt2", "mpt", "olmo2", "gpt-oss"):
        specs[name], _ = saved(tiny_model((FAMILIES | EXPERTS)[name]), tmp_path / name)
    specs |= {name: harness.spec_of(harness.tiny_model(name)) for name in MODELS}
    given = pickle.dumps(specs)
    real = run(tmp_path, given, without_torch=False)
    *found, first, second, third = run(tmp_path, given, without_torch=True)
    assert len(real) > 500 and found == real

    def has(*words: str) -> bool:
        return any(line.startswith(" ".join(words) + " ") for line in real)

    for kernel in ("prefill_kernel", "rope_kernel", "norm_kernel"):
        assert has("llama bfloat16 auto prompts", kernel), kernel
    assert has("llama float16 fp8 prompts act_mul_kernel")  # in bfloat16 the product applies the activation
    starting = ("bound_kernel", "chunk_kernel", "decode_kernel", "finish_kernel", "gather_kernel", "pieces_kernel")
    for kernel in (*starting, "shrink_kernel", "expand_kernel", "expand_act_kernel"):
        assert has("llama bfloat16 auto start", kernel), kernel
    assert has("llama bfloat16 auto later prefix_kernel")
    for kernel in ("product_kernel", "invariant_prompt_kernel"):
        assert has("llama bfloat16 auto prompts", kernel), kernel
    assert has("llama bfloat16 auto start invariant_decode_kernel")
    assert has("gemma3-softcap bfloat16 fp8 prompts rope_kernel")  # which finds an 8-bit cache's scales
    for kernel in ("route_kernel", "picked_kernel", "grouped_kernel", "combine_kernel"):
        assert any(line.startswith("experts bfloat16") and f" {kernel} " in line for line in real), kernel
    for kernel in ("packed_kernel", "widen_matrix_kernel"):
        assert any(line.startswith("packed bfloat16") and f" {kernel} " in line for line in real), kernel
    assert any(line.startswith("gpt2 bfloat16") and " activate_kernel " in line for line in real)
    if HAS_GLUON:
        for kernel in ("prefill_hopper_kernel", "gated_hopper_kernel"):
            assert any(line.startswith("wide llama bfloat16") and f" {kernel} " in line for line in real), kernel
    assert [first, second, third] == ["norms", "nothing", "winners"]
    assert list((tmp_path / "cache").rglob("norm_kernel.cubin")) and list((tmp_path / "cache").rglob("winner_*.cubin"))


def test_what_is_not_there_is_missed_loudly() -> None:
    """So that the helper notices, and imports torch."""
    tensor = meta_torch.Tensor((4, 6), meta_torch._DTYPES["float32"], meta_torch.device("meta"))
    with pytest.raises(AttributeError):
        tensor.softmax(0)
    with pytest.raises(AttributeError):
        tensor[tensor]
    part = tensor[1:3, 2]
    assert part.shape == (2,) and part.stride() == (6,) and not part.is_contiguous()
    assert part.data_ptr() - tensor.data_ptr() == (6 + 2) * 4
    assert tensor.view(2, -1).shape == (2, 12) and [len(one) for one in tensor.split([1, 3])] == [1, 3]
    assert tensor.t().stride() == (1, 6) and (tensor @ tensor.T).shape == (4, 4)
