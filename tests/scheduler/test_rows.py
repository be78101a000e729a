from __future__ import annotations

from quire.scheduler.lifecycle import RowPool


def test_rows_go_out_lowest_first_and_are_named_when_they_are_back() -> None:
    rows = RowPool(4)
    assert rows.take(3) == [0, 1, 2]
    rows.take_back(1)
    rows.take_back(0)
    assert (rows.num_free, rows.take(1)) == (3, [0])
    assert rows.take_released() == [1, 0]
    assert rows.take_released() == []


def test_reserved_rows_go_back_unnamed() -> None:
    rows = RowPool(3)
    rows.take_back_unused(rows.take(2))
    assert (rows.num_free, rows.take_released()) == (3, [])


def test_trimmed_tables_are_told_once_and_not_of_rows_that_were_given_back() -> None:
    rows = RowPool(3)
    rows.take(3)
    rows.note_trimmed(0, 5)
    rows.note_trimmed(1, 7)
    rows.note_trimmed(0, 4)
    rows.take_back(1)
    assert rows.take_trimmed() == [(0, 4)]
    assert rows.take_trimmed() == []
