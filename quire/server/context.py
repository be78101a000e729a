"""ServerContext: what every handler is given, with the models that are served. Made once, when the server starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine.api import ServingEngine
from quire.server.admission import Admission
from quire.server.batches import Batches
from quire.server.errors import ApiError, shown
from quire.server.feed import LiveFeed, describe
from quire.server.life import ServerLife
from quire.server.logs import RequestLog
from quire.server.metrics import ServerMetrics
from quire.server.settings import ServerSettings
from quire.server.text_work import TextWork
from quire.server.tracing import Tracer


@dataclass(slots=True, kw_only=True)
class ServedModel:
    """One engine under the names by which clients ask for it, and what belongs to it alone."""

    names: tuple[str, ...]  # the first is the one that metrics and pages show
    engine: ServingEngine
    admission: Admission
    metrics: ServerMetrics
    feed: LiveFeed

    @classmethod
    def of(cls, names: Sequence[str], engine: ServingEngine, settings: ServerSettings, life: ServerLife) -> ServedModel:
        metrics = ServerMetrics(engine, names[0])
        return cls(
            names=tuple(names),
            engine=engine,
            admission=Admission(engine, settings),
            metrics=metrics,
            feed=LiveFeed(engine, metrics, life, hello=lambda: describe(names[0], engine)),
        )


@dataclass(slots=True, kw_only=True)
class ServerContext:
    models: tuple[ServedModel, ...]
    settings: ServerSettings
    logs: RequestLog
    life: ServerLife
    text_work: TextWork = field(default_factory=TextWork)
    batches: Batches | None = None  # None: no folder for them was given
    tracer: Tracer | None = None  # None: nobody wants traces

    @property
    def first(self) -> ServedModel:
        """For requests that name no model and paths that know none. What fails before a model is known counts here."""
        return self.models[0]

    def find(self, name: str | None) -> tuple[ServedModel, str]:
        """The model and the name to answer under. Raises a 404 for a model that is not here."""
        if name is None:
            return self.first, self.first.names[0]
        for served in self.models:
            if name in served.names:
                return served, name
        known = " or ".join(repr(name) for served in self.models for name in served.names)
        raise ApiError(
            404, f"the model {shown(name)!r} is not here: use {known}", param="model", code="model_not_found"
        )

    def refused(self, error: ApiError, client: tuple[str, int] | None) -> None:
        """Something was turned away before any endpoint saw it. Anyone can make that happen at any rate."""
        reason = error.code or "invalid_request"
        self.first.metrics.on_refused(reason)
        self.logs.often("refused", reason, client=client[0] if client else None)
