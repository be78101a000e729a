"""Named calls: what they do to a core, and that their results can travel."""

from __future__ import annotations

import struct
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import sim_engine
from live_harness import make_core, make_request, run_to_end
from scheduler.harness import Rig
from sim_memory import SimStore

from quire.engine import calls
from quire.engine.calls import CALLS, INSPECTIONS, pin_prefix
from quire.engine.core import EngineCore
from quire.errors import BadRequestError
from quire.kv import KVManager
from quire.kv.watch import BlockCode
from quire.params import SamplingSpec
from quire.request import Request


def request(prompt: list[int]) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=prompt,
        max_tokens=2,
        end_token_ids=frozenset(),
        spec=SamplingSpec(temperature=0.0),
    )


def test_every_inspection_can_be_called() -> None:
    assert INSPECTIONS.keys() <= CALLS.keys()
    assert {"reset_prefix_cache", "pin_prefix", "unpin_prefix", "kv_overview", "kv_changes"} <= CALLS.keys()
    assert "metrics" not in CALLS  # the loop's own, which has the counters


def test_pin_and_unpin() -> None:
    core = sim_engine.make_core()
    prefix = list(range(10))
    assert pin_prefix(core, token_ids=prefix) == 8
    assert not core.has_work
    assert core.kv.num_pinned_blocks == 2
    assert CALLS["reset_prefix_cache"](core) is True  # which spares what is pinned
    core.add(request([*prefix, 99]))
    while core.has_work:
        updates = core.step()
    assert updates[0].seq.num_cached_tokens == 8
    assert CALLS["unpin_prefix"](core, token_ids=prefix) == 8
    assert core.kv.num_pinned_blocks == 0


def test_pinning_waits_for_nobody() -> None:
    core = sim_engine.make_core()
    core.add(request([1, 2, 3]))
    with pytest.raises(BadRequestError, match="no request runs"):
        pin_prefix(core, token_ids=[1] * 8)
    core.step()
    assert CALLS["reset_prefix_cache"](core) is False  # a request holds blocks


PROMPT = list(range(1, 11))  # two full blocks of 4, and 2 tokens


def two_chats() -> EngineCore:
    """Two requests under way that share their first two blocks."""
    core = make_core()
    core.add(make_request("a", PROMPT, tenant="one"))
    core.step()
    core.add(make_request("b", PROMPT, tenant="two"))
    core.step()
    return core


def test_everything_can_be_sent() -> None:
    """Results cross a process border as msgpack."""
    core = two_chats()
    for name, look in calls.INSPECTIONS.items():
        arguments = {"kv_block": {"block_id": 0}, "kv_tokens": {"block_ids": [0]}}.get(name, {})
        result = look(core, **arguments)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), strict=False) == result, name


def test_overview() -> None:
    core = two_chats()
    overview = calls.kv_overview(core)
    assert overview["num_running"] == 2 and overview["num_requests"] == 2
    assert overview["num_used"] == 4  # two shared, and one own each
    assert overview["prefix"]["outcomes"]["hit"] == 1 and overview["prefix"]["outcomes"]["cold"] == 1
    assert overview["prefix"]["hit_rate"] == pytest.approx(8 / 20)


def test_the_map() -> None:
    core = two_chats()
    found = calls.kv_map(core, first=1, limit=4)
    assert found["states"] == ["in_use"] * 3 + ["free"]
    assert found["ref_counts"] == [2, 1, 1, 0]
    assert found["num_hits"] == [1, 0, 0, 0]
    assert found["hashes"][0] is not None and found["hashes"][3] is None
    assert len(calls.kv_map(core, first=0, limit=10**9)["states"]) == 64


def test_tables_say_why_they_hit_or_missed() -> None:
    core = two_chats()
    found = calls.kv_tables(core)
    a, b = found["sequences"]
    assert (a["request_id"], a["cache_outcome"], a["num_cached_tokens"]) == ("a", "cold", 0)
    assert (b["request_id"], b["cache_outcome"], b["num_cached_tokens"]) == ("b", "hit", 8)
    assert a["blocks"] == [0, 3] and b["blocks"] == [0, 2, 3, 1]
    assert a["state"] == "running" and a["num_committed_blocks"] == 2
    page = calls.kv_tables(core, offset=1, limit=1)
    assert [s["request_id"] for s in page["sequences"]] == ["b"] and page["num_requests_in_all"] == 2


def test_a_swapped_request_has_host_blocks() -> None:
    core = make_core(
        num_blocks=8, num_host_blocks=8, preemption="swap", max_num_batched_tokens=64, kv_bytes_per_block=1
    )
    for name in "ab":
        core.add(make_request(name, [ord(name)] * 10, max_tokens=20))
    for _ in range(40):
        core.step()
        if core.kv.swapped:
            break
    assert core.kv.swapped
    swapped = [s for s in calls.kv_tables(core)["sequences"] if s["state"] == "swapped"]
    assert swapped and sum(swapped[0]["host_blocks"][1::2]) == len(next(iter(core.kv.swapped.values())).host_ids)
    [[seq_id, runs]] = calls.kv_changes(core)["host_tables"]
    assert seq_id == swapped[0]["seq_id"] and runs == swapped[0]["host_blocks"]
    run_to_end(core)


