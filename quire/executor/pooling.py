"""From hidden states to vectors: rows that pool, over as many steps as their prompts take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.models.classifier import Classifier
from quire.plan import Admission, StepPlan
from quire.pooling import Pooled, PoolingKind, PoolingSpec
from quire.sampling.transfer import HostCopy, to_device


@dataclass(slots=True)
class PooledSpan:
    """Tokens of one row in a step: `count` hidden states from `first` on."""

    row: int
    first: int
    count: int
    is_last: bool  # the row's tokens end with it


@dataclass(slots=True)
class _Row:
    spec: PoolingSpec
    num_tokens: int
    kept: list[Tensor] = field(default_factory=list)  # shares of the mean, the one state that counts, or all of them


class PooledBatch:
    """Vectors on their way to the host, in the order of the rows that ended."""

    def __init__(self, num_rows: int, groups: list[tuple[list[int], list[int], Tensor]]) -> None:
        """groups: places among the rows, how many vectors each has, and all of these."""
        self._num_rows = num_rows
        self._groups = [(places, counts) for places, counts, _ in groups]
        self._copy = HostCopy(*(vectors for _, _, vectors in groups))

    def to_list(self) -> list[Pooled]:
        found: list[Pooled | None] = [None] * self._num_rows
        for (places, counts), vectors in zip(self._groups, self._copy.wait(), strict=True):
            data, vector_bytes, at = vectors.contiguous().numpy().tobytes(), vectors.shape[1] * 4, 0
            for place, count in zip(places, counts, strict=True):
                found[place] = Pooled(count, data[at : at + count * vector_bytes])
                at += count * vector_bytes
        assert None not in found
        return found  # type: ignore[return-value]


def pooled_spans(plan: StepPlan) -> Iterator[PooledSpan]:
    first = 0
    for row, count, is_last in zip(plan.spans.rows, plan.spans.num_tokens, plan.spans.samples, strict=True):
        yield PooledSpan(row, first, count, is_last)
        first += count


class RowPools:
    """What every row that pools has kept so far. A prompt in one step keeps nothing."""

    def __init__(self, classifier: Classifier | None) -> None:
        self._classifier = classifier
        self._rows: dict[int, _Row] = {}

    def admit(self, new: Admission) -> None:
        assert new.pooling is not None, "a request that samples came to a model that pools"
        self._rows[new.row] = _Row(new.pooling, len(new.token_ids))

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def clear(self) -> None:
        self._rows.clear()

    def take(self, hidden: Tensor, spans: Iterable[PooledSpan]) -> PooledBatch | None:
        """hidden: [tokens, hidden] of a step. None where no row ends in it."""
        spans = list(spans)
        picked: dict[PoolingKind, Tensor] = {}
        by_spec: dict[PoolingSpec, tuple[list[int], list[Tensor]]] = {}
        num_ended = 0
        for number, span in enumerate(spans):
            row = self._rows[span.row]
            kind = row.spec.kind
            if kind is PoolingKind.ALL:
                row.kept.append(hidden[span.first : span.first + span.count].float())
            elif kind is PoolingKind.MEAN or (span.is_last if kind is PoolingKind.LAST else not row.kept):
                if kind not in picked:
                    picked[kind] = self._pick(hidden, spans, kind)
                row.kept.append(picked[kind][number : number + 1])
            if not span.is_last:
                continue
            states = row.kept[0] if len(row.kept) == 1 else torch.cat(row.kept)
            if kind is PoolingKind.MEAN and len(states) > 1:
                states = states.sum(dim=0, keepdim=True)
            places, vectors = by_spec.setdefault(replace(row.spec, num_first_tokens=None), ([], []))
            places.append(num_ended)
            vectors.append(states)
            row.kept = []
            num_ended += 1
        groups = [
            (places, [len(each) for each in vectors], self._finish(torch.cat(vectors), spec))
            for spec, (places, vectors) in by_spec.items()
        ]
        return PooledBatch(num_ended, groups) if groups else None

    def _pick(self, hidden: Tensor, spans: list[PooledSpan], kind: PoolingKind) -> Tensor:
        """[spans, hidden] in float32: one state of each span, or its share of the mean. One launch for all rows."""
        if kind is PoolingKind.MEAN:
            columns = [[span.count for span in spans], [self._rows[span.row].num_tokens for span in spans]]
            lengths, totals = to_device(np.array(columns, dtype=np.int64), hidden.device).unbind(0)
            sums: Tensor = torch.segment_reduce(hidden.float(), "sum", lengths=lengths)
            return sums / totals[:, None]
        places = [span.first + (span.count - 1 if kind is PoolingKind.LAST else 0) for span in spans]
        return hidden.index_select(0, to_device(np.array(places, dtype=np.int64), hidden.device)).float()

    def _finish(self, vectors: Tensor, spec: PoolingSpec) -> Tensor:
        if spec.has_classes:
            assert self._classifier is not None, "classes are asked of a model that has none"
            logits = self._classifier.logits(vectors)
            return self._classifier.activate(logits) if spec.is_activated else logits
        if spec.dimensions is not None:
            vectors = vectors[:, : spec.dimensions]
        return F.normalize(vectors, dim=-1) if spec.is_activated else vectors
