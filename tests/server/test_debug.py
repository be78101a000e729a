from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_harness import CoreEngine, make_core, make_request, run_to_end
from observing_fakes import prepared
from server_harness import Server, running

from quire.kv.hashing import hash_blocks, root_hash, unpack_tokens
from quire.server import debug
from quire.server.debug import Link, PrefixTree, Shown, block_name
from quire.server.metrics import RequestSummary
from quire.server.paths import OPERATIONS
from quire.server.settings import ApiKey
from quire.text import Tokenizer

SYSTEM = "You are the librarian of a small library. "
KEYS = (ApiKey("one", "key-of-one-1"), ApiKey("two", "key-of-two-2"), ApiKey("ops", "key-of-ops-3", is_admin=True))


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_directory(tiny_model)


def make_engine(tokenizer: Tokenizer) -> CoreEngine:
    """Two requests under way with one beginning, of two tenants; a third has ended and left its blocks."""
    core = make_core()
    core.add(make_request("gone", tokenizer.encode("An older text, that ended.", add_special_tokens=False)))
    run_to_end(core)
    for name, question in {"one": "A quire, what is it?", "two": "Where is the sea?"}.items():
        core.add(make_request(name, tokenizer.encode(SYSTEM + question, add_special_tokens=False), tenant=name))
        core.step()
    return CoreEngine(core, tokenizer)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Server]:
    with running(make_engine(tokenizer)) as server:
        yield server


def get(server: Server, path: str) -> Any:
    reply = server.get("/debug/kv" + path)
    assert reply.status == 200, reply.text
    return reply.json()


def test_the_bare_path_is_short_and_says_where_the_rest_is(server: Server) -> None:
    found = get(server, "")
    assert set(found) == {"overview", "more"}
    overview = found["overview"]
    assert overview["num_free"] + overview["num_cached"] + overview["num_used"] == 64
    paths = [path.partition("?")[0].replace("{block}", "0") for path in found["more"]]
    assert {"/debug/kv/map", "/debug/kv/requests", "/debug/kv/sharing", "/debug/kv/tree"} <= set(paths)
    for path in paths:
        assert server.get(path).status == 200
    served = {op.path for op in OPERATIONS["Cache"] if op.path.startswith("/debug/kv")}
    assert {path.partition("?")[0] for path in found["more"]} == served


def test_a_large_cache_has_a_short_overview() -> None:
    with running(CoreEngine(make_core(num_blocks=10_000))) as server:
        assert len(server.get("/debug/kv").text) < 4_000
        assert [name for name, _ in server.engine.calls] == ["kv_overview"]


def test_everything_at_once(server: Server) -> None:
    found = get(server, "?full=1")
    assert set(found) == {"overview", "map", "requests", "sharing", "tree"}
    assert found["overview"]["num_running"] == 2
    assert len(found["map"]["states"]) == 64
    assert len(found["requests"]["sequences"]) == 2


def test_the_map_has_pages(server: Server) -> None:
    whole = get(server, "/map")
    assert whole["next"] is None and whole["num_blocks"] == 64
    assert {"free", "cached", "in_use"} == set(whole["states"])
    first, second = get(server, "/map?limit=40"), get(server, "/map?first=40&limit=40")
    assert first["next"] == 40 and second["next"] is None
    assert first["states"] + second["states"] == whole["states"]
    assert first["ref_counts"] + second["ref_counts"] == whole["ref_counts"]
    assert get(server, "/map?first=64")["states"] == []


def test_a_large_map_is_asked_for_in_pieces() -> None:
    with running(CoreEngine(make_core(num_blocks=10_000))) as server:
        found = get(server, "/map?limit=9999")
        assert len(found["states"]) == 9_999 and found["next"] == 9_999
        assert [arguments["limit"] for _, arguments in server.engine.calls] == [4_096, 4_096, 1_807]


