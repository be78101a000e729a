"""Routing against its alternatives: the same servers, the same traffic, one way of choosing after another.

Servers of a small model with random weights run on this machine, each with a KV cache that holds a part of what the
traffic would like to have cached. In front of them stand in turn: `quire router` with its own policy and with each of
the simpler ones (`router/alternatives.py`); and, where its Python is given, sglang-router, a peer's program. Every run
has prompts of its own. `sim/router_bench.py` has the same with simulated servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.bench.charts import Chart, bar_chart
from quire.bench.client import ClientRequest, Target, send
from quire.bench.report import Percentiles
from quire.bench.units import table
from quire.errors import ConfigError, QuireError, install_hint
from quire.router.alternatives import ALTERNATIVES, FIRST_TOKEN, POLICIES

TRAFFICS = ("prefix", "turns", "skewed", "bursty", "unshared")
OURS, PEER = "quire router", "sglang-router"
BLOCK_SIZE = 16
NUM_BLOCKS = 112  # of each server's cache: about five of sixteen prefixes beside what runs
MAX_LEN = 352
MAX_NUM_SEQS = 16
_READY_S = 300.0
# Sizes of the servers' model: 15 million parameters, so that two cores suffice for four servers, or SmolLM2's 135
# million, whose requests cost so much more that what a router takes of the cores hardly counts.
MODEL_SIZES: dict[str, dict[str, int]] = {
    "15m": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
}
_BURST_EVERY_S = {"15m": 1.5, "135m": 9.0}  # about half as fast as round robin works a burst off
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "num_key_value_heads": 3,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}

# -- traffic


@dataclass(slots=True)
class Session:
    """Requests of one client, each after the answer to the one before and with all of it as its beginning."""

    turns: list[str]
    at_s: float = 0.0  # not before


def make_traffic(kind: str, scale: float, seed: int, model_size: str = "15m") -> list[Session]:
    """`scale`: 1 is about a hundred requests."""
    rng = random.Random(f"{kind} {seed}")

    def text(length: int) -> str:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=length))

    if kind == "turns":
        # Conversations outgrow a cache together, and each grows.
        return [Session([text(112), *(text(40) for _ in range(4))]) for _ in range(max(4, int(16 * scale)))]
    num = max(8, int(112 * scale))
    if kind == "unshared":
        return [Session([text(216)]) for _ in range(num)]
    prefixes = [text(192) for _ in range(16)]
    if kind == "prefix":
        return [Session([rng.choice(prefixes) + text(24)]) for _ in range(num)]
    if kind == "skewed":
        weights = [1 / (rank + 1) ** 1.2 for rank in range(len(prefixes))]
        return [Session([rng.choices(prefixes, weights)[0] + text(24)]) for _ in range(num)]
    if kind == "bursty":
        found = []
        for nth, burst in enumerate(_batches(num, 14)):
            few = rng.sample(prefixes, 4)
            found += [Session([rng.choice(few) + text(24)], at_s=_BURST_EVERY_S[model_size] * nth) for _ in burst]
        return found
    raise ConfigError(f"--traffic must be some of {', '.join(TRAFFICS)}, got {kind}")


def trace_rows(kind: str, num: int, seed: int = 0) -> list[dict[str, Any]]:
    """The same kinds at a GPU's size, for `quire sim --trace`: prefixes of 4,096 tokens, 64 of them, 24 requests/s, or,
    as a "flood", all at once."""
    rng = random.Random(f"{kind} {seed}")
    weights = [1 / (rank + 1) ** 1.2 if kind == "skewed" else 1.0 for rank in range(64)]
    rows, now_s = [], 0.0
    for nth in range(num):
        if kind in ("prefix", "skewed"):
            now_s += rng.expovariate(24.0)
        elif kind == "bursty" and nth % 100 == 0 and nth:
            now_s += 100 / 24.0  # a hundred come at once, as many as otherwise in four seconds
        prefix = rng.choices(range(64), weights)[0]
        row = {"arrival": round(now_s, 4), "prompt_len": 4096 + rng.randrange(32, 256), "output_len": 64}
        rows.append(row | {"prefix_id": f"p{prefix}", "prefix_len": 4096})
    return rows


def _batches(num: int, size: int) -> Iterator[range]:
    return (range(first, min(first + size, num)) for first in range(0, num, size))


# -- one run


@dataclass(slots=True)
class FrontRun:
    """What one way of routing made of one kind of traffic."""

    traffic: str
    front: str
    seconds: float = 0.0
    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    num_failed: int = 0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def tokens_per_s(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds

    def ttft_s(self, name: str) -> float:
        found = Percentiles.of(self.first_token_s)
        return 0.0 if found is None else float(getattr(found, name))


class Client:
    """Sends a traffic through one front, so many requests at once."""

    def __init__(self, session: Any, model: str, concurrency: int, num_out: int) -> None:
        self._session = session
        self._model = model
        self._places = asyncio.Semaphore(concurrency)
        self._num_out = num_out

    async def run(self, traffic: str, front: str, sessions: list[Session], url: str) -> FrontRun:
        run = FrontRun(traffic, front)
        started_s = time.perf_counter()
        await asyncio.gather(*(self._talk(one, url, run, started_s) for one in sessions))
        run.seconds = time.perf_counter() - started_s
        return run

    async def _talk(self, session: Session, url: str, run: FrontRun, started_s: float) -> None:
        await asyncio.sleep(max(0.0, started_s + session.at_s - time.perf_counter()))
        said = ""
        for turn in session.turns:
            said += turn
            async with self._places:
                said += await self._ask(url, said, run)

    async def _ask(self, url: str, prompt: str, run: FrontRun) -> str:
        run.num_requests += 1
        target = Target(base_url=url, model=self._model, body={"ignore_eos": True, "temperature": 0.0})
        request = ClientRequest(prompt, self._num_out)
        outcome = await send(self._session, target, request)
        if outcome.error is not None or outcome.ttft_s is None:
            run.num_failed += 1
        else:
            run.first_token_s.append(outcome.ttft_s)
            run.prompt_tokens += outcome.prompt_tokens
            run.output_tokens += outcome.output_tokens
            run.cached_tokens += outcome.cached_tokens
        return outcome.text.encode("ascii", "replace").decode()  # one token a character, as the prompts are


# -- processes


def write_model(folder: Path, size: str = "15m") -> Path:
    """A model directory with random weights to be, and a tokenizer of one token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    (folder / "config.json").write_text(json.dumps(_CONFIG | MODEL_SIZES[size]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


class Processes:
    """Programs that are started at once, waited for one by one, and ended together."""

    def __init__(self, session: Any, folder: Path) -> None:
        self._session = session
        self._folder = folder
        self._children: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}  # by address

    def start(self, url: str, *command: str) -> subprocess.Popen[bytes]:
        log = self._folder / f"{len(self._children)}.log"
        with log.open("wb") as out:
            child = subprocess.Popen(command, stdout=out, stderr=out)
        self._children[url] = child, log
        return child

    async def ready(self, url: str) -> None:
        """Wait until /health says 200."""
        child, log = self._children[url]
        until_s = time.monotonic() + _READY_S
        while not await _is_well(self._session, url):
            if child.poll() is not None or time.monotonic() > until_s:
                raise QuireError(f"the program at {url} does not answer: {log.read_text()[-2000:]}")
            await asyncio.sleep(0.1)

    def end(self) -> None:
        for child, _ in self._children.values():
            child.send_signal(signal.SIGTERM)
        for child, _ in self._children.values():
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


async def _is_well(session: Any, url: str) -> bool:
    import aiohttp

    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=2)) as response:
            return bool(response.status == 200)
    return False


