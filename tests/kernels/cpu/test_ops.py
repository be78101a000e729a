"""Norms and activations against the reference, and what CpuOps refuses."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch

from quire.errors import ConfigError
from quire.kernels.cpu import CpuOps
from quire.kernels.interface import Norm
from quire.kernels.reference import ReferenceOps

REFERENCE = ReferenceOps("cpu", torch.float32)
SHAPES = [(1, 576), (3, 1), (5, 33), (100, 576), (7, 5000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms(ops, shape):
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    torch.testing.assert_close(
        ops.normalize(x, Norm(weight, 1e-5)), REFERENCE.normalize(x, Norm(weight, 1e-5)), rtol=1e-5, atol=1e-6
    )
    expected_residual = residual.clone()
    expected = REFERENCE.add_norm(x, expected_residual, Norm(weight, 1e-5))
    torch.testing.assert_close(ops.add_norm(x, residual, Norm(weight, 1e-5)), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_act_mul(ops, activation, shape):
    gate_up = torch.randn(shape[0], 2 * shape[1]) * 3
    exact = ReferenceOps("cpu", torch.float64).act_mul(gate_up.double(), activation).float()
    torch.testing.assert_close(ops.act_mul(gate_up, activation), exact, rtol=2e-6, atol=1e-8)


def test_act_mul_far_from_zero(ops):
    gate = torch.tensor([-1e4, -200.0, -88.0, -20.0, -0.0, 1e-20, 20.0, 88.0, 200.0, 1e4] * 4)
    gate_up = torch.cat((gate, torch.ones_like(gate)))[None]
    for activation in ("silu", "gelu_tanh"):
        torch.testing.assert_close(
            ops.act_mul(gate_up, activation), REFERENCE.act_mul(gate_up, activation), rtol=1e-5, atol=1e-5
        )


def test_views_that_are_not_contiguous(ops):
    wide = torch.randn(6, 200)
    x, weight = wide[:, 10:110], torch.randn(100)
    torch.testing.assert_close(ops.normalize(x, Norm(weight, 1e-6)), REFERENCE.normalize(x, Norm(weight, 1e-6)))
    torch.testing.assert_close(ops.act_mul(x, "silu"), REFERENCE.act_mul(x, "silu"))


def test_two_callers_at_once_get_their_own_results(ops):
    linear = ops.new_linear(256, 256)
    linear.randomize(0.1, seed=0)
    x = torch.randn(8, 256)
    expected = linear.multiply(x)
    wrong = []

    def call() -> None:
        for _ in range(100):
            if not torch.equal(linear.multiply(x), expected):
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_late_call_finds_the_threads_asleep_and_wakes_them(ops):
    linear = ops.new_linear(256, 256)
    linear.randomize(0.1, seed=0)
    x = torch.randn(8, 256)
    expected = linear.multiply(x)
    for _ in range(5):
        threading.Event().wait(0.005)
        assert torch.equal(linear.multiply(x), expected)


def _multiply_in_child(ops, linear, x, expected, answer):
    answer.put(torch.equal(linear.multiply(x), expected))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking a process that has threads: what is tested here
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
def test_a_forked_child_starts_its_own_threads(ops):
    linear = ops.new_linear(256, 256)
    linear.randomize(0.1, seed=0)
    x = torch.randn(8, 256)
    expected = linear.multiply(x)
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=_multiply_in_child, args=(ops, linear, x, expected, answer))
    child.start()
    child.join(20)
    assert child.exitcode == 0 and answer.get()
    assert torch.equal(linear.multiply(x), expected)


def test_weights_outlive_their_ops(ops):
    linear = CpuOps(num_threads=2, isa=ops.isa).new_linear(64, 64)
    linear.load_rows(0, torch.eye(64))
    assert torch.equal(linear.embed(torch.arange(64)), torch.eye(64))


def test_refusals(ops):
    with pytest.raises(ConfigError, match=r"int4.*float32, bfloat16, float16, int8"):
        CpuOps("int4")
    with pytest.raises(ConfigError, match="num_threads"):
        CpuOps(num_threads=0)
    with pytest.raises(ConfigError, match="this machine has"):
        CpuOps(isa="vax")