def test_requests_say_why_they_hit_or_missed(server: Server) -> None:
    found = get(server, "/requests")
    outcomes = {one["request_id"]: (one["cache_outcome"], one["num_cached_tokens"]) for one in found["sequences"]}
    assert outcomes == {"one": ("cold", 0), "two": ("partial", 40)}
    assert get(server, "/requests?offset=1&limit=1")["sequences"][0]["request_id"] == "two"


def test_requests_that_ended_lately_are_listed(server: Server) -> None:
    server.context.first.metrics.recent.append(
        RequestSummary(
            request_id="ended",
            tenant="one",
            num_prompt_tokens=30,
            num_cached_tokens=16,
            num_output_tokens=4,
            queue_s=0.0,
            first_token_s=0.1,
            inter_token_s=0.01,
            total_s=0.2,
            finish_reason="stop",
            cache_outcome="evicted",
            num_preemptions=0,
        )
    )
    (ended,) = get(server, "/requests")["finished"]
    assert ended["request_id"] == "ended" and ended["cache_outcome"] == "evicted" and "tenant" not in ended


def test_sharing(server: Server) -> None:
    found = get(server, "/sharing")
    (group,) = found["groups"]
    assert group["sequences"] == [["one", 0], ["two", 0]]
    assert len(group["block_ids"]) == found["num_shared_blocks"] == found["num_blocks_saved"] == 10


def test_a_shared_block_has_its_users_and_text(server: Server) -> None:
    (group,) = get(server, "/sharing")["groups"]
    texts = [get(server, f"/blocks/{block_id}") for block_id in group["block_ids"]]
    assert "".join(block["text"] for block in texts) == SYSTEM[:40]
    assert [user["request_id"] for user in texts[0]["users"]] == ["one", "two"]
    assert texts[1]["tokens"] == list("are ") or texts[1]["tokens"] == list(SYSTEM[4:8])
    assert texts[0]["ref_count"] == 2 and texts[0]["chain_index"] == 0
    assert "tenant" not in texts[0]["users"][0]


def test_a_cached_block_keeps_its_text(server: Server) -> None:
    states = get(server, "/map")["states"]
    block = get(server, f"/blocks/{states.index('cached')}")
    assert block["users"] == [] and block["text"] in "An older text, that ended."


def test_half_a_character_is_shown_as_bytes(tokenizer: Tokenizer) -> None:
    core = make_core()
    core.add(make_request("a", tokenizer.encode("aaaé bc", add_special_tokens=False)))
    core.step()
    with running(CoreEngine(core, tokenizer)) as server:
        assert get(server, "/blocks/0")["tokens"] == ["a", "a", "a", "\\xc3"]


def test_without_a_tokenizer_there_are_ids(tokenizer: Tokenizer) -> None:
    core = make_core()
    core.add(make_request("a", list(range(9))))
    core.step()
    with running(CoreEngine(core)) as server:
        block = get(server, "/blocks/0")
        assert block["token_ids"] == [0, 1, 2, 3] and block["text"] is None and block["tokens"] is None


def test_the_tree(server: Server) -> None:
    found = get(server, "/tree")
    assert found["num_siblings"] == len(found["nodes"]) == 2 and found["next"] is None
    system = found["nodes"][0]
    assert system["num_hits"] == 1 and system["num_tokens"] == 40 and system["num_users"] == 2
    assert system["text"] == SYSTEM[:16]
    assert len(system["children"]) == 2
    deeper = get(server, f"/tree?node={system['node']}")
    assert [node["node"] for node in deeper["nodes"]] == [node["node"] for node in system["children"]]