def serve_command(model: Path, url: str, *, num_blocks: int = NUM_BLOCKS, log_level: str = "error") -> list[str]:
    """Starts a server of the small model, under the name `bench`."""
    flags = ["--load-format", "dummy", "--num-gpu-blocks-override", str(num_blocks), "--device", "cpu"]
    flags += ["--max-model-len", str(MAX_LEN), "--num-threads", "1", "--max-num-seqs", str(MAX_NUM_SEQS)]
    flags += ["--served-model-name", "bench", "--port", url.rsplit(":", 1)[1], "--log-level", log_level]
    return [sys.executable, "-P", "-m", "quire", "serve", str(model), *flags]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def measure(
    *,
    num_servers: int,
    traffics: Sequence[str],
    repeats: int,
    scale: float,
    concurrency: int,
    num_out: int,
    model_size: str,
    peer_python: str | None,
    tell: Callable[[str], None],
) -> list[FrontRun]:
    """Every front on every traffic, `repeats` times in turn."""
    try:
        import aiohttp
    except ImportError:
        raise ConfigError(f"quire bench router needs the package aiohttp: {install_hint('bench')}") from None
    for kind in traffics:
        make_traffic(kind, scale, 0)  # a wrong name is told before anything starts
    found: list[FrontRun] = []
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-")))
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))
        model = write_model(folder, model_size)
        urls = [f"http://127.0.0.1:{free_port()}" for _ in range(num_servers)]
        tell(f"starting {num_servers} servers")
        processes = Processes(session, folder)
        stack.callback(processes.end)
        for url in urls:
            processes.start(url, *serve_command(model, url))
        for url in urls:
            await processes.ready(url)
        fronts: dict[str, str] = {}
        for policy in POLICIES:
            fronts[OURS if policy == FIRST_TOKEN else policy] = url = f"http://127.0.0.1:{free_port()}"
            flags = ["--port", url.rsplit(":", 1)[1], "--policy", policy, "--log-level", "error"]
            processes.start(url, sys.executable, "-P", "-m", "quire", "router", *urls, *flags)
        if peer_python is not None:
            fronts[PEER] = url = f"http://127.0.0.1:{free_port()}"
            flags = ["--policy", "cache_aware", "--host", "127.0.0.1", "--port", url.rsplit(":", 1)[1]]
            flags += ["--log-level", "error", "--prometheus-port", str(free_port())]
            processes.start(url, peer_python, "-m", "sglang_router.launch_router", "--worker-urls", *urls, *flags)
        for url in fronts.values():
            await processes.ready(url)
        for nth, (repeat, kind) in enumerate(itertools.product(range(repeats), traffics)):
            order = list(fronts)
            random.Random(nth).shuffle(order)  # nobody always comes first
            for place, front in enumerate(order):
                seed = nth * len(order) + place
                sessions = make_traffic(kind, scale, repeat, model_size)
                mark = f"{seed:08d}" * 2  # a block that no other run has
                for talk in sessions:
                    talk.turns[0] = mark + talk.turns[0]
                client = Client(session, "bench", concurrency, num_out)
                outcome = await client.run(kind, front, sessions, fronts[front])
                ttft = f"{1e3 * outcome.ttft_s('p50'):,.0f} ms, p99 {1e3 * outcome.ttft_s('p99'):,.0f} ms"
                rate = f"{outcome.tokens_per_s:,.0f} tokens/s, {outcome.hit_rate:.0%} cached"
                tell(f"{kind}, {front}: {rate}, first token {ttft}")
                found.append(outcome)
    return found


