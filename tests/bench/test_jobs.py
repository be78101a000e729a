"""From flags to workloads."""

from __future__ import annotations

import argparse

import pytest

from quire.bench.jobs import Job, add_workload_flags, make_jobs, parse_axes, point_arguments, points
from quire.bench.workloads import WORKLOADS
from quire.errors import ConfigError


def jobs(*flags: str, default: str = "random") -> list[Job]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    add_workload_flags(parser, default=default)
    args = parser.parse_args(flags)
    return list(make_jobs(args, vocab_size=1000, max_model_len=2048, encode=None))


def lengths(job: Job) -> set[tuple[int, int]]:
    return {(len(prompt), num_out) for prompt, num_out in [*job.workload, *job.warm]}


@pytest.mark.parametrize("default", ["random", "lab16"])
@pytest.mark.parametrize("name", [[], ["random"], ["--dataset-name", "random"], ["fixed"]])
def test_lengths_that_are_given_are_exact(name: list[str], default: str) -> None:
    [job] = jobs(*name, "--random-input-len", "70", "--output-len", "16", "--num-prompts", "40", default=default)
    assert len(job.workload) == 40 and lengths(job) == {(70, 16)}
    assert job.name == (name[-1] if name else "fixed")


@pytest.mark.parametrize(("flags", "exact"), [(["--input-len", "70"], (70, 64)), (["--output-len", "7"], (64, 7))])
def test_one_length_is_exact_too(flags: list[str], exact: tuple[int, int]) -> None:
    for name in ([], ["random"]):
        [job] = jobs(*name, *flags)
        assert lengths(job) == {exact}


def test_a_range_is_used_where_it_is_asked_for() -> None:
    [job] = jobs("--input-len", "100", "--output-len", "10", "--range-ratio", "0.2", "--num-prompts", "200")
    assert job.name == "random"
    assert {n for _, n in job.workload} == set(range(8, 13))
    assert len({len(prompt) for prompt, _ in job.workload}) > 20


def test_without_lengths_the_workloads_are_what_they_were() -> None:
    [job] = jobs()
    assert (job.name, job.workload) == ("random", WORKLOADS["random"](1000))
    [few] = jobs("--num-prompts", "3")
    assert (few.name, few.workload) == ("random", WORKLOADS["random"](1000, num=3))
    [lab] = jobs(default="lab16")
    assert (lab.name, lab.workload) == ("lab16", WORKLOADS["lab16"](1000))


def test_every_combination() -> None:
    axes = parse_axes(["block-size=8,16", "--max_num_seqs=4, 64"])
    assert points(axes) == [
        {"block-size": "8", "max-num-seqs": "4"},
        {"block-size": "8", "max-num-seqs": "64"},
        {"block-size": "16", "max-num-seqs": "4"},
        {"block-size": "16", "max-num-seqs": "64"},
    ]


def test_arguments() -> None:
    assert point_arguments({"block-size": "8", "workload": "lab16"}) == ["--block-size=8", "--dataset-name=lab16"]
    assert point_arguments({"enable-prefix-caching": "off", "enforce-eager": "on"}) == [
        "--no-enable-prefix-caching",
        "--enforce-eager",
    ]
    assert point_arguments({"enable-chunked-prefill": "on"}) == []


@pytest.mark.parametrize("texts", [["block-size"], ["block-size="], ["=4"], ["a=1", "a=2"]])
def test_axes_that_are_none(texts: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_axes(texts)


def test_a_switch_is_on_or_off() -> None:
    with pytest.raises(ConfigError, match="on and off"):
        point_arguments({"enable-prefix-caching": "maybe"})
