"""How many devices for a rate: the search, its bounds, and the numbers of what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.cli.plan import read_limits, read_rate
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.lab import capacity
from quire.lab.capacity import Limits, plan_capacity
from quire.lab.shapes import read_model_spec
from quire.lab.traffic import Kind
from quire.sim.devices import DEVICES

SPEC = read_model_spec("llama-3.1-8b")
CONFIG = EngineConfig(model="llama-3.1-8b", max_model_len=2048)
MIX = [Kind(300, 20), Kind(100, 10)]


@pytest.fixture(autouse=True)
def short_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_MIN_REQUESTS", 60)
    monkeypatch.setattr(capacity, "_MAX_REQUESTS", 120)
    monkeypatch.setattr(capacity, "_NUM_TRIES", 3)
    monkeypatch.setattr(capacity, "_MAX_SIMULATED", 3)


def plan(rate: float, limits: Limits, *names: str) -> capacity.Capacity:
    devices = [DEVICES[name] for name in names]
    return plan_capacity(CONFIG, SPEC, devices, rate=rate, limits=limits, mix=MIX)


def test_the_cheapest_comes_first_and_grows_with_the_rate() -> None:
    limits = Limits(0.5, 0.05)
    small, large = plan(50, limits, "h100", "h200"), plan(5000, limits, "h100", "h200")
    prices = [one.price_for(5000) for one in large.found]
    assert prices == sorted(prices) and large.best.replicas_for(5000) > 20 * small.best.replicas_for(50) > 0
    assert large.best.rate and 0 < large.best.rate <= large.best.bound
    assert large.best.ttft_s <= limits.ttft_s and large.best.itl_s <= limits.itl_s
    assert large.checked["replicas"] == 4 and large.checked["ttft_p99_s"] < 2 * limits.ttft_s
    assert f"-dp {large.best.replicas_for(5000)}" in large.flags() and "h200" in capacity.as_text(large)
    chart = capacity.cost_chart(large)
    assert all(list(series.y) == sorted(series.y) for series in chart.series)


def test_tight_limits_take_more_devices() -> None:
    loose, tight = plan(500, Limits(1.0, 0.1), "a100"), plan(500, Limits(0.1, 0.012), "a100")
    assert tight.best.price_for(500) > loose.best.price_for(500)


def test_what_cannot_be_has_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"at least 0\.\d+ ms|at least \d") as told:
        plan(10, Limits(0.5, 1e-4), "h200")
    assert "itl=0.1" in str(told.value) and "h200 tp" in str(told.value)


def test_a_model_that_fits_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    devices = tmp_path / "devices.json"
    devices.write_text('{"t4": {"memory_gib": 2.0}}')
    limits = ["--rate", "1/s", "--slo", "ttft=1s,itl=100ms"]
    assert main(["plan", "llama-3.1-70b", *limits, "--gpu", "t4", "--devices", str(devices)]) == 1
    told = capsys.readouterr().err
    assert "2.00 GiB" in told and "32 × t4" in told


def test_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart, devices = tmp_path / "cost.svg", tmp_path / "devices.json"
    devices.write_text('{"h200": {"price_per_hour": 1.0}}')
    flags = ["--gpu", "h200", "--devices", str(devices), "--prompt-len", "200", "--output-len", "10"]
    base = ["plan", "llama-3.1-8b", "--rate", "60000/min", "--slo", "ttft=500ms,itl=50ms", *flags]
    assert main([*base, "--plot", str(chart), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["candidates"][0]
    assert first["dollars_per_hour"] == first["devices"] and found["requests_per_s"] == 1000
    assert chart.read_text().startswith("<svg")


def test_rates_and_limits_are_read() -> None:
    assert read_rate("1,000,000/min") == pytest.approx(16666.67, rel=1e-4)
    assert read_rate("7200/h") == read_rate("2") == 2.0
    assert read_limits("itl=0.05s, ttft=500ms") == Limits(0.5, 0.05)
    for wrong in ("fast", "0/s", "10/fortnight", "-1/s"):
        with pytest.raises(ConfigError, match="--rate"):
            read_rate(wrong)
    for wrong in ("ttft=500ms", "ttft=0ms,itl=1ms", "e2e=1s", "ttft=500,itl=50", ""):
        with pytest.raises(ConfigError, match="--slo"):
            read_limits(wrong)


@pytest.mark.parametrize(
    "flags", [["--rate", "1/s"], ["--plot", "a.svg"], ["--rate", "1/s", "--slo", "ttft=1s,itl=1s", "--memory", "9GiB"]]
)
def test_flags_that_do_not_go_together(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", *flags]) == 2
    assert "--rate" in capsys.readouterr().err
