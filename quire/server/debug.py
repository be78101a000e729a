"""`/debug/kv`: the KV cache as JSON, for people with a question. `_PATHS` says what is where.

Where keys have several names, each sees its own requests, and an admin's key all of them. Text is shown only to the key
whose running request holds it: a prompt belongs to its sender.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import wraps
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.engine.api import ServingEngine
from quire.errors import BadRequestError
from quire.server.endpoint import json_response
from quire.server.errors import RETRY_SOON, ApiError, bad_request

if TYPE_CHECKING:
    from quire.server.context import ServedModel, ServerContext
    from quire.server.paths import Handler

_PATHS = {
    "/debug/kv?full=1": "the first page of everything below",
    "/debug/kv/map?first=&limit=": "every block: state, users, hits",
    "/debug/kv/requests?offset=&limit=": "block tables, and why each request hit or missed",
    "/debug/kv/sharing?limit=": "which blocks which requests share",
    "/debug/kv/tree?node=&depth=&offset=&limit=": "cached prefixes with their hit counts",
    "/debug/kv/levels": "the levels below the device; POST to warm, pin, unpin or expire a prompt",
    "/debug/kv/blocks/{block}": "one block: who uses it, what text it holds",
}
_PIECE_BLOCKS = 4_096  # blocks that one question to the engine covers
_MAX_BLOCKS = 1 << 17  # blocks in one answer
_MAX_REQUESTS = 1_024
_MAX_NODES = 1_000
_TEXT_BLOCKS = 4  # blocks whose text is shown for a tree's node
_TEXT_CHARS = 400
ANSWER_S = 2.0  # for the engine to answer one question, between two steps


class KVDebug:
    """Answers for one engine. The parameter `engine` chooses among several replicas."""

    def __init__(self, context: ServerContext, served: ServedModel, engine: ServingEngine) -> None:
        self._served = served
        self._engine = engine
        self._has_tenants = len(context.settings.tenants) > 1

    async def index(self, request: HttpRequest) -> Response:
        """The KV cache in numbers, and where the rest is."""
        asked = _numbers(request, full=(0, 0, 1))
        overview = await self._ask("kv_overview")
        if not asked["full"]:
            return _json({"overview": overview, "more": _PATHS})
        blocks = await self._map(0, 1_024)
        tables = await self._ask("kv_tables", offset=0, limit=32, tenant=_sees(request))
        tree = await self._tree(request, None, depth=2, offset=0, limit=32)
        return _json(
            {
                "overview": overview,
                "map": blocks,
                "requests": self._with_recent(request, tables),
                "sharing": _sharing(tables["sequences"]),
                "tree": tree,
            }
        )

    async def block_map(self, request: HttpRequest) -> Response:
        """Every block: its state, users and hits."""
        return _json(await self._map(**_numbers(request, first=(0, 0, None), limit=(_PIECE_BLOCKS, 1, _MAX_BLOCKS))))

    async def requests(self, request: HttpRequest) -> Response:
        """Block tables, and why each request hit or missed."""
        asked = _numbers(request, offset=(0, 0, None), limit=(128, 1, _MAX_REQUESTS))
        tables = await self._ask("kv_tables", **asked, tenant=_sees(request))
        return _json(self._with_recent(request, tables))

    async def sharing(self, request: HttpRequest) -> Response:
        """Which blocks which requests share."""
        asked = _numbers(request, limit=(256, 1, _MAX_REQUESTS))
        tables = await self._ask("kv_tables", offset=0, **asked, tenant=_sees(request))
        return _json(_sharing(tables["sequences"]) | {"num_requests_in_all": tables["num_requests_in_all"]})

    async def tree(self, request: HttpRequest) -> Response:
        """Cached prefixes with their hit counts."""
        asked = _numbers(request, ("node",), depth=(4, 1, 16), offset=(0, 0, None), limit=(100, 1, _MAX_NODES))
        return _json(await self._tree(request, request.query_params.get("node"), **asked))

    async def block(self, request: HttpRequest) -> Response:
        """One block: who uses it, and what text it holds."""
        _numbers(request)
        block_id = _whole_number(request.path_params["block"], "block")
        try:
            found = await self._ask("kv_block", block_id=block_id)
        except BadRequestError as error:
            raise ApiError(404, str(error), param=error.param, code="no_block") from None
        token_ids: list[int] = found.pop("token_ids")
        may_read = self._may_read(request, {user["tenant"] for user in found["users"]})
        found["users"] = _seen(request, found["users"])
        for name in ("hash", "parent"):
            found[name] = None if found[name] is None else block_name(found[name])
        found |= {"num_tokens": len(token_ids), "is_readable": may_read}
        found["token_ids"] = token_ids if may_read else None
        found["tokens"] = self._pieces(token_ids) if may_read else None
        found["text"] = self._decode(token_ids) if may_read else None
        return _json(found)

    # -- inside

    async def _ask(self, name: str, **arguments: Any) -> Any:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._engine.call(name, **arguments)
        except TimeoutError:
            raise ApiError(
                503,
                f"the engine has not answered for {ANSWER_S:g} s: a step takes long, or hangs. /health says which",
                code="engine_busy",
                headers=RETRY_SOON,
            ) from None

    def _may_read(self, request: HttpRequest, tenants: set[str]) -> bool:
        """Whether the caller may read a block's text. tenants: those of the requests that hold the block now; a block
        that only the cache holds has no owner."""
        return not self._has_tenants or request.scope["state"]["tenant"] in tenants

    def _decode(self, token_ids: list[int]) -> str | None:
        tokenizer = self._engine.tokenizer
        return None if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=False)

    def _pieces(self, token_ids: list[int]) -> list[str] | None:
        """Each token's own text; where it is part of a character, its bytes."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            return None
        pieces = []
        for token_id in token_ids:
            data = tokenizer.token_bytes(token_id)
            try:
                pieces.append(data.decode())
            except UnicodeDecodeError:
                pieces.append("".join(f"\\x{byte:02x}" for byte in data))
        return pieces

    async def _map(self, first: int, limit: int) -> dict[str, Any]:
        """Ask for the map in pieces, between which the engine can step, and join them."""
        num_blocks = self._engine.info.num_blocks
        end = min(num_blocks, first + limit)
        found: dict[str, Any] = {"first": first, "num_blocks": num_blocks, "next": end if end < num_blocks else None}
        while True:
            piece = await self._ask("kv_map", first=first, limit=max(1, min(end - first, _PIECE_BLOCKS)))
            del piece["first"]
            piece["hashes"] = [None if one is None else block_name(one) for one in piece["hashes"]]
            for name, column in piece.items():
                found.setdefault(name, []).extend(column)
            first += _PIECE_BLOCKS
            if first >= end:
                return found

    def _with_recent(self, request: HttpRequest, tables: dict[str, Any]) -> dict[str, Any]:
        finished = [asdict(summary) for summary in reversed(self._served.metrics.recent)]
        return tables | {"sequences": _seen(request, tables["sequences"]), "finished": _seen(request, finished)}

    async def _tree(
        self, request: HttpRequest, name: str | None, *, depth: int, offset: int, limit: int
    ) -> dict[str, Any]:
        links: list[Link] = []
        first, num_blocks = 0, min(self._engine.info.num_blocks, _MAX_BLOCKS)
        while first < num_blocks:
            piece = await self._ask("kv_tree", first=first, limit=_PIECE_BLOCKS)
            first = piece.pop("end")
            links += map(Link, *piece.values())
        tree = await asyncio.to_thread(PrefixTree, links)
        if name is not None and name not in tree.nodes:
            raise ApiError(404, "the cache has no such node: it may have been evicted", param="node", code="no_node")
        under = tree.roots if name is None else tree.nodes[name].children
        shown = Shown(depth, limit)
        nodes = shown.pick(under[offset:], self._engine.info.block_size)
        if self._may_read(request, set()):
            await self._add_text(shown.picked)
        following = offset + len(nodes)
        return {
            "num_cached_blocks": tree.num_blocks,
            "num_nodes": len(tree.nodes),
            "num_siblings": len(under),
            "nodes": nodes,
            "next": following if following < len(under) else None,
        }

    async def _add_text(self, picked: list[tuple[Node, dict[str, Any]]]) -> None:
        """Add the text that each node begins with to its entry."""
        for first in range(0, len(picked), 64):
            some = [(node.block_ids[:_TEXT_BLOCKS], entry) for node, entry in picked[first : first + 64]]
            block_ids = [block_id for held, _ in some for block_id in held]
            tokens = iter(await self._ask("kv_tokens", block_ids=block_ids))
            for held, entry in some:
                text = self._decode([token for _ in held for token in next(tokens)])
                entry["text"] = None if text is None else text[:_TEXT_CHARS]


