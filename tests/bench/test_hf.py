"""The static baseline: what it counts, by hand."""

from __future__ import annotations

import builtins
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from quire.bench.hf import HFBaseline
from quire.config import EngineConfig
from quire.errors import ConfigError


@pytest.fixture(scope="module")
def baseline(tiny_model: Path) -> HFBaseline:
    pytest.importorskip("transformers")
    config = EngineConfig(model=str(tiny_model), load_format="dummy", device="cpu", num_threads=1)
    return HFBaseline(config, batch_size=2)


def test_padded_batches_by_hand(baseline: HFBaseline) -> None:
    report = baseline.measure([([20] * 4, 3), ([21] * 10, 6), ([22] * 5, 2)], name="three")
    assert (report.engine, report.requests, report.completed) == ("hf", 3, 3)
    assert (report.prompt_tokens, report.output_tokens) == (19, 11)
    assert report.num_steps == 6 + 2  # each batch runs as long as its longest
    reserved = 2 * (10 + 6) + 1 * (5 + 2)
    assert report.values["padding_waste_percent"] == pytest.approx(100 * (1 - 30 / reserved))
    assert report.values["kv_slots_reserved_peak"] == 32
    assert report.ttft_s and report.itl_s and report.e2e_s
    assert report.itl_s.count == 2 + 5 + 1
    # The third waits for the first batch to end.
    assert report.ttft_s.max > report.e2e_s.p50 > report.ttft_s.p50
    assert report.output_tok_s == pytest.approx(11 / report.seconds)


def test_ctrl_c_keeps_what_was_done(baseline: HFBaseline) -> None:
    def interrupt(output_tokens: int, completed: int) -> None:
        if output_tokens == 8:
            os.kill(os.getpid(), signal.SIGINT)

    report = baseline.measure([([20] * 4, 100), ([21] * 4, 100), ([22] * 4, 5)], progress=interrupt)
    assert report.interrupted and report.completed == 0
    assert report.output_tokens == 8


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("transformers"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install transformers"):
        HFBaseline(EngineConfig())