# -- what came of it


def summarize(found: Sequence[FrontRun]) -> list[dict[str, Any]]:
    """Medians over the repeats, by traffic and front, and the throughput over round robin's in the same repeat."""
    rows = []
    for traffic in dict.fromkeys(one.traffic for one in found):
        base = [one.tokens_per_s for one in found if (one.traffic, one.front) == (traffic, "round-robin")]
        for front in dict.fromkeys(one.front for one in found):
            runs = [one for one in found if (one.traffic, one.front) == (traffic, front)]
            ratios = [run.tokens_per_s / other for run, other in zip(runs, base, strict=True)]
            rows.append(
                {
                    "traffic": traffic,
                    "front": front,
                    "tokens_per_s": statistics.median(run.tokens_per_s for run in runs),
                    "times_round_robin": statistics.median(ratios),
                    "hit_rate": statistics.median(run.hit_rate for run in runs),
                    "ttft_mean_s": statistics.median(run.ttft_s("mean") for run in runs),
                    "ttft_p50_s": statistics.median(run.ttft_s("p50") for run in runs),
                    "ttft_p99_s": statistics.median(run.ttft_s("p99") for run in runs),
                    "requests": runs[0].num_requests,
                    "failed": sum(run.num_failed for run in runs),
                }
            )
    fronts = [OURS, PEER, *ALTERNATIVES]
    return sorted(rows, key=lambda row: (TRAFFICS.index(row["traffic"]), fronts.index(row["front"])))


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    heads = ("traffic", "routed by", "tokens/s", "× round robin", "cached", "first token mean", "p50", "p99", "failed")
    lines = []
    for row in rows:
        lines.append([row["traffic"], row["front"], f"{row['tokens_per_s']:,.0f}", f"{row['times_round_robin']:.2f}"])
        lines[-1].append(f"{row['hit_rate']:.1%}")
        lines[-1] += [f"{1e3 * row[f'ttft_{name}_s']:,.0f} ms" for name in ("mean", "p50", "p99")]
        lines[-1] += [str(row["failed"])]
    return table(heads, lines)


def charts(rows: Sequence[dict[str, Any]]) -> list[Chart]:
    traffics = list(dict.fromkeys(row["traffic"] for row in rows))
    fronts = list(dict.fromkeys(row["front"] for row in rows))

    def columns(name: str, factor: float = 1.0) -> dict[str, list[float | None]]:
        values = {(row["traffic"], row["front"]): factor * row[name] for row in rows}
        return {front: [values.get((traffic, front)) for traffic in traffics] for front in fronts}

    return [
        bar_chart("Throughput over round robin's", "times", traffics, columns("times_round_robin")),
        bar_chart("Prompt tokens found in a cache", "%", traffics, columns("hit_rate", 100)),
        bar_chart("First token, 99th percentile", "ms", traffics, columns("ttft_p99_s", 1e3)),
    ]
