"""Devices by their data sheets, how much of it engines reach, and what talking to each other costs them.

The table is an assumption to edit, prices above all: `--devices FILE` changes or adds entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from quire.bench.report import read_json
from quire.config import GIB
from quire.errors import ConfigError


@dataclass(slots=True, frozen=True, kw_only=True)
class Device:
    """`memory_gib` is what the driver reports, a little less than the name says. Rates are the data sheet's: reads of
    device memory, dense 16-bit products, one direction of the link to the next device of the machine, and one
    device's share of the network between machines. A price is what an hour about costs to rent."""

    name: str
    memory_gib: float
    tb_per_s: float
    tflop_per_s: float
    link_gb_per_s: float
    price_per_hour: float
    network_gb_per_s: float = 50.0  # 400 Gbit/s
    per_machine: int = 8
    has_fast_link: bool = False  # NVLink, whose small messages take a few µs; PCIe takes several times that

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)


def _fast(name: str, gib: float, tb: float, tflop: float, link: float, price: float) -> Device:
    return Device(name=name, memory_gib=gib, tb_per_s=tb, tflop_per_s=tflop, link_gb_per_s=link, price_per_hour=price,
                  has_fast_link=True)  # fmt: skip


def _pcie(name: str, gib: float, tb: float, tflop: float, link: float, price: float) -> Device:
    return Device(name=name, memory_gib=gib, tb_per_s=tb, tflop_per_s=tflop, link_gb_per_s=link, price_per_hour=price,
                  network_gb_per_s=12.5)  # fmt: skip


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _pcie("t4", 14.6, 0.32, 65, 12, 0.35),
        _pcie("l4", 22.0, 0.30, 121, 25, 0.70),
        _pcie("a10g", 22.0, 0.60, 70, 25, 1.00),
        _pcie("rtx3090", 23.6, 0.94, 71, 25, 0.25),
        _pcie("rtx4090", 23.6, 1.01, 165, 25, 0.45),
        _pcie("rtx5090", 31.4, 1.79, 210, 50, 0.80),
        _fast("a100-40gb", 39.4, 1.56, 312, 300, 1.30),
        _pcie("l40s", 44.4, 0.86, 362, 25, 1.00),
        _fast("a100", 79.1, 2.04, 312, 300, 1.80),
        _fast("h100", 79.1, 3.35, 989, 450, 2.50),
        _fast("h200", 139.7, 4.80, 989, 450, 3.50),
        _fast("b200", 178.3, 8.00, 2250, 900, 5.50),
    )
}


def device_named(name: str, devices: Mapping[str, Device], *, instead: str = "describe it in --devices FILE") -> Device:
    wanted = name.lower().replace("_", "-")
    if wanted not in devices:
        raise ConfigError(f"--gpu {name} is not known (there are {', '.join(devices)}): {instead}")
    return devices[wanted]


def read_devices(path: str | Path) -> dict[str, Device]:
    """The table with entries changed or added by a JSON file: {"h200": {"price_per_hour": 2.9}, "mine": {…}}."""
    entries = read_json(path, "the file of devices")
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ConfigError(f"the devices {path} must be an object of objects, by the devices' names")
    known = {field.name for field in fields(Device)} - {"name"}
    found = dict(DEVICES)
    for name, entry in entries.items():
        if unknown := set(entry) - known:
            raise ConfigError(
                f"device {name} in {path}: no {', '.join(sorted(unknown))} (there are {', '.join(known)})"
            )
        values: dict[str, Any] = (asdict(found[name]) if name in found else {"name": name}) | entry
        try:
            found[name] = Device(**values)
        except TypeError:
            missing = known - set(values) - {"network_gb_per_s", "per_machine", "has_fast_link"}
            raise ConfigError(f"device {name} in {path} is new and has no {', '.join(sorted(missing))}") from None
        for key, value in asdict(found[name]).items():
            if key not in ("name", "has_fast_link") and (not isinstance(value, int | float) or not value > 0):
                raise ConfigError(f"device {name} in {path}: {key} must be a number above 0, got {value!r}")
    return found


