"""Where a step's time goes: the parts are a step's, and add up to it."""

from __future__ import annotations

import pytest

from quire.bench.profile import kind_of, profile_workload
from quire.bench.steps import Step
from quire.bench.text import profile_parts, show
from quire.engine.llm_engine import LLMEngine
from quire.plan import StepTimings


@pytest.mark.parametrize(
    ("decodes", "prefill", "kind"),
    [(1, 0, "decode, 1"), (2, 0, "decode, 2"), (3, 0, "decode, 3-4"), (8, 0, "decode, 5-8"), (9, 0, "decode, 9-16"),
     (0, 5, "prefill"), (1, 5, "mixed")],
)  # fmt: skip
def test_kinds(decodes: int, prefill: int, kind: str) -> None:
    assert kind_of(Step(decodes, prefill, 1, StepTimings())) == kind


def test_parts_add_up_to_the_step(engine: LLMEngine) -> None:
    decoder = engine.core.executor.worker.decoder  # type: ignore[attr-defined]
    ops = decoder.ops
    report, kinds = profile_workload(engine, [([20 + i] * 30, 6) for i in range(3)], name="three")
    assert decoder.ops is ops  # given back
    assert {kind.name: kind.num_steps for kind in kinds} == {"prefill": 1, "decode, 3-4": 5}
    assert report.num_steps == 6
    assert sum(kind.num_tokens for kind in kinds) == 90 + 3 * 5
    for kind in kinds:
        assert sum(kind.parts_s.values()) == pytest.approx(kind.wall_s, rel=0.02)
        assert kind.parts_s["products"] > 0 and kind.parts_s["attention"] > 0 and kind.parts_s["sample"] > 0
    parts = profile_parts(report)
    assert sum(parts["prefill"].values()) == pytest.approx(report.values["prefill: step_ms"], rel=0.02)
    text = show("profile", [report])
    assert "prefill" in text and "decode, 3-4" in text and "attention" in text
