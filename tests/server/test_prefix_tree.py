from __future__ import annotations

import subprocess
import sys

from quire.server.prefix_tree import Link, PrefixTree, Shown, block_name


def link(block: int, parent: int | None, *, index: int = 0, hits: int = 0) -> Link:
    name = b"root" if parent is None else b"%04d" % parent
    return Link(block, b"%04d" % block, name, index, hits, ref_count=0, is_pinned=False)


def test_names_are_this_processs_own() -> None:
    name = block_name(b"hash")
    assert name == block_name(b"hash") != block_name(b"other") and len(name) == 16
    ask = "from quire.server.prefix_tree import block_name; print(block_name(b'hash'))"
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
