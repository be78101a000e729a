from __future__ import annotations

import pytest
import torch

from quire.kernels.triton.configs import SkinnyConfig, skinny_config
from quire.kernels.triton.skinny import SkinnyScratch, skinny_linear

VECTOR = SkinnyConfig(False, tile_n=8, tile_k=64, num_warps=4, num_stages=1, unroll=2)
TILE = SkinnyConfig(True, tile_n=16, tile_k=64, num_warps=4, num_stages=3)
SPLIT = SkinnyConfig(True, tile_n=16, tile_k=64, num_warps=4, num_stages=3, split_k=3)
BULK = SkinnyConfig(True, tile_n=16, tile_k=64, num_warps=4, num_stages=3, split_k=2, use_tma=True)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("config", [VECTOR, TILE, SPLIT, BULK])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (50, 176)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(rows, config, n, k, has_bias, device):
    if not config.use_tensor_cores and rows > 2:
        with pytest.raises(AssertionError, match="one or two rows"):
            skinny_linear(torch.ones(rows, k), torch.ones(n, k), None, config, SkinnyScratch.allocate(1, device))
        return
    x = torch.randn(rows, k, device=device).bfloat16()
    weight = torch.randn(n, k, device=device).bfloat16()
    bias = torch.randn(n, device=device).bfloat16() if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    scratch = SkinnyScratch.allocate(64, device)
    for _ in range(2):  # the second run finds the arrival counters as the first one left them
        out = skinny_linear(x, weight, bias, config, scratch)
        assert out.dtype == torch.bfloat16
        assert (out.double() - expected).norm() <= 1e-2 * expected.norm()
        assert not scratch.arrivals.any()
    wide = skinny_linear(x, weight, bias, config, scratch, out_dtype=torch.float32)
    assert (wide.double() - expected).norm() <= 1e-5 * expected.norm()


def test_the_table_leaves_many_rows_to_cublas():
    assert skinny_config(17, 4096, 4096) is None
    assert skinny_config(1, 4096, 4096) is not None
