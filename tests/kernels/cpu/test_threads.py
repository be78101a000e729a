"""How many threads by default."""

from __future__ import annotations

import pytest

from quire.kernels.cpu import threads


def _machine(monkeypatch, siblings, quota=""):
    """siblings: for each processor, what the kernel lists as sharing its core."""
    files = {f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": s for i, s in enumerate(siblings)}
    files["/sys/fs/cgroup/cpu.max"] = quota
    monkeypatch.setattr(threads, "usable_cpus", lambda: list(range(len(siblings))))
    monkeypatch.setattr(threads, "_read", lambda path: files.get(path, ""))
    return threads.default_num_threads()


@pytest.mark.parametrize(
    ("siblings", "quota", "expected"),
    [
        (["0", "1"], "", 2),  # two cores
        (["0-1", "0-1"], "", 2),  # one core, two hardware threads
        (["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"], "max 100000", 4),
        ([""] * 8, "", 8),  # nothing known of the cores
        (["0"], "", 1),
        ([str(i) for i in range(64)], "200000 100000", 2),  # a container's share
        ([str(i) for i in range(64)], "50000 100000", 1),
    ],
)
def test_default_num_threads(monkeypatch, siblings, quota, expected):
    assert _machine(monkeypatch, siblings, quota) == expected


def test_this_machine_has_some():
    assert 1 <= threads.default_num_threads() <= len(threads.usable_cpus())
