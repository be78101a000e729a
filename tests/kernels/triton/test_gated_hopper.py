"""A gated MLP's first product with its activation in the same launch, against cuBLAS and the activation's own kernel.
Only a Hopper runs it; elsewhere it is compiled for one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from triton.backends.compiler import GPUTarget

from quire.kernels.interface import Unscaled
from quire.kernels.triton import linear
from quire.kernels.triton.activation import act_mul
from quire.kernels.triton.common import HAS_GLUON

needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason="the kernel is written for the Gluon of Triton 3.6 and 3.7")

# In a process of its own: kernels imported under Triton's interpreter, as other tests want them, cannot be compiled.
COMPILE = textwrap.dedent(
    """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile
    from quire.kernels.interface import Unscaled
    from quire.kernels.triton.gated_hopper import gated_hopper
    from quire.kernels.triton.precompile import collecting

    def empty(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    target = GPUTarget("cuda", 90, 32)
    with collecting(target) as jobs:
        gated_hopper(Unscaled(empty(300, 512), None, 1e-5), empty(2 * 1024, 512), empty(2 * 1024), "silu")
    job = next(job for job in jobs.values() if job.kernel.__name__ == "gated_hopper_kernel")
    source = job.kernel.ASTSource(job.kernel, job.signature, job.constants, job.attributes)
    compiled = compile(source, target=target, options=job.options.__dict__)
    print(compiled.metadata.shared, *(compiled.asm["ptx"].count(x) for x in ("wgmma.mma_async", "cp.async.bulk")))
    """
)


@needs_gluon
def test_it_compiles_to_the_chips_own_instructions(tmp_path) -> None:
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    shared, products, copies = map(int, done.stdout.split())
    assert shared <= 227 * 1024 and products >= 2 * 4 and copies >= 4


@needs_gluon
def test_only_a_hopper_multiplies_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiplies(arch: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        target = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", arch, 32)))
        monkeypatch.setattr(linear, "driver", target)
        monkeypatch.setattr(linear, "INTERPRETED", False)
        linear._has_hopper_kernels.cache_clear()
        return linear._multiplies_gated(torch.empty(shape, dtype=dtype, device="meta"))

    try:
        assert multiplies(90, 2048, 512) and not multiplies(80, 2048, 512) and not multiplies(100, 2048, 512)
        assert not multiplies(90, 2048, 516) and not multiplies(90, 2056, 512)  # rows that no bulk copy takes
        assert not multiplies(90, 2048, 512, dtype=torch.float16)
    finally:
        linear._has_hopper_kernels.cache_clear()


@pytest.mark.gpu
@needs_gluon
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 100, 1000, 2049])
@pytest.mark.parametrize(("n", "k"), [(1024, 512), (1000, 520), (14336, 4096)])
def test_it_is_the_product_and_then_the_activation(rows: int, n: int, k: int, activation: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper")
    from quire.kernels.triton.gated_hopper import gated_hopper

    torch.manual_seed(rows + n)
    weight = (torch.randn(2 * n, k, device="cuda") * k**-0.5).bfloat16()
    x = Unscaled((3 * torch.randn(rows, k, device="cuda")).bfloat16(), None, 1e-5)
    for bias in (None, torch.randn(2 * n, device="cuda").bfloat16()):
        found = gated_hopper(x, weight, bias, activation).float()
        expected = act_mul(F.linear(x.x.float(), weight.float()), activation, factors_of=x, bias=bias).float()
        assert (found - expected).norm() / expected.norm() < 4e-3
