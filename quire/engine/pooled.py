"""What is made of pooled prompts: embeddings, classes, scores of pairs. The same for programs and for the server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Any

from quire.engine.inputs import SECOND_TEXT
from quire.errors import BadRequestError, QuireError
from quire.inputs import Prompt
from quire.outputs import RequestOutput
from quire.pooling import Pooled
from quire.text import Tokenizer


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
    """Of a request that has ended; QuireError where it came to nothing."""
    one = output.outputs[0]
    if one.pooled is None:
        raise QuireError(f"request {output.request_id} was not pooled: {one.error or one.finish_reason}")
    return one.pooled


def pair_up(first: Any, second: Any) -> tuple[list[Prompt], list[Prompt]]:
    """One text against many, or as many against as many."""
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
