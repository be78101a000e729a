"""The prefix cache as a tree. Chains of blocks without a branch are one node, as people think of prefixes."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

_NAMING_KEY = secrets.token_bytes(16)


def block_name(block_hash: bytes) -> str:
    """What people see of a block's hash: the same while this process lives, and of no use to guess what was hashed."""
    return blake2b(block_hash, digest_size=8, key=_NAMING_KEY).hexdigest()


@dataclass(slots=True)
class Link:
    """One cached block, as the engine tells it."""

    block_id: int
    block_hash: bytes
    parent: bytes
    chain_index: int
    num_hits: int
    ref_count: int
    is_pinned: bool


@dataclass(slots=True)
class Node:
    """A run of blocks that only occur together: the first one branches off, or the one before has been evicted."""

    links: list[Link]
    children: list[Node] = field(default_factory=list)
    num_blocks_below: int = 0  # itself included
    num_hits_below: int = 0

    @property
    def name(self) -> str:
        return block_name(self.links[0].block_hash)

    @property
    def block_ids(self) -> list[int]:
        return [link.block_id for link in self.links]


class PrefixTree:
    """Nodes by name; `roots` are those whose parent is not in the cache."""

    def __init__(self, links: Iterable[Link]) -> None:
        by_hash = {link.block_hash: link for link in links}
        below: dict[bytes, list[Link]] = {}
        starts: list[Link] = []
        for link in by_hash.values():
            if link.parent in by_hash:
                below.setdefault(link.parent, []).append(link)
            else:
                starts.append(link)
        self.num_blocks = len(by_hash)
        self.nodes: dict[str, Node] = {}
        self.roots = [self._grow(start, below) for start in starts]
        self._sum_up()
        self._sort(self.roots)
        for node in self.nodes.values():
            self._sort(node.children)

    def _grow(self, start: Link, below: dict[bytes, list[Link]]) -> Node:
        """The node that begins here and all under it. A stack, not recursion: chains are thousands long."""
        root = Node([start])
        todo = [root]
        while todo:
            node = todo.pop()
            self.nodes[node.name] = node
            while len(following := below.get(node.links[-1].block_hash, [])) == 1:
                node.links.append(following[0])
            for link in following:
                node.children.append(Node([link]))
            todo.extend(node.children)
        return root

    def _sum_up(self) -> None:
        # A node enters `nodes` before its children do, so that backwards the children come first.
        for node in reversed(self.nodes.values()):
            node.num_blocks_below = len(node.links) + sum(child.num_blocks_below for child in node.children)
            node.num_hits_below = max(link.num_hits for link in node.links)
            node.num_hits_below += sum(child.num_hits_below for child in node.children)

    @staticmethod
    def _sort(nodes: list[Node]) -> None:
        """Useful ones first, then large ones; the block's number makes it certain."""
        nodes.sort(key=lambda node: (-node.num_hits_below, -node.num_blocks_below, node.links[0].block_id))


@dataclass(slots=True)
class Shown:
    """Nodes picked for one answer: as deep and as many as asked for."""

    depth: int
    limit: int
    picked: list[Node] = field(default_factory=list)

    def pick(self, nodes: list[Node], block_size: int, depth: int = 1) -> list[dict[str, Any]]:
        shown = []
        for node in nodes:
            if len(self.picked) >= self.limit:
                break
            self.picked.append(node)
            links = node.links
            entry: dict[str, Any] = {
                "node": node.name,
                "first_token": links[0].chain_index * block_size,
                "num_tokens": len(links) * block_size,
                "block_ids": node.block_ids if len(links) <= 64 else node.block_ids[:64],
                "num_blocks": len(links),
                "num_hits": max(link.num_hits for link in links),
                "num_hits_of_last_block": links[-1].num_hits,
                "num_users": links[0].ref_count,
                "num_pinned": sum(link.is_pinned for link in links),
                "num_blocks_below": node.num_blocks_below,
                "num_children": len(node.children),
            }
            shown.append(entry)
            if depth < self.depth:
                entry["children"] = self.pick(node.children, block_size, depth + 1)
        return shown
