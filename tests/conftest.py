from __future__ import annotations

import asyncio
import inspect
import logging
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, here and in child processes: its threads meet after every operation, and where several test
# processes share the cores, each meeting waits for a thread that does not run.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import fakes
import hypothesis  # before an engine freezes what the collector looks at: hypothesis counts references
import numpy as np
import pytest
import torch

from quire.engine.launch import settle_for_serving

# How long an example takes is the machine's business, and a busy one's are no failures.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which any test file may be the first to do


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory for load_format='dummy'."""
    return fakes.write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's file: pulled once, then cached. A laptop without a network skips; CI must not."""
    from quire.errors import DownloadError
    from quire.weights import resolve_model

    try:
        return resolve_model("smollm2")
    except DownloadError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the default model cannot be fetched: {error}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test may be a coroutine: it runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    """What a test draws by chance does not depend on which tests ran before it in its process."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """A server sets up its process's logs, and in some tests the process is the tests' own. What a test logs is seen
    from INFO up."""
    loggers = [logging.getLogger(name) for name in ("quire", "uvicorn")]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    loggers[0].setLevel(logging.INFO)
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def _own_interrupts() -> Iterator[None]:
    """A server that ran in this thread leaves its loop's handler, and the next test's Ctrl-C would go nowhere."""
    yield
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Files with minutes of work in few tests begin first: what begins last should be short, or one process works alone at
# the end. `pytest --durations=50` tells.
SLOW_FILES = (
    "test_smollm2.py",
    "executor/test_ranks.py",
    "executor/test_ray_ranks.py",
    "kernels/triton/test_experts.py",
    "kernels/triton/test_ops.py",
    "kernels/triton/test_skinny.py",
    "kernels/triton/test_sampling_filter.py",
    "kernels/triton/test_prefix.py",
    "router/test_replicas.py",
    "router/test_carry.py",
    "executor/test_conformance.py",
    "executor/test_rank_failures.py",
    "executor/test_dry_run.py",
    "scheduler/test_random.py",
    "test_combinations.py",
    "server/test_replicas.py",
    "server/test_openapi.py",
    "server/test_pooled.py",
    "server/test_page.py",
    "cli/test_serve.py",
)


def pytest_collection_finish() -> None:
    """What was imported and collected stays, and what tests make seldom needs the garbage collector: it looks as seldom
    as in a process that serves."""
    settle_for_serving()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first. Tests marked gpu skip, with a reason, where there is none."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