def test_the_tree_has_pages(server: Server) -> None:
    first = get(server, "/tree?limit=1&depth=1")
    assert first["next"] == 1 and "children" not in first["nodes"][0]
    second = get(server, "/tree?limit=1&depth=1&offset=1")
    assert second["next"] is None and second["nodes"][0]["node"] != first["nodes"][0]["node"]


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("?first=1", 400, "first"),
        ("/map?first=-1", 400, "first"),
        ("/map?first=x", 400, "first"),
        ("/map?first=" + "9" * 5000, 400, "first"),
        ("/map?first=1&first=2", 400, "first"),
        ("/map?limit=0", 400, "limit"),
        ("/map?limit=99999999", 400, "limit"),
        ("/map?page=2", 400, "page"),
        ("/requests?limit=2000", 400, "limit"),
        ("/sharing?offset=1", 400, "offset"),
        ("/tree?depth=17", 400, "depth"),
        ("/tree?node=00ff", 404, "node"),
        ("/blocks/64", 404, "block"),
        ("/blocks/%C2%B2", 400, "block"),
        ("/blocks/-1", 400, "block"),
    ],
)
def test_wrong_parameters_are_named(server: Server, path: str, status: int, param: str) -> None:
    reply = server.get("/debug/kv" + path)
    assert reply.status == status, reply.text
    assert reply.json()["error"]["param"] == param


