"""ServerContext: what every handler is given. Made once, when the server starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.api import ServingEngine
from quire.server.admission import Admission
from quire.server.life import ServerLife
from quire.server.logs import RequestLog
from quire.server.metrics import ServerMetrics
from quire.server.settings import ServerSettings
from quire.server.text_work import TextWork


@dataclass(slots=True, kw_only=True)
class ServerContext:
    engine: ServingEngine
    settings: ServerSettings
    admission: Admission
    metrics: ServerMetrics
    logs: RequestLog
    life: ServerLife
    text_work: TextWork = field(default_factory=TextWork)
