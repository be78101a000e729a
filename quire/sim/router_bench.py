"""`quire bench router --simulate`: the same clients, fronts and traffic on simulated servers, in virtual time.

Routing is the product's: `router/servers.py` follows simulated servers as it follows real ones, with the same
questions, two looks a second and what it remembers of texts. The servers are engines of the bench's model, which
share a few cores. So runs repeat exactly, whatever else the machine does, and a choice that was wrong can be looked at.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.bench.router import BLOCK_SIZE, MAX_LEN, MAX_NUM_SEQS, NUM_BLOCKS, OURS, FrontRun, Session, make_traffic
from quire.errors import ConfigError
from quire.params import SamplingSpec
from quire.request import Request
from quire.router.alternatives import ALTERNATIVES, FIRST_TOKEN, new_router
from quire.router.hashes import prompt_hashes
from quire.router.servers import Question, Servers, Upstream
from quire.scheduler import SchedulerConfig
from quire.sim import virtual_time
from quire.sim.cores import SharedCores
from quire.sim.cost import CostModel
from quire.sim.replica import Replica, ReplicaConfig, TokenTimes

# A core's time for steps of the 15M model, found by least squares over some hundred steps of one thread.
COST = CostModel(overhead_s=3e-3, weights_s=0.0, token_s=0.26e-3, kv_token_s=0.9e-6, pair_s=47e-9)
_ENGINE = ReplicaConfig(
    num_blocks=NUM_BLOCKS,
    block_size=BLOCK_SIZE,
    scheduler=SchedulerConfig(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=2048,
        max_model_len=MAX_LEN,
        preemption="recompute",
        prefill_tokens_per_s=500.0,
    ),
    target_step_s=0.12,  # what a step with decodes may take on a CPU
    can_leap=False,
)
_HTTP_S = 2e-3  # from a client to an engine, or from a router to a server's HTTP process and back
_HOP_S = 2e-3  # more through a proxy
_GREEDY = SamplingSpec(temperature=0.0)


def simulate(
    *,
    num_servers: int,
    traffics: Sequence[str],
    repeats: int,
    scale: float,
    concurrency: int,
    num_out: int,
    num_cores: int,
    slow: float,
    tell: Callable[[str], None],
) -> list[FrontRun]:
    """Every front on every traffic, `repeats` times. Each front has servers of its own, which go from run to run with
    what they have cached. slow: the last server takes so many times as long for everything."""
    for kind in traffics:
        make_traffic(kind, scale, 0)  # a wrong name is told before anything runs
    if num_cores < 1:
        raise ConfigError(f"--cores must be a whole number >= 1, got {num_cores}")
    if not 1 <= slow < math.inf:
        raise ConfigError(f"--slow-server must be 1 or more, got {slow:g}")

    async def run_all(front: str) -> list[FrontRun]:
        machine = Machine([COST] * (num_servers - 1) + [_slower(COST, slow)], num_cores)
        servers = _SimulatedServers(machine, FIRST_TOKEN if front == OURS else front)
        await servers.start()
        found = []
        for nth, (repeat, kind) in enumerate(itertools.product(range(repeats), traffics)):
            sessions = make_traffic(kind, scale, repeat)
            for talk in sessions:
                talk.turns[0] = f"{nth:08d}" * 2 + talk.turns[0]  # a block that no other run has
            client = _Client(machine, servers, FrontRun(kind, front), concurrency, num_out)
            found.append(await client.run(sessions))
        await servers.close()
        return found

    found: list[FrontRun] = []
    for front in (OURS, *ALTERNATIVES):
        tell(f"simulating {front}")
        found += virtual_time.run(run_all(front))
    return found


def _slower(cost: CostModel, times: float) -> CostModel:
    return CostModel(**{name: times * seconds for name, seconds in asdict(cost).items()})


def token_ids(text: str) -> list[int]:
    """One a character, as the bench's tokenizer has it. Simulated engines answer with 0, which is an a."""
    return [ord(letter) - ord("a") & 127 for letter in text]


@dataclass(slots=True)
class Answer:
    """A request at a server."""

    first_token: asyncio.Future[None]
    end: asyncio.Future[None]
    num_cached_tokens: int = 0


