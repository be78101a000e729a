"""Load on an OpenAI-compatible server: streamed requests at given times, and what came back when."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError, QuireError, install_hint

if TYPE_CHECKING:
    import aiohttp

REFUSED = "HTTP 429"  # the server takes no more for now


@dataclass(slots=True, frozen=True, kw_only=True)
class Target:
    """Where requests go, and how they look."""

    base_url: str
    endpoint: str = "/v1/completions"
    model: str = ""
    api_key: str | None = None
    timeout_s: float = 600.0
    body: dict[str, Any] = field(default_factory=dict)  # fields of every request: temperature, ignore_eos, …

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + "/" + self.endpoint.lstrip("/")

    @property
    def is_chat(self) -> bool:
        return self.endpoint.rstrip("/").endswith("chat/completions")

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(slots=True, frozen=True)
class ClientRequest:
    """A prompt as text or token ids, and how many tokens to ask for."""

    prompt: str | list[int]
    num_out: int


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are seconds from its sending; a failed one keeps what came before."""

    sent_s: float  # from the start of the load
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    itl_s: list[float] = field(default_factory=list)  # from chunk to chunk
    e2e_s: float | None = None
    error: str | None = None
    detail: str = ""  # what the server said
    cached_tokens: int = 0  # of the prompt, where the server says so
    text: str = ""  # of a completion


def require_aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError:
        raise ConfigError(f"quire bench serve needs aiohttp: {install_hint('bench')}") from None
    return aiohttp


async def find_model(target: Target) -> str:
    """The first model that the server lists. Raises a QuireError where nobody answers."""
    aiohttp = require_aiohttp()
    url = target.base_url.rstrip("/") + "/v1/models"
    try:
        async with (
            aiohttp.ClientSession(headers=target.headers(), timeout=aiohttp.ClientTimeout(total=10)) as session,
            session.get(url) as response,
        ):
            if target.model:
                return target.model  # somebody is there: that is all there was to know
            if response.status != 200:
                raise QuireError(f"{url} answered with status {response.status}: name the model with --model")
            listed = await response.json(content_type=None)
            return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise QuireError(
            f"no server answers at {target.base_url} ({_reason(error)}): start one, or give another --base-url"
        ) from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise QuireError(f"{url} does not list models as OpenAI's API does: name one with --model") from None


async def run_load(
    target: Target,
    requests: Sequence[ClientRequest],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    stop: asyncio.Event | None = None,
    on_sent: Callable[[Outcome], None] | None = None,
    on_done: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Send each request at its time, or as soon after as the cap on concurrency allows. Ends early when `stop` is set:
    what is under way is cancelled, and only finished outcomes are returned. `on_sent` gets an outcome that still grows.
    """
    aiohttp = require_aiohttp()
    gate = asyncio.Semaphore(max_concurrency or max(1, len(requests)))
    stop = stop or asyncio.Event()
    outcomes: list[Outcome] = []
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=target.headers()) as session:
        started = time.perf_counter()

        async def one(request: ClientRequest, due_s: float) -> None:
            await asyncio.sleep(max(0.0, started + due_s - time.perf_counter()))
            async with gate:
                outcome = await send(session, target, request, started, on_sent)
            outcomes.append(outcome)
            if on_done is not None:
                on_done(outcome)

        tasks = [asyncio.create_task(one(r, due)) for r, due in zip(requests, arrivals, strict=True)]
        everything = asyncio.gather(*tasks)
        stopped = asyncio.create_task(stop.wait())
        waited: list[asyncio.Future[Any]] = [everything, stopped]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if everything.done():
            everything.result()
        else:
            everything.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(stopped, everything, return_exceptions=True)
    return outcomes


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    request: ClientRequest,
    started: float | None = None,
    on_sent: Callable[[Outcome], None] | None = None,
) -> Outcome:
    """Send one streamed request. Failures are told in the outcome, never raised."""
    import aiohttp

    sent = time.perf_counter()
    outcome = Outcome(sent - (sent if started is None else started))
    if isinstance(request.prompt, list):
        outcome.prompt_tokens = len(request.prompt)
    if on_sent is not None:
        on_sent(outcome)
    reader = _Reader(outcome, sent, is_chat=target.is_chat)
    try:
        async with session.post(target.url, json=_body(target, request)) as response:
            if response.status != 200:
                outcome.error = f"HTTP {response.status}"
                outcome.detail = _message(await response.text())
                return outcome
            async for line in response.content:
                if reader.line(line):
                    break
        if outcome.error is None and not reader.is_complete:
            outcome.error = "the stream ended early"
    except TimeoutError:
        outcome.error = "timeout"
    except (aiohttp.ClientError, OSError) as error:
        outcome.error = _reason(error)
    except ValueError as error:
        outcome.error, outcome.detail = "not a stream of JSON", str(error)[:200]
    reader.close()
    return outcome


class _Reader:
    """Server-sent events of one answer."""

    def __init__(self, outcome: Outcome, sent: float, *, is_chat: bool) -> None:
        self._outcome, self._sent, self._is_chat = outcome, sent, is_chat
        self._last: float | None = None
        self._num_chunks = 0
        self._usage: int | None = None
        self.is_complete = False

    def line(self, line: bytes) -> bool:
        """True when there is nothing more to read."""
        if not line.startswith(b"data:"):
            return False  # comments, blank lines, event names
        data = line[5:].strip()
        if data == b"[DONE]":
            self.is_complete = True
            return True
        now, event = time.perf_counter(), json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event is not an object: {data[:80]!r}")
        if event.get("error"):
            self._outcome.error, self._outcome.detail = "error in the stream", _message(json.dumps(event))
            return True
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage = usage.get("completion_tokens")
            self._outcome.prompt_tokens = usage.get("prompt_tokens") or self._outcome.prompt_tokens
            self._outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        choices = event.get("choices")
        if choices and self._has_token(choices[0]):
            self._num_chunks += 1
            self._outcome.text += choices[0].get("text") or ""
            if self._last is None:
                self._outcome.ttft_s = now - self._sent
            else:
                self._outcome.itl_s.append(now - self._last)
            self._last = now
        return False

    def _has_token(self, choice: Any) -> bool:
        """A chat's first chunk may bring the role alone, before any token; it must not pass for one."""
        if not self._is_chat:
            return True
        delta = choice.get("delta") or {}
        return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))

    def close(self) -> None:
        # A chunk is a token where the server does not count them itself.
        self._outcome.output_tokens = self._num_chunks if self._usage is None else self._usage
        if self._last is not None and self._outcome.error is None:
            self._outcome.e2e_s = self._last - self._sent


