"""Embeddings, classes and scores of pairs from pooled prompts, for programs and for the server."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import TYPE_CHECKING, Any

from quire.engine.inputs import SECOND_TEXT
from quire.errors import BadRequestError, QuireError
from quire.inputs import Prompt, as_batch, per_prompt
from quire.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.pooling import Pooled, PoolingParams, PoolingTask
from quire.refusals import CALL, sift
from quire.text import Tokenizer

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine

Prompts = Prompt | Sequence[Prompt]
Params = PoolingParams | Sequence[PoolingParams] | None
ShowsBar = bool | Callable[..., Any]  # or what makes the bar


class TokenizedAhead:
    """Prompts whose texts are tokenized some hundred at a time, on all cores, when the first of them is asked for."""

    _AT_ONCE = 256
    _MAX_CHARS = 20_000  # a longer text is left to where its length is checked first

    def __init__(self, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> None:
        self._tokenizer = tokenizer
        self._prompts = list(prompts)
        self._end = 0

    def __call__(self, i: int) -> Prompt:
        if i >= self._end:
            self._end = i + self._AT_ONCE
            texts = {
                j: prompt
                for j, prompt in enumerate(self._prompts[i : self._end], start=i)
                if isinstance(prompt, str) and len(prompt) <= self._MAX_CHARS
            }
            for (j, text), ids in zip(texts.items(), self._tokenizer.encode_batch(list(texts.values())), strict=True):
                self._prompts[j] = {"prompt": text, "prompt_token_ids": ids}
        return self._prompts[i]


def pooled_of(output: RequestOutput) -> Pooled:
    """The vectors of a request that has ended. Raises QuireError if it has none."""
    one = output.outputs[0]
    if one.pooled is None:
        raise QuireError(f"request {output.request_id} was not pooled: {one.error or one.finish_reason}")
    return one.pooled


def pair_up(first: Any, second: Any) -> tuple[list[Prompt], list[Prompt]]:
    """Pair one text with each of many, or as many with as many."""
    lists = []
    for name, given in (("data_1", first), ("data_2", second)):
        is_one = isinstance(given, str | dict) or (given and isinstance(given[0], int))
        listed: list[Prompt] = [given] if is_one else list(given)
        if not listed:
            raise BadRequestError(f"{name} is empty: give at least one text", param=name)
        lists.append(listed)
    left, right = lists
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise BadRequestError(
            f"{len(left)} texts cannot be paired with {len(right)}: give one, or as many as there are of the others",
            param="data_1",
        )
    return left, right


def checked_scorer(labels: Sequence[str] | None) -> bool:
    """Whether a model scores pairs as such (a cross-encoder) and not by the cosine of their embeddings."""
    if labels is not None and len(labels) > 1:
        raise BadRequestError(
            f"scores need a model with one class, or one that embeds, and this one has {len(labels)} classes: "
            "use LLM.classify",
            param="task",
        )
    return bool(labels)


def pair_prompt(first: Prompt, second: Prompt) -> Prompt:
    """A pair as the one prompt that a cross-encoder reads."""
    if not isinstance(first, str) or not isinstance(second, str):
        raise BadRequestError("a model that reads pairs scores texts, not token ids: give texts", param="data_1")
    return {"prompt": first, SECOND_TEXT: second}


def cosine(first: Pooled, second: Pooled) -> float:
    a, b = first.floats(), second.floats()
    norms = math.sqrt(math.fsum(map(mul, a, a)) * math.fsum(map(mul, b, b)))
    return math.fsum(map(mul, a, b)) / norms if norms else 0.0


def distinct(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[int]]:
    """Each text once, and which of them stands at each place: a query against many documents is embedded once."""
    places: dict[Any, int] = {}
    found: list[Prompt] = []
    at = []
    for prompt in prompts:
        key = prompt if isinstance(prompt, str) else id(prompt)
        if key not in places:
            places[key] = len(found)
            found.append(prompt)
        at.append(places[key])
    return found, at


def pooled_fields(output: RequestOutput) -> dict[str, Any]:
    names = ("request_id", "prompt_token_ids", "finished", "num_cached_tokens", "metrics")
    return {name: getattr(output, name) for name in names}


def as_tensor(pooled: Pooled, task: PoolingTask) -> Any:
    """A torch tensor of its own: [width], or [tokens, width] where each token has a vector."""
    import torch

    tensor = torch.frombuffer(bytearray(pooled.data), dtype=torch.float32).view(pooled.num_vectors, -1)
    return tensor if task.is_by_token else tensor[0]


class PoolingMethods:
    """The methods of `LLM` for a model that pools. A call runs its prompts as `generate` runs them."""

    llm_engine: LLMEngine

    def _generate(
        self,
        prompt_of: Callable[[int], Prompt],
        count: int,
        sampling_params: Any,
        priority: int | Sequence[int] | None,
        use_tqdm: ShowsBar,
    ) -> list[RequestOutput]:
        raise AssertionError("LLM has it")

    def embed(
        self, prompts: Prompts, *, pooling_params: Params = None, use_tqdm: ShowsBar = True, **others: Any
    ) -> list[EmbeddingRequestOutput]:
        """A vector for every prompt, of a model that embeds."""
        return [
            EmbeddingRequestOutput(outputs=EmbeddingOutput(pooled.floats().tolist()), **base)
            for pooled, base, _ in self._pool(prompts, pooling_params, PoolingTask.EMBED, use_tqdm, others)
        ]

    def classify(
        self, prompts: Prompts, *, pooling_params: Params = None, use_tqdm: ShowsBar = True, **others: Any
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of a classifier's classes, for every prompt."""
        return [
            ClassificationRequestOutput(outputs=ClassificationOutput(pooled.floats().tolist()), **base)
            for pooled, base, _ in self._pool(prompts, pooling_params, PoolingTask.CLASSIFY, use_tqdm, others)
        ]

    def encode(
        self,
        prompts: Prompts,
        pooling_params: Params = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: ShowsBar = True,
        **others: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Hidden states as tensors: one for each token, or whatever `pooling_task` says (embed, classify, token_embed,
        token_classify). A classifier gives the probabilities of its classes."""
        task = pooling_task or (
            PoolingTask.CLASSIFY if self.llm_engine.spec.pooling_labels else PoolingTask.TOKEN_EMBED
        )
        return [
            PoolingRequestOutput(outputs=PoolingOutput(as_tensor(pooled, own)), **base)
            for pooled, base, own in self._pool(prompts, pooling_params, task, use_tqdm, others)
        ]

    def score(
        self,
        data_1: Prompts,
        data_2: Prompts,
        /,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: ShowsBar = True,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """How well pairs go together: one text with each of many, or the first with the first and so on. By a model
        that reads pairs, or by the cosine of a model's embeddings."""
        left, right = pair_up(data_1, data_2)
        if checked_scorer(self.llm_engine.spec.pooling_labels):
            pairs = [pair_prompt(a, b) for a, b in zip(left, right, strict=True)]
            return [
                ScoringRequestOutput(outputs=ScoringOutput(pooled.floats()[0]), **base)
                for pooled, base, _ in self._pool(pairs, pooling_params, PoolingTask.CLASSIFY, use_tqdm, others)
            ]
        texts, at = distinct([*left, *right])
        done = self._pool(texts, pooling_params, PoolingTask.EMBED, use_tqdm, others)
        scores = []
        for i, j in zip(at[: len(left)], at[len(left) :], strict=True):
            (a, first, _), (b, second, _) = done[i], done[j]
            base = first | {
                "prompt_token_ids": first["prompt_token_ids"] + second["prompt_token_ids"],
                "num_cached_tokens": first["num_cached_tokens"] + second["num_cached_tokens"],
            }
            scores.append(ScoringRequestOutput(outputs=ScoringOutput(cosine(a, b)), **base))
        return scores

    def _pool(
        self, prompts: Prompts, given: Params, task: str, use_tqdm: ShowsBar, others: dict[str, Any]
    ) -> list[tuple[Pooled, dict[str, Any], PoolingTask]]:
        """The vectors of every prompt, the other fields of its output, and its task: its own, or `task`."""
        truncate = others.pop("truncate_prompt_tokens", None)
        sift(others, CALL)
        batch = as_batch(prompts)
        params = [own or PoolingParams() for own in per_prompt(given, len(batch), "pooling_params", PoolingParams)]
        params = [own if own.task is not None else own.clone(task=task) for own in params]
        if truncate is not None:
            params = [own.clone(truncate_prompt_tokens=truncate) for own in params]
        prompt_of: Callable[[int], Prompt] = batch.__getitem__
        if self.llm_engine.tokenizer is not None and not any(own.truncate_prompt_tokens for own in params):
            prompt_of = TokenizedAhead(self.llm_engine.tokenizer, batch)
        outputs = self._generate(prompt_of, len(batch), params, None, use_tqdm)
        return [
            (pooled_of(output), pooled_fields(output), PoolingTask(own.task or task))
            for output, own in zip(outputs, params, strict=True)
        ]
