"""The arithmetic inside the experiments, by hand; the experiments themselves on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import write_tiny_model

from quire.bench.workloads import even_lengths
from quire.errors import ConfigError
from quire.lab import (
    accuracy,
    batch_width,
    beam_sharing,
    block_size,
    prefix_sharing,
    pressure,
    step_budget,
    tiers,
)
from quire.lab.accuracy import Reading
from quire.lab.baseline import static_share
from quire.lab.context import PASSAGE, LabContext, LabSettings
from quire.lab.experiment import Result
from quire.lab.experiments import EXPERIMENTS, choose


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> LabContext:
    model = write_tiny_model(tmp_path_factory.mktemp("lab") / "model", max_position_embeddings=1024)
    settings = LabSettings(quick=True, model=str(model), load_format="dummy")
    return LabContext(settings, lambda text: None)


# -- by hand


def test_static_batches_by_hand() -> None:
    work = [([1], 4), ([1], 2), ([1], 3)]
    assert static_share(work, 2) == pytest.approx((4 + 2 + 3) / (2 * 4 + 1 * 3))
    assert static_share(work, 3) == pytest.approx(9 / 12)


def test_gains_per_doubling() -> None:
    assert batch_width.gains_per_doubling([10.0, 40.0, 80.0], (1, 4, 16)) == pytest.approx([100.0, 100 * (2**0.5 - 1)])


@pytest.mark.parametrize(
    ("gains", "at"), [([80.0, 40.0, 5.0, 1.0], 2), ([80.0, 5.0, 40.0, 1.0], 3), ([80.0, 40.0], None), ([3.0], 0)]
)
def test_saturation_is_where_nothing_later_pays(gains: list[float], at: int | None) -> None:
    assert batch_width.saturation(gains) == at


def test_the_step_line_is_found_again() -> None:
    widths = [1.0, 4.0, 16.0, 64.0]
    line = batch_width.fit_line(widths, [0.02 + 0.001 * w for w in widths])
    assert line is not None
    assert (line.start_s, line.slope_s, line.half_width) == pytest.approx((0.02, 0.001, 20.0))
    assert batch_width.fit_line([1.0, 2.0], [None, 0.1]) is None


def test_copies_on_write_by_hand() -> None:
    assert prefix_sharing.expected_copies([([1] * 16, 4), ([1] * 17, 4)], 16) == 3


def test_predicted_waste_by_hand() -> None:
    # A prompt of 3, 3 out: 3, 4 and 5 tokens are held in 1, 1 and 2 blocks of 4.
    assert block_size.predicted_waste([([1] * 3, 3)], 4) == pytest.approx(100 * (1 - 12 / 16))


def test_a_cache_holds_the_batch_or_the_longest() -> None:
    assert block_size.cache_tokens([([1] * 64, 64)] * 4, 10) == 1280
    assert block_size.cache_tokens([([1] * 1000, 24)], 1) == 1536


def test_perplexity_and_shift_by_hand() -> None:
    first, second = Reading([-1.0, -3.0]), Reading([-1.1, -3.0])
    assert first.perplexity == pytest.approx(2.718281828**2)
    shift = second.shift_from(first)
    assert (shift["mean"], shift["largest"]) == pytest.approx((0.05, 0.1))
    assert shift["perplexity_percent"] == pytest.approx(100 * (2.718281828**0.05 - 1))
    assert shift["noise"] == pytest.approx(5.0)  # moves of -0.1 and 0: 7.07 / sqrt(2)


def test_lengths_are_seeded_and_in_range() -> None:
    work = even_lengths(300, 1, 50, (3, 5), (7, 9))
    assert work == even_lengths(300, 1, 50, (3, 5), (7, 9)) != even_lengths(300, 2, 50, (3, 5), (7, 9))
    assert {len(prompt) for prompt, _ in work} == {3, 4, 5} and {out for _, out in work} == {7, 8, 9}


def test_experiments_are_chosen_by_key_or_number() -> None:
    assert [each.key for each in choose(["2", "baseline"])] == ["baseline", "batch-width"]
    assert choose(None) == list(EXPERIMENTS)
    with pytest.raises(ConfigError, match="no experiment is called nope: there are baseline, "):
        choose(["nope"])
    with pytest.raises(ConfigError, match="there are"):
        choose([])


# -- on a tiny model, whose speed means nothing and whose counts are exact


def check(result: Result) -> Result:
    assert result.headline and result.charts and result.tables and result.findings and result.explanation
    result.data = json.loads(json.dumps(result.data))  # as a report has them
    return result


def test_block_sizes(context: LabContext) -> None:
    result = check(block_size.EXPERIMENT.run(context))
    runs = [each for each in result.data["measured"] if each["kind"] == "general"]
    for run, size in zip(runs, result.data["sizes"], strict=True):
        assert run["kv"]["block_size"] == size
        assert run["kv"]["num_blocks"] == result.data["cache_tokens"]["general"] // size
        assert run["kv"]["blocks_allocated"] == run["kv"]["blocks_freed"] > 0
    waste = [run["kv"]["waste_percent_mean"] for run in runs]
    assert waste == sorted(waste) and waste[-1] > 3 * waste[0]
    assert result.findings[0].holds and result.findings[1].holds


def test_sharing_counts_are_exact(context: LabContext) -> None:
    result = check(prefix_sharing.EXPERIMENT.run(context))
    off, on, apart, forked = result.data["measured"]
    assert off["kv"]["prefix_hit_tokens"] == 0 and on["kv"]["prefix_hit_tokens"] == 11 * 192
    assert on["kv"]["peak_blocks"] < off["kv"]["peak_blocks"]
    assert forked["kv"]["copies"] == result.data["expected_copies"] == 12
    assert apart["kv"]["copies"] == 0 and apart["output_tokens"] == forked["output_tokens"]


def test_pressure_preempts_and_serves_all(context: LabContext) -> None:
    result = check(pressure.EXPERIMENT.run(context))
    enough, recompute, swap, auto = result.data["measured"]
    assert recompute["kv"]["num_blocks"] == enough["kv"]["peak_blocks"] // 2
    assert not sum(enough["kv"]["preemptions"].values())
    assert recompute["kv"]["recomputed_tokens"] and not recompute["kv"]["swapped_out_blocks"]
    assert swap["kv"]["swapped_in_blocks"] and not swap["kv"]["recomputed_tokens"]
    assert {each["completed"] for each in (enough, recompute, swap, auto)} == {16}
    assert [finding.holds for finding in result.findings[:2]] == [True, True]


def test_chats_find_below_what_the_cache_lost(context: LabContext) -> None:
    result = check(tiers.EXPERIMENT.run(context))
    plain, disk = result.data["measured"]
    assert (plain["level"], disk["level"]) == ("none", "disk")
    assert disk["found_tokens"] >= plain["found_tokens"] > 0  # a tiny model computes as fast as a disk loads


def test_decodes_beside_loads_as_a_gpu_measures_them(
    context: LabContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts that take a GPU, on a disk and with fewer of everything."""
    sizes = {"DECODES": 2, "JOINING": 2, "ROUNDS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(tiers, f"_NUM_{name}", value)
    monkeypatch.setattr(tiers, "_JOINING_TOKENS", 64)
    engine = tiers._engine(context, str(tmp_path))
    for store in engine.built.executor.executor.stores:
        store.load_s = lambda num_blocks: 0.0  # type: ignore[method-assign]  # else so small a model is computed
    beside = tiers._decodes_beside_loads(context, engine)
    assert beside["num_loads"] == 4 and beside["left_by_loading"] > 0
    assert engine.core.kv.tiers is not None
    assert engine.core.kv.tiers.counters.levels["disk"].num_loaded >= 3 * 2 * 4
    lengths = [{"tokens": 64, "num_loaded_tokens": 64, "computed_s": 0.6, "loaded_s": 0.1}]
    run = {"output_tok_s": 1.0, "first_token_p50_s": 1.0, "first_token_p99_s": 1.0, "found_tokens": 1}
    runs = [run | {"level": level, "prompt_tokens": 2} for level in ("none", "host memory")]
    data = {"lengths": lengths, "measured": runs, "num_chats": 1, "num_turns": 1, "beside": beside}
    result = tiers.tell(data | {"link_bytes_per_s": 2e9, "load_bytes_per_s": 1e9}, context)
    assert [len(table.rows) for table in result.tables] == [1, 6, 2]
    assert [finding.holds for finding in result.findings[-2:]] == [True, beside["left_by_loading"] > 0.95]


def test_budgets_that_cannot_be_are_named(context: LabContext) -> None:
    result = check(step_budget.EXPERIMENT.run(context))
    refused = [point for point in result.data["points"] if point["refusal"]]
    assert [(point["budget"], point["chunked"]) for point in refused] == [(256, False)]
    assert "max_num_batched_tokens=256" in refused[0]["refusal"]


def test_widths(context: LabContext) -> None:
    result = check(batch_width.EXPERIMENT.run(context))
    assert [run["settings"]["max_num_seqs"] for run in result.data["measured"]] == [1, 4, 16, 64, 256]
    assert result.data["measured"][0]["running_mean"] == 1.0


def test_accuracy_of_random_weights_claims_nothing(context: LabContext) -> None:
    result = check(accuracy.KV_EXPERIMENT.run(context))
    readings = {each["kv_dtype"]: each for each in result.data["readings"]}
    assert readings["fp8"]["refusal"] and "perplexity" not in readings["fp8"]
    assert readings["float16"]["kv_bytes_per_token"] == readings["float32"]["kv_bytes_per_token"] / 2
    assert readings["float16"]["perplexity"] == pytest.approx(readings["float32"]["perplexity"], rel=1e-3)
    assert readings["float16"]["perplexity"] != readings["float32"]["perplexity"]  # the cache was really read
    assert [finding.holds for finding in result.findings] == [None, None, True]


def test_formats_of_weights_differ_a_little(context: LabContext) -> None:
    result = check(accuracy.WEIGHTS_EXPERIMENT.run(context))
    formats = {each["name"]: each for each in result.data["formats"]}
    assert list(formats) == ["float32", "float16", "bfloat16", "int8"]
    reference = formats["float32"]
    assert set(reference["same_tokens"]) == {result.data["answer_tokens"]} and reference["shift"]["largest"] == 0
    for name in ("float16", "bfloat16", "int8"):
        assert 0 < formats[name]["shift"]["mean"] < 0.1
        assert formats[name]["weight_bytes"] < reference["weight_bytes"]


def test_baseline_without_transformers(context: LabContext, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from quire.lab import baseline
    from quire.lab.context import SkippedError

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SkippedError, match="pip install transformers"):
        baseline.EXPERIMENT.run(context)


def test_the_passage_is_long_enough() -> None:
    assert len(PASSAGE) > 3000


def test_beams_share_more_than_answers_that_are_drawn(context: LabContext) -> None:
    result = beam_sharing.EXPERIMENT.run(context)
    rows = result.data["measured"]
    assert len(rows) == len(result.tables[0].rows) == 12
    assert all(row["blocks"] < row["entries"] and row["copies"] > 0 for row in rows)
    assert result.findings[0].holds
    assert beam_sharing.saved_percent({"blocks": 30, "entries": 40}) == 25.0
