"""ServerContext: what every handler is given, with the models that are served. Made once, when the server starts."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.api import EngineState, ServingEngine, is_replicated, replicas_of
from quire.server.admission import Admission
from quire.server.batches import Batches
from quire.server.errors import ApiError, shown
from quire.server.feed import LiveFeed, describe
from quire.server.life import RETRY_AFTER_S, ServerLife
from quire.server.logs import RequestLog
from quire.server.metrics import ServerMetrics
from quire.server.responses import ResponseStore
from quire.server.settings import ServerSettings
from quire.server.text_work import TextWork
from quire.server.tracing import Tracer

_NUM_OFFERED = 5  # names of models in an error


@dataclass(slots=True, kw_only=True)
class ServedModel:
    """One engine under the names by which clients ask for it, and what belongs to it alone."""

    names: tuple[str, ...]  # the first is the one that metrics and pages show
    engine: ServingEngine
    admission: Admission
    metrics: ServerMetrics
    life: ServerLife
    adapters: dict[str, str] = field(default_factory=dict)  # by the name that clients ask for: where it came from
    feeds: dict[str, LiveFeed] = field(default_factory=dict)  # by the engine's name

    @classmethod
    def of(cls, names: Sequence[str], engine: ServingEngine, settings: ServerSettings, life: ServerLife) -> ServedModel:
        return cls(
            names=tuple(names),
            engine=engine,
            admission=Admission(engine, settings),
            metrics=ServerMetrics(engine, names[0]),
            life=life,
        )

    def find_engine(self, name: str | None) -> tuple[str, ServingEngine]:
        """One of its replicas; None: the first. Raises a 404 for one that is not there."""
        engines = replicas_of(self.engine)
        if name is None:
            name = next((one for one in engines if _is_up(engines[one])), next(iter(engines)))
        if name not in engines:
            raise ApiError(404, f"there is no engine {shown(name)}: there are {', '.join(engines)}", code="no_engine")
        if is_replicated(self.engine) and not _is_up(engines[name]):
            state = engines[name].health().state.value
            raise ApiError(503, f"engine {name} is {state}", code=state, headers={"retry-after": str(RETRY_AFTER_S)})
        return name, engines[name]

    def feed_of(self, name: str | None = None) -> LiveFeed:
        """The live feed of one engine. A replica that was started again has a new one."""
        name, engine = self.find_engine(name)
        feed = self.feeds.get(name)
        if feed is None or feed.engine is not engine:
            feed = self.feeds[name] = LiveFeed(
                engine,
                self.metrics,
                self.life,
                hello=lambda: describe(self.names[0], engine) | {"engine": name},
                engine_names=lambda: list(replicas_of(self.engine)),
            )
        return feed


class Asked(NamedTuple):
    """What the `model` of a request stands for."""

    served: ServedModel
    name: str  # to answer under
    adapter: str | None = None  # of the model's adapters, the one to use


def _is_up(engine: ServingEngine) -> bool:
    return engine.health().state in (EngineState.READY, EngineState.STUCK)


@dataclass(slots=True, kw_only=True)
class ServerContext:
    models: tuple[ServedModel, ...]
    settings: ServerSettings
    logs: RequestLog
    life: ServerLife
    text_work: TextWork = field(default_factory=TextWork)
    batches: Batches | None = None  # None: no folder for them was given
    responses: ResponseStore = field(default_factory=ResponseStore)
    tracer: Tracer | None = None  # None: nobody wants traces

    @property
    def first(self) -> ServedModel:
        """For requests that name no model and paths that know none. What fails before a model is known counts here."""
        return self.models[0]

    def choices(self) -> Iterator[Asked]:
        """Every name that a request may bring: models', and their adapters'."""
        for served in self.models:
            yield from (Asked(served, name) for name in served.names)
            yield from (Asked(served, name, adapter=name) for name in served.adapters)

    def find(self, name: str | None) -> Asked:
        """The model that a request asks for; without a name, the first. Raises a 404 for one that is not here."""
        if name is None:
            return Asked(self.first, self.first.names[0])
        known = {asked.name: asked for asked in self.choices()}
        if name in known:
            return known[name]
        offered = difflib.get_close_matches(name, known, _NUM_OFFERED, cutoff=0.5)
        offered += [other for other in known if other not in offered]
        use = " or ".join(repr(other) for other in offered[:_NUM_OFFERED])
        raise ApiError(404, f"the model {shown(name)!r} is not here: use {use}", param="model", code="model_not_found")

    def refused(self, error: ApiError, client: tuple[str, int] | None) -> None:
        """Something was turned away before any endpoint saw it. Anyone can make that happen at any rate."""
        reason = error.code or "invalid_request"
        self.first.metrics.on_refused(reason)
        self.logs.often("refused", reason, client=client[0] if client else None)