class Machine:
    """Servers that share cores, by their addresses, each with a cost model of its own."""

    def __init__(self, costs: Sequence[CostModel], num_cores: int) -> None:
        self.urls = [f"http://replica-{number}:8000" for number in range(len(costs))]
        self._replicas = [Replica(_ENGINE, cost, TokenTimes()) for cost in costs]
        self.by_url = dict(zip(self.urls, self._replicas, strict=True))
        self.logs = {url: replica.kv.log_cache() for url, replica in self.by_url.items()}
        self._ends = SharedCores(self._replicas, num_cores)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._answers: dict[str, Answer] = {}
        self._numbers = itertools.count()
        self._asking: dict[int, list[asyncio.Future[None]]] = {index: [] for index in range(len(costs))}
        for replica in self._replicas:
            replica.on_first_token = self._on_first_token
            replica.on_end = self._on_end

    def ask(self, url: str, text: str, num_out: int) -> Answer:
        replica, now_s = self.by_url[url], self._loop.time()
        request = Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=token_ids(text),
            max_tokens=num_out,
            end_token_ids=frozenset(),
            spec=_GREEDY,
            arrival_s=now_s,
        )
        answer = Answer(self._loop.create_future(), self._loop.create_future())
        self._answers[request.request_id] = answer
        replica.add(request, now_s)
        self._note(self._replicas.index(replica))
        return answer

    async def between_steps(self, url: str) -> None:
        """Wait until the engine is between two steps and hears what it is asked."""
        index = self.urls.index(url)
        if self._replicas[index].due_s is not None:
            self._asking[index].append(self._loop.create_future())
            await self._asking[index][-1]

    def _note(self, index: int) -> None:
        self._ends.note([index], self._loop.time())
        if self._timer is not None:
            self._timer.cancel()
        self._wait()

    def _wait(self) -> None:
        next_s = self._ends.next_s
        self._timer = None if next_s == math.inf else self._loop.call_at(next_s, self._step)

    def _step(self) -> None:
        index = self._ends.pop()
        if index is None:
            self._wait()
            return
        self._replicas[index].advance()
        for asking in self._asking[index]:
            asking.set_result(None)
        self._asking[index].clear()
        self._note(index)

    def _on_first_token(self, request: Request) -> None:
        answer = self._answers[request.request_id]
        answer.num_cached_tokens = request.sequences[0].num_cached_tokens
        answer.first_token.set_result(None)

    def _on_end(self, request: Request) -> None:
        self._answers.pop(request.request_id).end.set_result(None)


class _SimulatedServers(Servers):
    """The product's, which asks a machine instead of sockets."""

    def __init__(self, machine: Machine, policy: str) -> None:
        super().__init__(machine.urls, policy=policy)
        self.router = new_router(policy, BLOCK_SIZE, clock=asyncio.get_running_loop().time)
        self._machine = machine

    async def start(self) -> None:
        await self.start_following()

    async def close(self) -> None:
        await self.stop_following()

    async def _get(self, upstream: Upstream, path: str) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "bench"}]}
        if not path.startswith("/debug/cache"):
            return 200, None
        since = path.partition("since=")[2]
        await asyncio.sleep(_HTTP_S)
        await self._machine.between_steps(upstream.url)
        scheduler = self._machine.by_url[upstream.url].scheduler
        change = self._machine.logs[upstream.url].read(int(since) if since else None)
        return 200, {
            "since": change.at,
            "is_snapshot": change.is_snapshot,
            "filled": b"".join(change.filled).hex(),
            "evicted": b"".join(change.evicted).hex(),
            "block_size": BLOCK_SIZE,
            "max_num_seqs": MAX_NUM_SEQS,
            "num_queued_tokens": scheduler.num_waiting_tokens,
            "num_running": scheduler.num_running,
            "prefill_tokens_per_s": scheduler.costs.mixed_tokens_per_s,
            "step_s": scheduler.costs.decodes_s or None,
        }

    async def _ask_hashes(self, upstream: Upstream, question: Question) -> tuple[int, list[bytes]]:
        await asyncio.sleep(_HTTP_S)
        tokens = token_ids(question.body["prompt"])
        return len(tokens), prompt_hashes(tokens, BLOCK_SIZE)


class _Client:
    """`bench.router.Client`, which asks a machine instead of sockets."""

    def __init__(
        self, machine: Machine, servers: _SimulatedServers, run: FrontRun, concurrency: int, num_out: int
    ) -> None:
        self._machine = machine
        self._servers = servers
        self._run = run
        self._places = asyncio.Semaphore(concurrency)
        self._num_out = num_out
        self._clock = asyncio.get_running_loop().time

    async def run(self, sessions: Sequence[Session]) -> FrontRun:
        started_s = self._clock()
        await asyncio.gather(*map(self._talk, sessions))
        self._run.seconds = self._clock() - started_s
        return self._run

    async def _talk(self, session: Session) -> None:
        await asyncio.sleep(session.at_s)
        said = ""
        for turn in session.turns:
            said += turn
            async with self._places:
                await self._ask(said)
            said += "a" * self._num_out

    async def _ask(self, text: str) -> None:
        run, sent_s = self._run, self._clock()
        router = self._servers.router
        await asyncio.sleep(_HOP_S)
        prompt, question = self._servers.prompt_of({"model": "bench", "prompt": text}, None)
        ticket = router.route(prompt)
        assert ticket is not None
        if question is not None:
            self._servers.learn(question, ticket)
        await asyncio.sleep(_HTTP_S)
        answer = self._machine.ask(ticket.replica, text, self._num_out)
        await answer.first_token
        router.on_first_token(ticket)
        run.first_token_s.append(self._clock() - sent_s)
        await answer.end
        router.on_end(ticket)
        run.num_requests += 1
        run.prompt_tokens += len(text)
        run.cached_tokens += answer.num_cached_tokens
        run.output_tokens += self._num_out
