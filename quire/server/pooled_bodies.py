"""What the paths that pool take and give: OpenAI's embeddings, Jina's and Cohere's rerank, and vLLM's others."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quire.server.protocol import MAX_ANSWERS, MAX_INT32, CacheSalt, Count, Positive, Priority, TokenId

Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_ANSWERS)]
Input = Annotated[
    str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)],
    Meta(description="A text, its token ids, or a list of either."),
]


class PooledBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that all pooling requests have in common."""

    model: Annotated[str | None, Meta(description="One of GET /v1/models; the first of them if left out.")] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None,
        Meta(description="Keep the first so many tokens of a text; -1: as many as the model takes."),
    ] = None
    use_activation: Annotated[
        bool | None, Meta(description="Normalize embeddings; turn a classifier's logits into probabilities.")
    ] = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    timeout: Annotated[float, Meta(gt=0.0)] | None = None
    request_id: str | None = None
    user: str | None = None

    @property
    def stream(self) -> bool:
        """Vectors come whole."""
        return False


class EmbeddingBody(PooledBody, kw_only=True, forbid_unknown_fields=True):
    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[
        Positive | None,
        Meta(description="The first so many numbers of each embedding, of a model that was trained for it."),
    ] = None


class PoolingBody(PooledBody, kw_only=True, forbid_unknown_fields=True):
    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None


class ClassifyBody(PooledBody, kw_only=True, forbid_unknown_fields=True):
    input: Input


class ScoreBody(PooledBody, kw_only=True, forbid_unknown_fields=True):
    """One text with each of many, or the first with the first and so on. `data_1` and `data_2` are the same fields."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    data_1: str | Texts | None = None
    data_2: str | Texts | None = None


class RerankDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    text: str


class RerankBody(PooledBody, kw_only=True, forbid_unknown_fields=True):
    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=MAX_ANSWERS)]
    top_n: Annotated[Count | None, Meta(description="The best so many; all if left out or 0.")] = None
    return_documents: bool | None = None


class PooledUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Vector(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class PooledData(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float]] | str


class Classes(msgspec.Struct, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class _List(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: PooledUsage


class Embeddings(_List, kw_only=True):
    data: list[Vector]


class PooledList(_List, kw_only=True):
    data: list[PooledData]


class ClassesList(_List, kw_only=True):
    data: list[Classes]


class ScoreList(_List, kw_only=True):
    data: list[Score]


class Reranked(msgspec.Struct, kw_only=True):
    index: int
    relevance_score: float
    document: RerankDocument | msgspec.UnsetType = msgspec.UNSET


class RerankList(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: PooledUsage
    results: list[Reranked]
