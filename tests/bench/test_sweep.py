from __future__ import annotations

import pytest

from quire.bench.sweep import parse_axes, point_arguments, points
from quire.errors import ConfigError


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