def _sees(request: HttpRequest) -> str | None:
    """The tenant whose requests the caller may see; None: every tenant."""
    sees: str | None = request.scope["state"]["sees"]
    return sees


def _seen(request: HttpRequest, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The requests that the asker may see, without their tenants' names."""
    sees = _sees(request)
    return [entry for entry in entries if entry.pop("tenant") == sees or sees is None]


def _sharing(sequences: list[dict[str, Any]]) -> dict[str, Any]:
    """Blocks by the set of sequences that hold them, the most shared first."""
    holders: dict[int, list[int]] = {}
    for number, entry in enumerate(sequences):
        runs = entry.get("blocks", [])
        for first, count in zip(runs[::2], runs[1::2], strict=True):
            for block_id in range(first, first + count):
                holders.setdefault(block_id, []).append(number)
    groups: dict[tuple[int, ...], list[int]] = {}
    for block_id, numbers in holders.items():
        if len(numbers) > 1:
            groups.setdefault(tuple(numbers), []).append(block_id)
    shared = sorted(groups.items(), key=lambda item: (-len(item[0]) * len(item[1]), item[1][0]))
    return {
        "num_shared_blocks": sum(map(len, groups.values())),
        "num_blocks_saved": sum((len(numbers) - 1) * len(block_ids) for numbers, block_ids in groups.items()),
        "groups": [
            {
                "sequences": [[sequences[n]["request_id"], sequences[n]["index"]] for n in numbers],
                "block_ids": block_ids,
            }
            for numbers, block_ids in shared
        ],
    }


def _numbers(
    request: HttpRequest, texts: tuple[str, ...] = (), **numbers: tuple[int, int, int | None]
) -> dict[str, int]:
    """The query's numbers, each given here with its default, its least and its most. An unknown parameter, or one that
    is given twice, is refused like a wrong one. texts: other parameters that there may be."""
    known = [*numbers, *texts, "engine", "model"]
    found = {name: default for name, (default, _, _) in numbers.items()}
    for name, text in request.query_params.multi_items():
        if name not in known:
            hint = f"it has {', '.join(known)}"
            raise bad_request(f"{request.url.path} has no parameter {name}: {hint}", param=name, code="unknown_field")
        if len(request.query_params.getlist(name)) > 1:
            raise bad_request(f"{name} is given twice", param=name)
        if name in numbers:
            found[name] = _whole_number(text, name, *numbers[name][1:])
    return found


def _whole_number(text: str, name: str, least: int = 0, most: int | None = None) -> int:
    # Length first: Python takes long over very long numbers.
    if len(text) <= 12 and text.isascii() and text.isdigit():
        number = int(text)
        if number >= least and (most is None or number <= most):
            return number
    limit = f"between {least} and {most}" if most is not None else f">= {least}"
    raise bad_request(f"{name} must be a whole number {limit}", param=name, code="invalid_value")


def _json(body: dict[str, Any]) -> Response:
    return json_response(body, cache_control="no-store")


def answers(handler: Callable[[KVDebug, HttpRequest], Awaitable[Response]]) -> Handler:
    """A method of KVDebug as the handler of a path, for the model and engine that a request names."""

    @wraps(handler)
    async def answer(context: ServerContext, request: HttpRequest) -> Response:
        served = context.choose(request)
        _, engine = served.find_engine(request.query_params.get("engine"))
        return await handler(KVDebug(context, served, engine), request)

    return answer


_NAMING_KEY = secrets.token_bytes(16)


def block_name(block_hash: bytes) -> str:
    """A block's name for people: the same while this process lives, and no help in guessing the hashed tokens."""
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
    picked: list[tuple[Node, dict[str, Any]]] = field(default_factory=list)  # with their entries

    def pick(self, nodes: list[Node], block_size: int, depth: int = 1) -> list[dict[str, Any]]:
        shown = []
        for node in nodes:
            if len(self.picked) >= self.limit:
                break
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
            self.picked.append((node, entry))
            if depth < self.depth:
                entry["children"] = self.pick(node.children, block_size, depth + 1)
        return shown
