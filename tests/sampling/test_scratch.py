from __future__ import annotations

import pytest
import torch

from quire.sampling.scratch import Scratch


def test_a_cpu_keeps_its_buffers() -> None:
    scratch = Scratch(torch.device("cpu"))
    first = scratch.get("a", (4, 10))
    assert scratch.get("a", (2, 3)).data_ptr() == scratch.get("a", (40,)).data_ptr() == first.data_ptr()
    assert scratch.get("b", (4, 10)).data_ptr() != first.data_ptr()
    assert scratch.get("a", (5, 10)).shape == (5, 10)


def test_an_accelerator_allocates_each_time() -> None:
    scratch = Scratch(torch.device("meta"))
    assert scratch.get("a", (2, 3), torch.int32).device.type == "meta"
    assert scratch.get("a", (2, 3), torch.float32).dtype is torch.float32


def test_a_name_has_one_dtype() -> None:
    scratch = Scratch(torch.device("cpu"))
    scratch.get("a", (3,), torch.int32)
    with pytest.raises(AssertionError):
        scratch.get("a", (3,), torch.float32)
