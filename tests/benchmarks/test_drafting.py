from __future__ import annotations

from benchmarks.drafting import measure


def test_looks_are_timed_and_find_drafts_where_they_pay() -> None:
    _, step_s, num_drafts = measure("suffix", 3, copies=True, pays=True)
    assert step_s > 0 and num_drafts > 8
    assert measure("ngram", 3, copies=True, pays=False)[2] == 0