def test_an_engine_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CoreEngine(make_core())

    async def hang(name: str, **arguments: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(engine, "call", hang)
    monkeypatch.setattr(debug, "ANSWER_S", 0.05)
    with running(engine) as server:
        for path in ("", "?full=1", "/map", "/requests", "/sharing", "/tree", "/blocks/0"):
            reply = server.get("/debug/kv" + path)
            assert reply.status == 503 and reply.json()["error"]["code"] == "engine_busy", reply.text
            assert reply.headers["retry-after"] == "5"


def test_it_is_behind_the_key(tokenizer: Tokenizer) -> None:
    with running(make_engine(tokenizer), api_keys=KEYS[:1]) as server:
        assert server.get("/debug/kv").status == 401
        allowed = server.request("GET", "/debug/kv/blocks/20", authorization="Bearer key-of-one-1")
        assert allowed.status == 200 and allowed.json()["is_readable"]


def test_with_several_keys_requests_are_their_senders(tokenizer: Tokenizer) -> None:
    with running(make_engine(tokenizer), api_keys=KEYS) as server:
        for tenant in ("one", "two"):
            server.context.first.metrics.on_finished(prepared(f"ended-{tenant}", tenant=tenant), None, "stop")
        paths = ["/requests", "/sharing", "?full=1", "/requests?offset=1", "/tree", "/map"]
        paths += [f"/blocks/{number}" for number in range(64)]

        def everything(key: ApiKey) -> str:
            headers = {"authorization": f"Bearer {key.key}"}
            return "".join(server.request("GET", "/debug/kv" + path, **headers).text for path in paths)

        answers = {key.tenant: everything(key) for key in KEYS}
        for name in ("one", "two", "ended-one", "ended-two"):
            seen_by = {tenant for tenant, text in answers.items() if f'"{name}"' in text}
            assert seen_by == {name.removeprefix("ended-"), "ops"}
        count = server.request("GET", "/debug/kv/requests", authorization="Bearer key-of-two-2").json()
        assert count["num_requests_in_all"] == 1


def test_names_of_blocks_tell_nothing_of_their_text(server: Server) -> None:
    """A four-digit number in a known sentence could be found offline, from hashes that anyone can compute."""
    blocks = [block for block in server.engine.core.kv.pool.blocks if block.block_hash is not None]
    first = next(block for block in blocks if block.chain_index == 0)
    assert hash_blocks(root_hash(), unpack_tokens(first.packed_tokens), 4) == [first.block_hash]
    hashes = [block.block_hash for block in blocks if block.block_hash is not None]
    shown = "".join(server.get("/debug/kv" + path).text for path in ("/map", "/tree?depth=16&limit=1000"))
    shown += "".join(server.get(f"/debug/kv/blocks/{number}").text for number in range(64))
    assert len(hashes) > 10
    assert not [one for one in hashes if one.hex()[:8] in shown]


def test_with_several_keys_text_is_its_senders(tokenizer: Tokenizer) -> None:
    with running(make_engine(tokenizer), api_keys=KEYS) as server:

        def ask(key: str, path: str) -> Any:
            return server.request("GET", "/debug/kv" + path, authorization=f"Bearer {key}").json()

        (entry,) = ask("key-of-one-1", "/requests")["sequences"]
        own = entry["blocks"][-2] + entry["blocks"][-1] - 1
        assert ask("key-of-one-1", f"/blocks/{own}")["text"]
        for other in ("key-of-two-2", "key-of-ops-3"):
            hidden = ask(other, f"/blocks/{own}")
            assert not hidden["is_readable"]
            assert hidden["text"] is None and hidden["token_ids"] is None and hidden["tokens"] is None
        (group,) = ask("key-of-ops-3", "/sharing")["groups"]
        assert ask("key-of-two-2", f"/blocks/{group['block_ids'][0]}")["text"] == SYSTEM[:4]  # it sent that too
        cached = ask("key-of-two-2", "/map")["states"].index("cached")
        assert ask("key-of-two-2", f"/blocks/{cached}")["text"] is None
        assert "text" not in ask("key-of-two-2", "/tree")["nodes"][0]


def link(block: int, parent: int | None, *, index: int = 0, hits: int = 0) -> Link:
    name = b"root" if parent is None else b"%04d" % parent
    return Link(block, b"%04d" % block, name, index, hits, ref_count=0, is_pinned=False)


def test_names_are_this_processs_own() -> None:
    name = block_name(b"hash")
    assert name == block_name(b"hash") != block_name(b"other") and len(name) == 16
    ask = "from quire.server.debug import block_name; print(block_name(b'hash'))"
    other = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    assert len(other) == 16 and other != name


def test_chains_are_one_node() -> None:
    tree = PrefixTree([link(2, 1, index=2), link(0, None), link(1, 0, index=1)])
    (root,) = tree.roots
    assert root.block_ids == [0, 1, 2] and not root.children
    assert tree.num_blocks == 3 and len(tree.nodes) == 1


def test_branches_are_children_and_hits_add_up() -> None:
    tree = PrefixTree(
        [
            link(0, None, hits=7),
            link(1, 0, index=1, hits=5),
            link(2, 1, index=2, hits=1),
            link(3, 1, index=2, hits=3),
            link(4, 3, index=3),
            link(9, None),
        ]
    )
    busy, idle = tree.roots
    assert busy.block_ids == [0, 1] and idle.block_ids == [9]
    assert [child.block_ids for child in busy.children] == [[3, 4], [2]]  # the one that was hit more comes first
    assert busy.num_blocks_below == 5 and busy.num_hits_below == 7 + 3 + 1


def test_a_block_whose_parent_was_evicted_is_a_root() -> None:
    tree = PrefixTree([link(5, 4, index=5), link(6, 5, index=6)])
    (root,) = tree.roots
    assert root.links[0].chain_index == 5 and root.block_ids == [5, 6]


def test_a_chain_of_thousands() -> None:
    tree = PrefixTree([link(i, i - 1 if i else None, index=i) for i in range(9_000)])
    assert len(tree.roots[0].links) == 9_000


def test_shown_is_bounded() -> None:
    tree = PrefixTree([link(0, None), *(link(i, 0, index=1) for i in range(1, 50))])
    shown = Shown(depth=1, limit=10)
    (entry,) = shown.pick(tree.roots, 16)
    assert "children" not in entry and entry["num_children"] == 49 and entry["num_blocks_below"] == 50
    shown = Shown(depth=2, limit=10)
    (entry,) = shown.pick(tree.roots, 16)
    assert len(shown.picked) == 10 and len(entry["children"]) == 9
    assert entry["children"][0]["first_token"] == 16