@dataclass(slots=True, frozen=True, kw_only=True)
class Efficiency:
    """What Quire reaches of a data sheet. Measured on one H200 with Llama-3.1-8B's shape in bf16 (docs/scale.md says
    by which command), and assumed of every other GPU."""

    weights: float = 0.785  # of the memory's rate: all products of one row, 15.0 GB in 3.98 ms
    kv: float = 0.81  # of the memory's rate: 256 sequences of 843 tokens at 3.9 TB/s
    products: float = 0.683  # of the arithmetic: all products of 8,192 rows at 676 TFLOP/s, at the limit of its power
    prompt_attention: float = 0.5  # of the arithmetic: 403 to 616 TFLOP/s for prompts of 1,024 to 8,192 tokens
    # Launches, gaps and the fixed part of attention in a layer: what makes 16 decodes take as long as in lab16.
    layer_s: float = 8.4e-6
    # What that is more above `roofline.MAX_FUSED_ROWS`, and where prompts have an attention of their own behind that of
    # decodes: least squares over 24,000 steps at 8 and 24 requests/s.
    wide_layer_s: float = 13.5e-6
    prompts_layer_s: float = 15e-6
    # Routing, and four launches where a dense MLP has two. Fitted to Qwen3-30B-A3B's shape: one sequence is predicted
    # 22 % too fast, 16 and 256 of them 6 and 4 % too slow.
    experts_layer_s: float = 10e-6
    # Bytes that the small kernels of a layer move for a token, in rows of the hidden and of the inner size.
    hidden_rows: float = 10.0
    inner_rows: float = 3.0
    lead_s: float = 1.9e-3  # a step is planned so long before it begins: the median of the same steps
    # HTTP, JSON and a client: CPU time of the two for a prompt of 161 tokens and its first token.
    front_s: float = 2.3e-3
    # That the other tokens of a step wait for a first token there: how much longer the times between tokens are that
    # end behind one, of a server whose steps take no processor time.
    first_token_s: float = 0.5e-3


# A product's time over that of its slower side, reading or multiplying, by the ratio of multiplying to reading: where
# both take as long, neither hides the other. cuBLAS on one H200, all products of a step of 1 to 8,192 rows.
PRODUCT_EXCESS = (
    (0.0, 1.0), (0.18, 1.043), (0.36, 1.068), (0.71, 1.141), (1.07, 1.279), (1.43, 1.118), (2.1, 1.064),
    (2.9, 1.029), (5.7, 1.086), (11.0, 1.0),
)  # fmt: skip


def product_s(reading_s: float, multiplying_s: float) -> float:
    """The time of matrix products that read and multiply for so long, each on its own."""
    if not reading_s:
        return multiplying_s
    ratio = multiplying_s / reading_s
    excess = 1.0
    for (low, before), (high, after) in pairwise(PRODUCT_EXCESS):
        if ratio <= high:
            excess = before + (after - before) * (ratio - low) / (high - low)
            break
    return excess * max(reading_s, multiplying_s)


# -- talking to each other. Times of small messages are of peer memory over NVLink, as published for custom sums.

_FAST_START_S, _SLOW_START_S = 4e-6, 12e-6  # a kernel that waits for its peers' flags
_RING_HOP_S = 3e-6
_RING_START_S = 10e-6  # NCCL's own
# In how many pieces a chunk of a prompt leaves for another engine while it is computed: as many as the model has
# layers, since engines leave one of them to be sent at the end; 1: when all of it is done.
LINK_PIECES = 32
_LINK_EFFICIENCY = 0.75
_SEND_START_S, _NETWORK_START_S = 10e-6, 25e-6


def all_reduce_s(device: Device, num_ranks: int, num_bytes: float) -> tuple[float, str]:
    """Seconds of a sum over ranks of one machine, and the algorithm that takes the fewest."""
    if num_ranks == 1:
        return 0.0, "none"
    found = all_reduce_ways(device, num_ranks, num_bytes)
    name = min(found, key=lambda key: found[key])
    return found[name], name


def all_reduce_ways(device: Device, num_ranks: int, num_bytes: float) -> dict[str, float]:
    """Seconds by algorithm: the first two are kernels/triton/peers.py, the third is NCCL's."""
    rate = device.link_gb_per_s * 1e9 * _LINK_EFFICIENCY
    start_s = _FAST_START_S if device.has_fast_link else _SLOW_START_S
    others, share = num_ranks - 1, (num_ranks - 1) / num_ranks
    found = {
        "one-shot": start_s + others * num_bytes / rate,  # everybody reads everything
        "two-shot": 2 * start_s + 2 * share * num_bytes / rate,  # everybody sums a part, then reads the others' parts
        "ring": _RING_START_S + 2 * others * _RING_HOP_S + 2 * share * num_bytes / rate,
    }
    if num_ranks > 2 and not device.has_fast_link:  # PCIe's root shares its rate between those who read at once
        found["one-shot"] += others * num_bytes / rate
        found["two-shot"] += 2 * share * num_bytes / rate
    return found


def send_s(device: Device, num_bytes: float, *, is_within_machine: bool) -> float:
    """Hidden states from one stage to the next."""
    if is_within_machine:
        return _SEND_START_S + num_bytes / (device.link_gb_per_s * 1e9 * _LINK_EFFICIENCY)
    return _NETWORK_START_S + num_bytes / (device.network_gb_per_s * 1e9 * _LINK_EFFICIENCY)
