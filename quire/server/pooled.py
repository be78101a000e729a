"""Paths of models that pool: /v1/embeddings, /pooling, /classify, /score and /rerank."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.engine.api import PreparedRequest
from quire.engine.pooled import checked_scorer, cosine, distinct, pair_prompt, pair_up, pooled_of
from quire.errors import BadRequestError
from quire.inputs import Prompt
from quire.pooling import Pooled, PoolingParams
from quire.server import pooled_bodies as bodies
from quire.server.completions import read_prompts
from quire.server.context import ServedModel
from quire.server.endpoint import ClientGone, Exchange
from quire.server.errors import bad_request
from quire.server.generation import Generation, engine_ids
from quire.server.sampling import priority_of
from quire.server.text_work import request_deadline

_PROMPT_CHARS = 100  # what a request of its own costs, beside its text
_FLOAT_CHARS = 4  # what a number of an answer costs to write


class _Pooling:
    """One HTTP request to a model that pools: its prompts run, and their vectors are written off the event loop."""

    def __init__(self, exchange: Exchange, body: bodies.PooledBody, kind: str) -> None:
        asked = exchange.context.find(body.model)
        self.served: ServedModel = asked.served
        self.exchange = exchange
        self.body = body
        self.model = asked.name
        self.id = f"{kind}-{exchange.request_id}"
        self._kind = kind
        self._deadline = request_deadline(exchange, body.timeout)
        self.num_prompt_tokens = 0
        self._headers: dict[str, str] = {}

    @property
    def labels(self) -> tuple[str, ...] | None:
        return self.served.engine.info.pooling_labels

    def head(self) -> dict[str, Any]:
        usage = bodies.PooledUsage(self.num_prompt_tokens, self.num_prompt_tokens)
        return {"id": self.id, "created": int(time.time()), "model": self.model, "usage": usage}

    async def run(self, prompts: Sequence[Prompt], param: str, **params: Any) -> list[Pooled]:
        """Run prompts and return the vectors that they are pooled to. param: the field that they came from."""
        exchange, body, engine = self.exchange, self.body, self.served.engine
        wanted = PoolingParams(
            truncate_prompt_tokens=body.truncate_prompt_tokens, use_activation=body.use_activation, **params
        )
        priority = priority_of(body, engine.info)
        ids = engine_ids(exchange, self._kind, len(prompts))

        def prepare() -> list[PreparedRequest]:
            prepared = []
            for request_id, prompt in zip(ids, prompts, strict=True):
                if exchange.is_abandoned:
                    raise ClientGone
                try:
                    one = engine.prepare(
                        request_id, self._salted(prompt), wanted, priority=priority, tenant=exchange.tenant
                    )
                except BadRequestError as error:
                    error.param = param if error.param in ("prompt", "prompt_token_ids") else error.param
                    raise
                prepared.append(one)
            return prepared

        num_chars = exchange.num_body_bytes + _PROMPT_CHARS * (len(prompts) - 1)
        prepared = await exchange.context.text_work.run(exchange, self._deadline, prepare, num_chars)
        async with Generation(exchange, body, prepared, self.served, self.model, self._deadline) as generation:
            outputs = await generation.take_all()
            self._headers = generation.headers
        self.num_prompt_tokens += sum(one.num_prompt_tokens for one in prepared)
        return [pooled_of(output) for output in outputs]

    def _salted(self, prompt: Prompt) -> Prompt:
        if self.body.cache_salt is None:
            return prompt
        if isinstance(prompt, dict):
            return {**prompt, "cache_salt": self.body.cache_salt}
        name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        return {name: prompt, "cache_salt": self.body.cache_salt}

    async def reply(self, make: Callable[[], Any], pooled: Sequence[Pooled]) -> None:
        num_chars = _FLOAT_CHARS * sum(len(each.data) // 4 for each in pooled)
        work = self.exchange.context.text_work
        answer = await work.run(self.exchange, self._deadline, lambda: msgspec.json.encode(make()), num_chars)
        await self.exchange.reply(answer, self._headers)

    async def score(self, left: list[Prompt], right: list[Prompt], param: str) -> list[float]:
        if checked_scorer(self.labels):
            pairs = [pair_prompt(a, b) for a, b in zip(left, right, strict=True)]
            return [pooled.floats()[0] for pooled in await self.run(pairs, param, task="classify")]
        texts, at = distinct([*left, *right])
        found = await self.run(texts, param, task="embed")
        return [cosine(found[i], found[j]) for i, j in zip(at[: len(left)], at[len(left) :], strict=True)]


async def create_embeddings(exchange: Exchange, body: bodies.EmbeddingBody) -> None:
    """A vector for each text."""
    pooling = _Pooling(exchange, body, "embd")
    prompts = read_prompts(body.input, name="input")
    found = await pooling.run(prompts, "input", task="embed", dimensions=body.dimensions)

    def make() -> bodies.Embeddings:
        data = [bodies.Vector(index=i, embedding=_shown(body.encoding_format, each)) for i, each in enumerate(found)]
        return bodies.Embeddings(data=data, **pooling.head())

    await pooling.reply(make, found)


async def create_pooling(exchange: Exchange, body: bodies.PoolingBody) -> None:
    """Hidden states of texts: a vector for each token, or one for all."""
    pooling = _Pooling(exchange, body, "pool")
    task = body.task or ("classify" if pooling.labels else "token_embed")
    found = await pooling.run(read_prompts(body.input, name="input"), "input", task=task, dimensions=body.dimensions)

    def make() -> bodies.PooledList:
        data = [
            bodies.PooledData(index=i, data=_shown(body.encoding_format, each, by_token=task.startswith("token_")))
            for i, each in enumerate(found)
        ]
        return bodies.PooledList(data=data, **pooling.head())

    await pooling.reply(make, found)


async def create_classes(exchange: Exchange, body: bodies.ClassifyBody) -> None:
    """The classes of texts, with their probabilities."""
    pooling = _Pooling(exchange, body, "classify")
    found = await pooling.run(read_prompts(body.input, name="input"), "input", task="classify")
    labels = pooling.labels or ()

    def make() -> bodies.ClassesList:
        data = []
        for i, each in enumerate(found):
            probs = each.floats().tolist()
            label = labels[max(range(len(probs)), key=probs.__getitem__)]
            data.append(bodies.Classes(index=i, label=label, probs=probs, num_classes=len(probs)))
        return bodies.ClassesList(data=data, **pooling.head())

    await pooling.reply(make, found)


async def create_scores(exchange: Exchange, body: bodies.ScoreBody) -> None:
    """How well pairs of texts go together."""
    pooling = _Pooling(exchange, body, "score")
    given: list[str | list[str]] = []
    for number in (1, 2):
        text, data = getattr(body, f"text_{number}"), getattr(body, f"data_{number}")
        if (text is None) == (data is None):
            raise bad_request(f"send either text_{number} or data_{number}", f"text_{number}")
        given.append(data if text is None else text)
    scores = await pooling.score(*pair_up(*given), param="text_2")
    data = [bodies.Score(index=i, score=score) for i, score in enumerate(scores)]
    await pooling.reply(lambda: bodies.ScoreList(data=data, **pooling.head()), ())


async def create_ranking(exchange: Exchange, body: bodies.RerankBody) -> None:
    """Documents by how well they answer a query, the best first."""
    pooling = _Pooling(exchange, body, "rerank")
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    scores = await pooling.score([body.query] * len(texts), list(texts), param="documents")
    order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]
    results = [bodies.Reranked(index=i, relevance_score=scores[i]) for i in order]
    if body.return_documents is not False:
        for result in results:
            result.document = bodies.RerankDocument(text=texts[result.index])
    head = pooling.head()
    del head["created"]  # as Jina and Cohere have it
    await pooling.reply(lambda: bodies.RerankList(results=results, **head), ())


def _shown(encoding: str | None, pooled: Pooled, *, by_token: bool = False) -> Any:
    """Numbers, or their bytes in base64, as OpenAI's clients ask for them."""
    if encoding == "base64":
        return base64.b64encode(pooled.data).decode()
    return pooled.lists() if by_token else pooled.floats().tolist()
