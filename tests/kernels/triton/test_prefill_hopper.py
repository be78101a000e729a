"""The kernel for prompts on Hopper, as far as no GPU is needed: where it is chosen, and that it compiles.

What it computes is tested on the device, in test_attention.py.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from triton.backends.compiler import GPUTarget

from quire.kernels.interface import AttentionBatch, AttentionSpec
from quire.kernels.triton import attention
from quire.kernels.triton.common import HAS_GLUON
from quire.kernels.triton.configs import HopperPrefillConfig, PrefillConfig

LLAMA = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=0.1)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn

needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason="the kernel is written for the Gluon of Triton 3.6 and 3.7")

# In a process of its own: kernels imported under Triton's interpreter, as other tests want them, cannot be compiled.
COMPILE = textwrap.dedent(
    """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile
    from quire.kernels.interface import AttentionBatch, AttentionSpec
    from quire.kernels.triton.configs import HopperPrefillConfig
    from quire.kernels.triton.decode import AttentionScratch
    from quire.kernels.triton.precompile import collecting
    from quire.kernels.triton.prefill_hopper import prefill_attention_hopper

    def empty(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    target = GPUTarget("cuda", 90, 32)
    with collecting(target) as jobs:
        q = empty(300, 32 * 128, dtype=torch.bfloat16)
        kv = empty(40, 2, 8, 16, 128, dtype=torch.bfloat16)
        prefill_attention_hopper(q, kv, empty(3, 40), empty(4), empty(3), q, AttentionSpec(32, 8, 128, 0.1),
                                 HopperPrefillConfig(), AttentionScratch(empty(1), empty(1)),
                                 first_seq=1, num_seqs=2, num_tokens=299)
    (job,) = jobs.values()
    source = job.kernel.ASTSource(job.kernel, job.signature, job.constants, job.attributes)
    compiled = compile(source, target=target, options=job.options.__dict__)
    print(compiled.metadata.shared, *(compiled.asm["ptx"].count(x) for x in ("wgmma.mma_async", "cp.async.bulk")))
    """
)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    """Which kernel a device of a compute capability gets."""

    def choose(arch, spec=LLAMA, block_size=16, dtype=BF16, kv_dtype=BF16, queries=2048, prompts=4):
        target = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", arch, 32)))
        monkeypatch.setattr(attention, "driver", target)
        monkeypatch.setattr(attention, "INTERPRETED", False)
        attention._hopper_serves.cache_clear()
        q = torch.empty((8, spec.num_heads * spec.head_dim), dtype=dtype, device="meta")
        shape = (4, 2, spec.num_kv_heads, block_size, spec.head_dim)
        kv = torch.empty(shape, dtype=kv_dtype, device="meta")
        return type(attention.prompt_config(q, kv, spec, queries, prompts))

    yield choose
    attention._hopper_serves.cache_clear()


@needs_gluon
def test_a_hopper_gets_its_own_kernel_and_others_do_not(on) -> None:
    assert on(90) is HopperPrefillConfig
    assert on(90, replace(LLAMA, head_dim=64), 128, torch.float16, torch.float16) is HopperPrefillConfig
    assert on(80) is PrefillConfig and on(100) is PrefillConfig


@pytest.mark.parametrize("unserved", [
    {"spec": replace(LLAMA, window=100)}, {"spec": replace(LLAMA, softcap=5.0)}, {"spec": replace(LLAMA, head_dim=96)},
    {"spec": replace(LLAMA, num_heads=65, num_kv_heads=1)}, {"block_size": 8}, {"kv_dtype": FP8},
    {"dtype": torch.float32, "kv_dtype": torch.float32}, {"queries": 16}, {"prompts": 129},
    {"spec": replace(LLAMA, slopes=torch.ones(32))}, {"spec": replace(LLAMA, sinks=torch.ones(32))},
])  # fmt: skip
def test_what_it_does_not_serve_is_for_the_portable_kernel(unserved, on) -> None:
    assert on(90, **unserved) is PrefillConfig


def test_another_triton_may_have_another_gluon(on, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "HAS_GLUON", False)
    assert on(90) is PrefillConfig


@needs_gluon
def test_an_8_bit_cache_is_widened_where_that_is_little(on) -> None:
    def widens(tokens, prompts, kv_len, decodes=0, kv_dtype=FP8):
        q = torch.empty((decodes + tokens, LLAMA.num_heads * LLAMA.head_dim), dtype=BF16, device="meta")
        kv = torch.empty((4, 2, LLAMA.num_kv_heads, 16, LLAMA.head_dim), dtype=kv_dtype, device="meta")
        lens = torch.empty(decodes + prompts, dtype=torch.int32, device="meta")
        batch = AttentionBatch(lens, lens, lens, lens, lens, tokens, kv_len, decodes)
        return attention.widens_prompts(q, kv, batch, LLAMA)

    on(90)
    assert widens(8192, 4, 2048) and widens(2048, 1, 8192, decodes=100)
    assert not widens(1000, 1, 1000)  # few rows
    assert not widens(2048, 1, 8193) and not widens(2048, 64, 4096)  # much to copy
    assert not widens(8192, 4, 2048, kv_dtype=BF16)
    on(80)
    assert not widens(8192, 4, 2048)


@needs_gluon
def test_it_compiles_to_the_chips_own_instructions(tmp_path) -> None:
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    shared, products, copies = map(int, done.stdout.split())
    assert shared <= 227 * 1024 and products >= 2 * 4 * 8 and copies >= 2 * 8
