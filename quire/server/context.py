"""ServerContext: the state that every handler gets, with the models that are served. Made once, at the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from starlette.requests import Request as HttpRequest

from quire.engine.api import ServingEngine, is_replicated, replicas_of
from quire.errors import ConfigError
from quire.nearest import nearest
from quire.request import AdapterRef
from quire.server.admission import Admission
from quire.server.batches import Batches
from quire.server.endpoint import JsonEndpoint
from quire.server.errors import RETRY_SOON, ApiError, shown
from quire.server.feed import LiveFeed, describe
from quire.server.life import ServerLife
from quire.server.logs import RequestLog
from quire.server.metrics import ServerMetrics
from quire.server.residents import Residents
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
    adapters: dict[str, AdapterRef] = field(default_factory=dict)  # by the name that clients ask for
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

    @property
    def num_in_engine(self) -> int:
        """Requests that the engine has, as of its last report."""
        load = self.engine.load()
        return load.num_running + load.num_waiting

    def find_engine(self, name: str | None) -> tuple[str, ServingEngine]:
        """Find a replica by its name; without a name, the first. Raises a 404 for one that is not there."""
        engines = replicas_of(self.engine)
        if name is None:
            name = next((one for one in engines if engines[one].health().is_up), next(iter(engines)))
        if name not in engines:
            raise ApiError(404, f"there is no engine {shown(name)}: there are {', '.join(engines)}", code="no_engine")
        if is_replicated(self.engine) and not (health := engines[name].health()).is_up:
            state = health.state.value
            raise ApiError(503, f"engine {name} is {state}", code=state, headers=RETRY_SOON)
        return name, engines[name]

    def feed_of(self, name: str | None = None, states: Callable[[], dict[str, str]] = dict) -> LiveFeed:
        """The live feed of one engine. A replica that was started again has a new one. states: of all models."""
        name, engine = self.find_engine(name)
        feed = self.feeds.get(name)
        if feed is None or feed.engine is not engine:
            feed = self.feeds[name] = LiveFeed(
                engine,
                self.metrics,
                self.life,
                hello=lambda: describe(self.names[0], engine) | {"engine": name},
                engine_names=lambda: list(replicas_of(self.engine)),
                models=states,
            )
        return feed


class Asked(NamedTuple):
    """The model, and perhaps the adapter, that a request's `model` names."""

    served: ServedModel
    name: str  # to answer under
    adapter: str | None = None  # the model's adapter to use

    @property
    def adapter_ref(self) -> AdapterRef | None:
        return None if self.adapter is None else self.served.adapters[self.adapter]


@dataclass(slots=True, kw_only=True)
class ServerContext:
    models: list[ServedModel]  # at least one, each under names of its own: see `add`
    settings: ServerSettings
    logs: RequestLog
    life: ServerLife
    text_work: TextWork = field(default_factory=TextWork)
    batches: Batches | None = None  # None: no folder for them was given
    responses: ResponseStore = field(default_factory=ResponseStore)
    answering: dict[str, JsonEndpoint] = field(default_factory=dict)  # by path, for batches; see create_app
    tracer: Tracer | None = None  # None: no traces are sent
    residents: Residents | None = None  # which models are awake; None: they neither sleep nor change

    @property
    def first(self) -> ServedModel:
        """The model of requests and paths that name none. Failures before a model is known are counted here."""
        return self.models[0]

    def add(self, served: ServedModel) -> None:
        """Serve one more model. Raises a ConfigError where one of its names is another's."""
        self.check_names(served)
        self.models.append(served)

    def check_names(self, served: ServedModel) -> None:
        for name in served.names:
            if served.names.count(name) > 1 or any(asked.name == name for asked in self.choices()):
                raise ConfigError(f"two models are named {name!r}: give each a name of its own with served_model_name")

    def choose(self, request: HttpRequest) -> ServedModel:
        """The model of a path that takes ?model=; without it, the first."""
        return self.find(request.query_params.get("model")).served

    def engines(self) -> dict[str, ServingEngine]:
        """The engine of every model, by the model's first name."""
        return {served.names[0]: served.engine for served in self.models}

    def states(self) -> dict[str, str]:
        """The state of every model's engine, by the model's first name."""
        return {served.names[0]: served.engine.health().state.value for served in self.models}

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
        offered = nearest(name, known, _NUM_OFFERED, cutoff=0.5)
        offered += [other for other in known if other not in offered]
        use = " or ".join(repr(other) for other in offered[:_NUM_OFFERED])
        raise ApiError(404, f"the model {shown(name)!r} is not here: use {use}", param="model", code="model_not_found")

    def refused(self, error: ApiError, client: tuple[str, int] | None) -> None:
        """Something was turned away before any endpoint saw it. Anyone can make that happen at any rate."""
        reason = error.code or "invalid_request"
        self.first.metrics.on_refused(reason)
        self.logs.often("refused", reason, client=client[0] if client else None)
