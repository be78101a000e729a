"""Servers that run already, as a router sees them: which are up, what they serve, and what their caches hold.

A Quire server tells the hashes of its cached blocks (`/debug/cache`), so what it holds is known exactly. Of any other
server with OpenAI's API it is guessed from what was routed there before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from quire.errors import ConfigError
from quire.kv.hashing import HASH_BYTES
from quire.log import get_logger
from quire.router.alternatives import FIRST_TOKEN, new_router
from quire.router.hashes import CHARS_PER_TOKEN, KnownTexts, piece_ends, text_of, text_pieces
from quire.router.http_client import HttpClient
from quire.router.policy import CacheChanges, Prompt, ReplicaLoad, Ticket

LOOK_S = 0.5  # between two looks at a server's cache and health
_SLOW_LOOK_S = 1.0  # at one that tells nothing, or is down
_ANSWER_S = 5.0
_HASH_S = 2.0
_MIN_ASKED_BLOCKS = 4  # a shorter end that nobody knows is not worth a question
_ASKED_SHARE = 1 / 3  # of a prompt, likewise: an answer has a server tokenize all of it once more
_BLOCK_SIZE = 16  # of guesses, until a Quire server says which
_MAX_ANSWER_BYTES = 64 << 20
_TOKENIZED = (
    *("prompt", "messages", "add_special_tokens", "add_generation_prompt", "continue_final_message"),
    *("chat_template_kwargs", "cache_salt"),
)


@dataclass(slots=True, eq=False)
class Upstream:
    """One server."""

    url: str
    is_up: bool = False
    is_exact: bool = False  # it tells what it has cached
    models: tuple[str, ...] = ()
    reason: str = "it was not reached yet"  # why it is not up
    since: str | None = None  # up to where its cache is known
    num_failures: int = 0


@dataclass(slots=True, frozen=True)
class Question:
    """Which blocks does this prompt make?"""

    body: Mapping[str, Any]
    authorization: str | None
    text: str
    pieces: Sequence[bytes]
    num_known: int  # of the pieces


class Servers:
    """Follows every server, and keeps the router's books about them. Belongs to one event loop."""

    def __init__(self, urls: Sequence[str], *, api_key: str | None = None, policy: str = FIRST_TOKEN) -> None:
        if not urls:
            raise ConfigError("a router needs servers: quire router http://a:8000 http://b:8000")
        self.all = {url: Upstream(url) for url in map(_checked, urls)}
        if len(self.all) < len(urls):
            raise ConfigError("the same server is given twice")
        self.router = new_router(policy, _BLOCK_SIZE)
        self._follows_caches = policy == FIRST_TOKEN
        self.models: tuple[str, ...] = ()  # of the first server that answered; the others must serve the same
        self._fingerprints: dict[str, str] = {}  # by model, of servers that tell them
        self._headers = [(b"authorization", f"Bearer {api_key}".encode())] if api_key else []
        self._tasks: list[asyncio.Task[None]] = []
        self._meeting = asyncio.Lock()
        self._known = KnownTexts()
        self._asked: dict[bytes, asyncio.Task[None]] = {}  # by the first piece of a text that is not known

    async def start(self) -> None:
        self.http = HttpClient()
        await self.start_following()

    async def close(self) -> None:
        await self.stop_following()
        await self.http.close()

    async def start_following(self) -> None:
        """Wait until every server was looked at once; from then on they are followed in the background."""
        first_looks = [asyncio.Event() for _ in self.all]
        self._tasks = [
            asyncio.create_task(self._follow(upstream, seen))
            for upstream, seen in zip(self.all.values(), first_looks, strict=True)
        ]
        for seen in first_looks:
            await seen.wait()

    async def stop_following(self) -> None:
        tasks = [*self._tasks, *self._asked.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_up(self) -> int:
        return sum(upstream.is_up for upstream in self.all.values())

    def mark_down(self, url: str, reason: str) -> None:
        """A request found it out; the next look that succeeds brings it back."""
        upstream = self.all[url]
        upstream.reason = reason
        upstream.num_failures += 1
        upstream.since = None
        if upstream.is_up:
            upstream.is_up = False
            self.router.remove(url)
            get_logger().warning("server %s is left out: %s", url, reason)

    # -- what a request is to a router

    def prompt_of(self, body: Mapping[str, Any], authorization: str | None) -> tuple[Prompt, Question | None]:
        """The prompt with the hashes of its blocks as far as they are known, and what there is left to `learn`.

        Nobody waits for a server to say them: until then it counts where texts that begin alike were routed.
        """
        text, tenant = text_of(body), authorization or ""
        pieces = text_pieces(text, tenant)
        num_known, hashes = self._known.find(pieces)
        tokens_per_char = self._known.tokens_per_char or 1 / CHARS_PER_TOKEN
        num_tokens = max(1, int(len(text) * tokens_per_char))
        ends = [int(end * tokens_per_char) for end in piece_ends(len(text))]
        prompt = Prompt(num_tokens, hashes, tenant, _num_sequences(body), pieces, ends)
        # What nobody was sent before may never come again, and where it does, the text itself says where it went. The
        # very first text is asked about all the same: it tells how many tokens characters make, which may be one each.
        is_first = self._known.tokens_per_char is None
        num_sent = len(text) if is_first else self.router.num_sent_tokens(prompt)
        num_unknown = num_sent - len(hashes) * self.router.block_size
        if (
            num_known == len(pieces)
            or num_unknown < max(_MIN_ASKED_BLOCKS * self.router.block_size, _ASKED_SHARE * num_tokens)
            or pieces[num_known] in self._asked
            or not any(one.is_up and one.is_exact for one in self.all.values())
        ):
            return prompt, None
        return prompt, Question(body, authorization, text, pieces, num_known)

    def learn(self, question: Question, ticket: Ticket) -> None:
        """Ask a server, beside the request itself, which blocks the prompt makes; they will be where the ticket is."""
        task = asyncio.create_task(self._learn(question, ticket))
        first_unknown = question.pieces[question.num_known]
        self._asked[first_unknown] = task
        task.add_done_callback(lambda _: self._asked.pop(first_unknown, None))

    async def _learn(self, question: Question, ticket: Ticket) -> None:
        exact = [one for one in self.all.values() if one.is_up and one.is_exact]
        if not exact:
            return
        upstream = next((one for one in exact if one.url == ticket.replica), exact[0])
        with contextlib.suppress(OSError, KeyError, ValueError):
            num_tokens, hashes = await self._ask_hashes(upstream, question)
            self._known.learn(question.pieces, question.text, num_tokens, hashes, self.router.block_size)
            self.router.on_hashes(ticket, num_tokens, hashes)

    async def _ask_hashes(self, upstream: Upstream, question: Question) -> tuple[int, list[bytes]]:
        fields = {name: question.body[name] for name in _TOKENIZED if question.body.get(name) is not None}
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
            fields = {"token_ids": prompt} | {k: v for k, v in fields.items() if k == "cache_salt"}
        elif isinstance(prompt, list):
            fields["prompt"] = str(prompt[0]) if prompt else ""  # several prompts go together: the first decides
        headers = [(b"content-type", b"application/json")]
        if question.authorization is not None:
            headers.append((b"authorization", question.authorization.encode("latin-1")))
        async with asyncio.timeout(_HASH_S):
            body = json.dumps(fields).encode()
            reply = await self.http.ask("POST", upstream.url, b"/debug/cache/hashes", headers, body)
            with contextlib.closing(reply):
                data = await reply.read(_MAX_ANSWER_BYTES)
        if reply.status != 200:
            raise ValueError(f"status {reply.status}")
        found = json.loads(data)
        return max(1, int(found["num_tokens"])), [bytes.fromhex(one) for one in found["hashes"]]

    # -- looking at one

    async def _follow(self, upstream: Upstream, seen: asyncio.Event) -> None:
        while True:
            try:
                await self._look(upstream)
            except (OSError, ValueError, KeyError, TypeError) as error:
                self.mark_down(upstream.url, _words(error))
            except _OtherModelError as error:
                self.mark_down(upstream.url, str(error))
            finally:
                seen.set()
            await asyncio.sleep(LOOK_S if upstream.is_exact and upstream.is_up else _SLOW_LOOK_S)

    async def _look(self, upstream: Upstream) -> None:
        if not upstream.is_up:
            async with self._meeting:  # one after another: each is compared with those that are up
                await self._meet(upstream)
        elif not upstream.is_exact:
            status, _ = await self._get(upstream, "/health")
            if status not in (200, 404):
                raise ValueError(f"/health says {status}")
            if status == 404:
                await self._read_models(upstream)
        else:
            num_begun_tokens = self.router.replicas[upstream.url].num_begun_tokens
            status, found = await self._get(upstream, f"/debug/cache?since={upstream.since}")
            if status != 200:
                raise ValueError(f"/debug/cache says {status}")
            self._take(upstream, found, num_begun_tokens)

    async def _meet(self, upstream: Upstream) -> None:
        status, _ = await self._get(upstream, "/health")
        if status not in (200, 404):
            raise ValueError(f"/health says {status}")
        await self._read_models(upstream)
        found: Any
        status, found = await self._get(upstream, "/debug/cache") if self._follows_caches else (404, None)
        upstream.is_exact = status == 200
        self.router.add(
            upstream.url,
            is_exact=upstream.is_exact,
            max_num_seqs=int(found["max_num_seqs"]) if upstream.is_exact else None,
        )
        upstream.is_up, upstream.reason = True, ""
        if upstream.is_exact:
            if found["block_size"] != self.router.block_size:
                others = [one for one in self.all.values() if one.is_up and one.is_exact and one is not upstream]
                if others:
                    raise _OtherModelError(
                        f"its blocks have {found['block_size']} tokens and those of {others[0].url} "
                        f"{self.router.block_size}: start them with one --block-size"
                    )
                self.router.block_size = int(found["block_size"])
            self._take(upstream, found)
        cache = f", with {'its exact' if upstream.is_exact else 'a guessed'} cache" if self._follows_caches else ""
        get_logger().info("server %s is up%s", upstream.url, cache)

    async def _read_models(self, upstream: Upstream) -> None:
        status, found = await self._get(upstream, "/v1/models")
        if status != 200:
            hint = ": give the router a key with --api-key" if status in (401, 403) else ""
            raise ValueError(f"/v1/models says {status}{hint}")
        upstream.models = tuple(sorted(str(one["id"]) for one in found["data"]))
        others = [one for one in self.all.values() if one.is_up and one is not upstream]
        if others and upstream.models != self.models:
            raise _OtherModelError(
                f"it serves {', '.join(upstream.models)} and {others[0].url} serves {', '.join(self.models)}: servers "
                "behind one router serve the same models, under the same names (--served-model-name)"
            )
        told = {str(one["id"]): str(one["fingerprint"]) for one in found["data"] if one.get("fingerprint")}
        known = self._fingerprints if others else {}
        for name in told.keys() & known.keys():
            if told[name] != known[name]:
                raise _OtherModelError(
                    f"its {name} is another model than that of {others[0].url}: their configs or tensors differ "
                    f"(fingerprints {told[name]} and {known[name]}); serve it under another name behind another router"
                )
        self.models, self._fingerprints = upstream.models, told | known

    def _take(self, upstream: Upstream, found: Mapping[str, Any], num_begun_tokens: int = 0) -> None:
        changes = CacheChanges(
            filled=_split(found["filled"]), evicted=_split(found["evicted"]), is_snapshot=bool(found["is_snapshot"])
        )
        upstream.since = str(found["since"])
        self.router.on_cache(upstream.url, changes)
        self.router.on_load(
            upstream.url,
            ReplicaLoad(
                num_queued_tokens=int(found["num_queued_tokens"]),
                num_running=int(found["num_running"]),
                prefill_tokens_per_s=found["prefill_tokens_per_s"],
                step_s=found["step_s"],
            ),
            num_begun_tokens=num_begun_tokens,
        )

    async def _get(self, upstream: Upstream, path: str) -> tuple[int, Any]:
        async with asyncio.timeout(_ANSWER_S):
            reply = await self.http.ask("GET", upstream.url, path.encode(), self._headers)
            with contextlib.closing(reply):
                data = await reply.read(_MAX_ANSWER_BYTES)
        is_told = reply.status == 200 and reply.content_type == b"application/json"
        return reply.status, json.loads(data) if is_told else None


class _OtherModelError(Exception):
    """A server has another model than the others."""


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.path not in ("", "/")
        or parts.query
        or "@" in url
    ):
        raise ConfigError(f"a server is given as http://host:port, got {url!r}")
    return f"{parts.scheme}://{parts.netloc}"


def _split(text: str) -> list[bytes]:
    data = bytes.fromhex(text)
    return [data[first : first + HASH_BYTES] for first in range(0, len(data), HASH_BYTES)]


def _num_sequences(body: Mapping[str, Any]) -> int:
    n, prompt = body.get("n"), body.get("prompt")
    num_prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return num_prompts * (n if isinstance(n, int) and 1 <= n <= 1024 else 1)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