def test_a_block_in_use() -> None:
    core = two_chats()
    block = calls.kv_block(core, 1)
    assert block["token_ids"] == [5, 6, 7, 8] and block["chain_index"] == 1
    assert block["state"] == "in_use" and block["ref_count"] == 2 and block["num_hits"] == 1
    assert [user["request_id"] for user in block["users"]] == ["a", "b"]
    assert [user["table_index"] for user in block["users"]] == [1, 1]
    partly = calls.kv_block(core, 2)
    assert [user["request_id"] for user in partly["users"]] == ["a"]
    assert partly["token_ids"][:2] == [9, 10] and partly["hash"] is None


def test_a_cached_block_still_has_its_tokens() -> None:
    core = two_chats()
    run_to_end(core)
    block = calls.kv_block(core, 1)
    assert block["state"] == "cached" and block["users"] == []
    assert block["token_ids"] == [5, 6, 7, 8]
    assert block["parent"] == calls.kv_block(core, 0)["hash"]
    assert calls.kv_tokens(core, [0, 1, 63, 99]) == [[1, 2, 3, 4], [5, 6, 7, 8], [], []]
    assert core.kv.reset_prefix_cache()
    assert calls.kv_block(core, 1)["token_ids"] == []


def test_a_block_that_does_not_exist() -> None:
    with pytest.raises(BadRequestError, match="between 0 and 63"):
        calls.kv_block(make_core(), 64)


def test_the_trees_links() -> None:
    core = two_chats()
    run_to_end(core)
    links = calls.kv_tree(core)
    by_hash = dict(zip(links["hashes"], links["block_ids"], strict=True))
    parents = dict(zip(links["block_ids"], links["parents"], strict=True))
    assert by_hash[parents[1]] == 0 and parents[0] not in by_hash
    assert links["num_hits"][links["block_ids"].index(0)] == 1
    pieces = [calls.kv_tree(core, first=first, limit=16) for first in range(0, 64, 16)]
    assert [one for piece in pieces for one in piece["block_ids"]] == links["block_ids"]
    assert [piece["end"] for piece in pieces] == [16, 32, 48, 64]


def test_changes_follow_the_engine() -> None:
    core = make_core()
    first = calls.kv_changes(core)
    assert first["is_new"] and first["blocks"]["num_scanned"] == 64 and first["rows"] == []
    core.add(make_request("a", PROMPT, n=2, max_tokens=6))
    core.step()
    second = calls.kv_changes(core, watch=first["watch"])
    assert not second["is_new"] and second["blocks"]["num_scanned"] == 0
    rows = [dict(zip(calls.ROW_FIELDS, row, strict=True)) for row in second["rows"]]
    assert [(row["request_id"], row["index"], row["state"]) for row in rows] == [
        ("a", 0, "running"),
        ("a", 1, "running"),
    ]
    assert second["tables"] == [[row["seq_id"], [0, 3]] for row in rows]
    codes = dict(zip(struct.unpack("<3I", second["blocks"]["block_ids"]), second["blocks"]["codes"], strict=True))
    assert codes == {0: BlockCode.SHARED, 1: BlockCode.SHARED, 2: BlockCode.SHARED}
    assert second["gauges"]["num_running"] == 2 and second["gauges"]["num_used"] == 3
    run_to_end(core)
    last = calls.kv_changes(core, watch=first["watch"], with_gauges=False)
    assert last["rows"] == [] and last["gauges"] is None and last["blocks"]["block_ids"]


def test_a_watch_that_is_not_known_begins_again() -> None:
    core = make_core()
    assert calls.kv_changes(core, watch=10**9)["is_new"]


def test_a_look_costs_little_with_many_blocks_and_requests() -> None:
    core = make_core(num_blocks=100_000, max_num_seqs=512, max_num_batched_tokens=100_000, max_model_len=4_000)
    for number in range(256):
        core.add(make_request(f"r{number}", [number] * 400, max_tokens=400))
    core.step()
    assert isinstance(core.kv, KVManager) and core.kv.num_used_blocks > 10_000
    watch, durations_s = None, []
    for _ in range(80):
        started = time.thread_time()
        found = calls.kv_changes(core, watch=watch)
        durations_s.append(time.thread_time() - started)
        watch = found["watch"]
        core.step()
    # About a millisecond on a quiet machine; the bound leaves room for a busy one.
    assert sorted(durations_s)[len(durations_s) // 2] < 10e-3
    assert max(len(one) for one in (found["rows"], found["tables"])) <= 200


def test_levels_come_with_the_changes_where_they_are_asked_for() -> None:
    rig = Rig(stores=(SimStore(),), num_blocks=20, prefill_tokens_per_s=1e3)
    core: Any = SimpleNamespace(kv=rig.kv, scheduler=rig.scheduler)
    prompt = list(range(41))
    for tokens in (prompt, list(range(100, 160)), prompt):
        rig.add(make_request(str(tokens[:2]) + str(len(rig.history)), tokens))
        rig.run()
    device, store = calls.kv_changes(core, with_levels=True)["levels"]["levels"]
    assert store["num_loaded"] > 0 and store["num_stored"] > store["num_loaded"]
    assert device["num_hit_tokens"] + store["num_loaded"] * 4 == 40 and device["max_blocks"] == 20
    assert calls.kv_changes(core)["levels"] is None
    plain: Any = SimpleNamespace(kv=(bare := Rig()).kv, scheduler=bare.scheduler)
    assert calls.kv_changes(plain, with_levels=True)["levels"] is None
