"""Any flag over a list of values, with any command inside."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from quire.errors import ConfigError

# Switches have no value: what to write for on and for off.
_SWITCHES = {
    "enable-prefix-caching": ([], ["--no-enable-prefix-caching"]),
    "enable-chunked-prefill": ([], ["--no-enable-chunked-prefill"]),
    "enforce-eager": (["--enforce-eager"], []),
    "ignore-eos": ([], ["--no-ignore-eos"]),
}
_ON, _OFF = {"on", "true", "yes", "1"}, {"off", "false", "no", "0"}

Point = dict[str, str]


def parse_axes(texts: Sequence[str]) -> dict[str, list[str]]:
    """ "block-size=8,16" -> {"block-size": ["8", "16"]}; underscores and leading dashes are fine too."""
    axes: dict[str, list[str]] = {}
    for text in texts:
        flag, equals, values = text.partition("=")
        flag = flag.lstrip("-").replace("_", "-")
        chosen = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not flag or not chosen:
            raise ConfigError(f"--vary {text!r}: write a flag and its values, as in block-size=8,16,32")
        if flag in axes:
            raise ConfigError(f"--vary names {flag} twice: give all its values at once")
        axes[flag] = chosen
    return axes


def points(axes: dict[str, list[str]]) -> list[Point]:
    """Every combination; the first flag changes slowest."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def point_arguments(point: Point) -> list[str]:
    """What a point adds to the command line."""
    arguments: list[str] = []
    for flag, value in point.items():
        if flag in _SWITCHES:
            on, off = _SWITCHES[flag]
            if value.lower() not in _ON | _OFF:
                raise ConfigError(f"--vary {flag}={value}: it is a switch, its values are on and off")
            arguments += on if value.lower() in _ON else off
        else:
            name = "dataset-name" if flag == "workload" else flag
            arguments.append(f"--{name}={value}")
    return arguments
