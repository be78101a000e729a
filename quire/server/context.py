"""ServerContext: what every handler is given. Made once, when the server starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.api import ServingEngine
from quire.server.admission import Admission
from quire.server.errors import ApiError
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

    def refused(self, error: ApiError, client: tuple[str, int] | None) -> None:
        """Something was turned away before any endpoint saw it. Anyone can make that happen at any rate."""
        reason = error.code or "invalid_request"
        self.metrics.on_refused(reason)
        self.logs.often("refused", reason, client=client[0] if client else None)
