from __future__ import annotations

from quire.scheduler.rows import RowPool


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


def test_each_use_of_a_row_has_a_generation() -> None:
    rows = RowPool(2)
    assert [rows.next_generation(0), rows.next_generation(0), rows.next_generation(1)] == [1, 2, 1]