def _body(target: Target, request: ClientRequest) -> dict[str, Any]:
    body: dict[str, Any] = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}}
    if target.is_chat:
        assert isinstance(request.prompt, str), "a chat is text"
        body |= {"messages": [{"role": "user", "content": request.prompt}], "max_completion_tokens": request.num_out}
    else:
        body |= {"prompt": request.prompt, "max_tokens": request.num_out}
    return body | target.body


def _message(text: str) -> str:
    """The words of an error body, whatever form it has."""
    try:
        record = json.loads(text)
        error = record.get("error", record)
        said = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        said = text
    return " ".join(str(said).split())[:200]


def _reason(error: BaseException) -> str:
    """A short name that many failures can be counted under."""
    names = {
        "ClientConnectorError": "connection refused",
        "ClientConnectorDNSError": "unknown host",
        "ServerDisconnectedError": "disconnected",
        "ClientPayloadError": "disconnected in the stream",
        "ConnectionResetError": "connection reset",
        "ClientOSError": "connection reset",
        "InvalidURL": "not an address",
        "TimeoutError": "timeout",
        "ServerTimeoutError": "timeout",
        "ConnectionTimeoutError": "timeout",
    }
    return names.get(type(error).__name__, type(error).__name__)


# -- where the server is: --base-url, or --host and --port as vLLM's users write them

_HOST, _PORT = "127.0.0.1", 8000


def add_address_flags(parser: argparse.ArgumentParser) -> None:
    # No default: given or not is what tells whether --host may be.
    parser.add_argument("--base-url", metavar="URL", help=f"default http://{_HOST}:{_PORT}; /v1 at its end is fine")
    parser.add_argument("--host", metavar="H", help=f"with --port instead of --base-url (default {_HOST})")
    parser.add_argument("--port", type=int, metavar="P", help=f"with --host instead of --base-url (default {_PORT})")


def server_address(base_url: str | None, host: str | None, port: int | None) -> str:
    """The address without /v1, which every path begins with."""
    if base_url is None:
        return _from_host(host or _HOST, _PORT if port is None else port)
    if host is not None or port is not None:
        raise ConfigError(f"--base-url {base_url} already says which server: leave --host and --port out")
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url must start with http:// or https://, got {base_url!r}")
    # OpenAI's clients want /v1 in their base URL, so it is often given here too.
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def _from_host(host: str, port: int) -> str:
    if "/" in host:
        raise ConfigError(f"--host must be a name or an address, got {host!r}: give a whole URL as --base-url")
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port must be from 1 to 65535, got {port}")
    is_bare_ipv6 = ":" in host and not host.startswith("[")
    return f"http://[{host}]:{port}" if is_bare_ipv6 else f"http://{host}:{port}"
