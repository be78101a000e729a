"""Slots fill their own part of a parameter and nothing else."""

from __future__ import annotations

import torch

from quire.kernels.interface import Norm
from quire.kernels.reference import ReferenceOps
from quire.models.slots import WeightSlot, matrix_slots, norm_slots, reordered
from tests.gguf_blocks import random_rows, unpacked


def test_parts_of_a_fused_matrix():
    weight = ReferenceOps("cpu", torch.float32).new_linear(7, 3, bias=True)
    slots = {slot.name: slot for slot in matrix_slots(weight, {"a": 2, "b": 4, "c": 1})}
    assert {name: slot.shape for name, slot in slots.items()} == {
        "a.weight": (2, 3),
        "a.bias": (2,),
        "b.weight": (4, 3),
        "b.bias": (4,),
        "c.weight": (1, 3),
        "c.bias": (1,),
    }
    whole, bias = torch.randn(7, 3), torch.randn(7)
    for name, rows in (("c", slice(6, 7)), ("a", slice(0, 2)), ("b", slice(2, 6))):
        slots[f"{name}.weight"].load(whole[rows].double())
        slots[f"{name}.bias"].load(bias[rows].double())
    assert torch.equal(weight.weight, whole) and torch.equal(weight.bias, bias)


def test_randomizing_every_slot_leaves_parts_that_differ():
    weight = ReferenceOps("cpu", torch.float32).new_linear(8, 3)
    for slot in matrix_slots(weight, {"a": 4, "b": 4}):
        slot.randomize(1.0, 5)
    assert not torch.equal(weight.weight[:4], weight.weight[4:])


def test_norms():
    parameter = torch.full((4,), float("nan"))
    tensor = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.bfloat16)
    next(norm_slots("n", Norm(parameter, 1e-6), offset=False)).load(tensor)
    assert parameter.tolist() == [0.5, 1.0, 2.0, 3.0]
    slot = next(norm_slots("n", Norm(parameter, 1e-6), offset=True))
    slot.load(tensor)
    assert parameter.tolist() == [1.5, 2.0, 3.0, 4.0]
    slot.randomize(0.1, 1)
    assert parameter.tolist() == [1.0] * 4


def test_rows_of_each_head_are_taken_in_another_order():
    seen = []
    slot = WeightSlot("w", (8, 2), seen.append, lambda std, seed: None)
    rows = torch.arange(16.0).reshape(8, 2)
    reordered(slot, [2, 0, 3, 1]).load(rows)
    assert torch.equal(seen[0], rows[[2, 0, 3, 1, 6, 4, 7, 5]])
    packed = random_rows("Q8_0", 8, 64)
    reordered(slot, [2, 0, 3, 1]).load(packed)
    assert torch.equal(unpacked(seen[1]), unpacked(packed)[[2, 0, 3, 1, 6, 4, 7, 5]])


def test_a_scale_is_taken_into_a_norm():
    norm = Norm(torch.empty(3), 1e-6, bias=torch.empty(3))
    weight, bias = norm_slots("n", norm, offset=False, scale=0.5)
    assert (weight.name, bias.name) == ("n.weight", "n.bias")
    for slot in (weight, bias):
        slot.load(torch.tensor([2.0, 4.0, 6.0]))
    assert norm.weight.tolist() == norm.bias.tolist() == [1.0, 2.0, 3.0]
    weight.randomize(0.02, 0)
    bias.randomize(0.02, 0)
    assert norm.weight.tolist() == [0.5] * 3 and norm.bias.tolist() == [0.0] * 3
