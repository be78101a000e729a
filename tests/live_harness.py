"""For tests of what the live page shows: an engine in the test's own hands, and a whole server in two processes.

Run as a program it serves, with the simulated engine: `python tests/live_harness.py MODEL_DIR SETTINGS_JSON SIM_JSON`.
"""

from __future__ import annotations

import http.client
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fakes
import sim_engine
from observing_fakes import ToldEngine
from serve_fakes import running

from quire.config import EngineConfig
from quire.engine.api import EngineHealth, EngineState
from quire.engine.calls import INSPECTIONS
from quire.engine.core import EngineCore
from quire.errors import EngineDeadError
from quire.request import Request
from quire.server.settings import ApiKey, ModelSettings, ServerSettings

ROOT = Path(__file__).parent.parent


def make_core(*, num_blocks: int = 64, num_host_blocks: int = 0, **scheduling: Any) -> EngineCore:
    """Blocks of 4 tokens, and a step that takes many."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 400}
    sizes |= {name: scheduling.pop(name) for name in sizes if name in scheduling}
    settings = sim_engine.SimSettings(num_blocks=num_blocks, num_host_blocks=num_host_blocks, verify=False, **sizes)
    return sim_engine.make_core(settings, **scheduling)


def make_request(request_id: str, token_ids: list[int], *, max_tokens: int = 8, n: int = 1, **fields: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=token_ids,
        max_tokens=max_tokens,
        end_token_ids=frozenset(),
        n=n,
        **fields,
    )


def run_to_end(core: EngineCore) -> None:
    while core.has_work:
        core.step()


class CoreEngine(ToldEngine):
    """The part of a ServingEngine that the feed and /debug need, over a core that the test steps itself."""

    def __init__(self, core: EngineCore, tokenizer: Any = None) -> None:
        super().__init__()
        self.core = core
        self.tokenizer = tokenizer
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.info = fakes.engine_info(
            architecture="Sim",
            kernels="simulated",
            max_model_len=400,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            block_size=core.kv.block_size,
            num_blocks=core.kv.num_blocks,
        )

    def health(self) -> EngineHealth:
        return EngineHealth(self.state, "killed at /some/path" if self.state is EngineState.DEAD else "")

    async def call(self, name: str, **arguments: Any) -> Any:
        if self.state is EngineState.DEAD:
            raise EngineDeadError("dead")
        self.calls.append((name, arguments))
        return INSPECTIONS[name](self.core, **arguments)


# -- a whole server


@contextmanager
def page_server(command: list[str]) -> Iterator[str]:
    """A server in processes of its own; gives its address. It must end with 0 when told to."""
    with running(command, r"ready at http://127\.0\.0\.1:(\d+) ") as server:
        yield f"http://127.0.0.1:{server.port}"
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0, "".join(server.lines)


def sim_command(model: Path, sim: dict[str, Any], **settings: Any) -> list[str]:
    settings = {"port": 0, "drain_timeout_s": 0.5, **settings}
    return [__file__, str(model), json.dumps(settings), json.dumps(sim)]


def get_json(url: str, path: str, **headers: str) -> Any:
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def main() -> int:
    from quire.engine.client import EngineClient
    from quire.server.run import serve

    model, settings, sim = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    settings["api_keys"] = tuple(ApiKey(**key) for key in settings.get("api_keys", ()))
    options = sim_engine.sim_options(sim_engine.SimSettings(**sim))
    config = EngineConfig(model=model, load_format="dummy")
    models = [ModelSettings(config, (name,)) for name in settings.pop("models", ())] or [ModelSettings(config)]
    return serve(models, ServerSettings(**settings), make_engine=lambda config, _: EngineClient(config, options))


if __name__ == "__main__":
    sys.exit(main())
