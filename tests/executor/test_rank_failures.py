"""What ends a rank ends the engine, with an error that names it; and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from executor.test_ranks import config_of
from rank_models import write_lively_model

from quire.child import child_environment
from quire.engine.llm_engine import LLMEngine
from quire.errors import EngineDeadError, ErrorInfo, MemoryBudgetError, RankError
from quire.executor import rank_executor, rank_watch
from quire.executor.rank_executor import RankExecutor, agreed
from quire.executor.rank_messages import Hello, Loaded, from_rank
from quire.executor.rank_watch import Cause
from quire.params import SamplingParams
from quire.tiers.split import Told

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lively_model(tmp_path_factory.mktemp("lively"))


@pytest.fixture
def engine(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLMEngine]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # what is left behind would be here
    engine = LLMEngine.from_config(config_of(model, tensor_parallel_size=2))
    yield engine
    engine.close()


def executor_of(engine: LLMEngine) -> RankExecutor:
    executor = engine.core.executor
    assert isinstance(executor, RankExecutor)
    return executor


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s, "it did not happen"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def generate(engine: LLMEngine, until: Callable[[int], None] = lambda num_steps: None) -> None:
    engine.add_request("r", list(range(30)), SamplingParams(max_tokens=100, ignore_eos=True))
    num_steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        num_steps += 1
        until(num_steps)


@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "heartbeat")])
def test_a_rank_that_dies_or_hangs_in_a_step(
    engine: LLMEngine, tmp_path: Path, number: signal.Signals, words: str
) -> None:
    members = executor_of(engine).members

    def hit(num_steps: int) -> None:
        if num_steps == 3:
            os.kill(members[1].pid, number)

    with pytest.raises(EngineDeadError) as caught:
        generate(engine, hit)
    cause = caught.value.__cause__
    assert isinstance(cause, RankError)
    for part in ("rank 1", members[1].host, str(members[1].pid), words):
        assert part in str(cause)
    with pytest.raises(EngineDeadError):
        engine.step()
    wait_for(lambda: all(is_gone(member.pid) for member in members))
    engine.close()
    assert not list(tmp_path.iterdir())


def test_a_rank_that_dies_while_nothing_runs(engine: LLMEngine) -> None:
    generate(engine)
    members = executor_of(engine).members
    os.kill(members[0].pid, signal.SIGKILL)
    wait_for(lambda: all(is_gone(member.pid) for member in members))  # the others are ended at once
    with pytest.raises(EngineDeadError, match="rank 0"):
        engine.core.check()


def test_ranks_die_with_their_parent(model: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, 'tests')\n"
        "from pathlib import Path\n"
        "from executor.test_ranks import config_of\n"
        "from quire.engine.llm_engine import LLMEngine\n"
        f"engine = LLMEngine.from_config(config_of(Path({str(model)!r}), tensor_parallel_size=2))\n"
        "print(*[member.pid for member in engine.core.executor.members], flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code]
    root = Path(__file__).parent.parent.parent
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=root, env=child_environment() | {"TMPDIR": str(tmp_path)}
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGSTOP)  # even one that cannot look after itself
        parent.kill()
    wait_for(lambda: all(map(is_gone, pids)))


def test_other_versions_and_other_files_are_refused(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """As ranks on other machines may have them."""
    executor = RankExecutor(config_of(model, tensor_parallel_size=2), FakeHosts())
    same = {"quire_version": rank_executor.__version__, "torch_version": "2.11.0", "fingerprint": "f"}
    for name, value, words in (
        ("quire_version", "0.0.1", "Quire: 0.0.1"),
        ("torch_version", "1.0", "torch: 1.0"),
        ("fingerprint", "g", "the model's files: g"),
    ):
        executor.members = [Hello(0, "a", 1, **same), Hello(1, "b", 2, **(same | {name: value}))]
        with pytest.raises(RankError, match=f"rank 1 on b .*{words}"):
            executor._check_alike("f")
    executor.close()


def test_a_rank_that_is_ahead_of_anothers_first_word(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks have met, and what the second sent before that arrives last."""
    executor = RankExecutor(config_of(model, tensor_parallel_size=2), FakeHosts())
    hello, ledger = [Hello(rank, "a", rank, "v", "t", "f") for rank in (0, 1)], Any
    loaded = [Loaded(rank, ledger) for rank in (0, 1)]  # type: ignore[arg-type]
    arriving = iter([hello[0], loaded[0], hello[1], loaded[1]])
    monkeypatch.setattr(executor, "_receive", lambda: next(arriving))
    assert executor._from_all(Hello) == hello and executor._from_all(Loaded) == loaded
    executor.close()


class FakeHosts:
    def start(self, launches: Any, watch: Any) -> None: ...

    def stop(self, within_s: float) -> None: ...

    def kill(self) -> None: ...


def test_the_cause_that_explains_the_others_is_told(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """When one rank is killed, the others fail first: their connections are closed."""
    executor = RankExecutor(config_of(model, tensor_parallel_size=2), FakeHosts())
    watch = executor._watch
    watch.describe_with(lambda rank: f"host{rank}")
    watch.report_error(0, ErrorInfo("", "RuntimeError: Connection closed by peer"))
    watch.report(1, Cause.KILLED, "was killed by SIGKILL")
    with pytest.raises(RankError, match="rank 1 on host1 was killed by SIGKILL"):
        executor.check()
    executor.close()

    executor = RankExecutor(config_of(model, tensor_parallel_size=2), FakeHosts())
    executor._watch.report(1, Cause.ENDED, "exited with status 1")
    executor._watch.report_error(1, ErrorInfo.of(MemoryBudgetError("too little")))
    with pytest.raises(MemoryBudgetError, match=r"rank 1 .*too little"):
        executor.check()
    executor.close()


def test_a_silent_rank_hangs_but_not_one_that_has_yet_to_start(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(rank_watch, "SILENCE_S", 0.5)
    executor = RankExecutor(config_of(model, tensor_parallel_size=2), FakeHosts())
    executor._watch.uses[1].has_beaten = True
    executor._watch.all_are_ready()
    wait_for(lambda: executor._watch.is_failing)
    with pytest.raises(RankError, match=r"rank 1 .*heartbeat"):
        executor.check()
    executor.close()


def test_a_watch_that_fails_leaves_nobody_waiting() -> None:
    def hear(told: Told) -> None:
        raise KeyError("a ticket")

    is_ended = threading.Event()
    with zmq.Context() as context, context.socket(zmq.PULL) as beats, context.socket(zmq.PUSH) as rank:
        beats.bind("inproc://beats")
        rank.connect("inproc://beats")
        watch = rank_watch.RankWatch(1, beats, is_ended.set, hear)
        rank.send(from_rank.encode(Told(0, 0, [], [])))
        assert is_ended.wait(LIMIT_S) and watch.is_failing
        with pytest.raises(RankError, match=r"what ranks tell cannot be heard any more: KeyError\('a ticket'\)"):
            watch.raise_if_over()
        watch.close()


def test_the_ledger_is_what_all_ranks_can_keep(model: Path) -> None:
    ledger = LLMEngine.from_config(config_of(model)).ledger
    other = type(ledger)(
        **{name: getattr(ledger, name) for name in ledger.__slots__}
        | {"num_blocks": 150, "num_host_blocks": 1, "max_model_len": 99, "block_bytes": 2 * ledger.block_bytes}
    )
    found = agreed([ledger, other])
    assert found.summary().endswith("; on the largest of 2 ranks") and "ranks" not in ledger.summary()
    assert (found.num_blocks, found.num_host_blocks, found.max_model_len) == (150, 1, 99)
    assert found.block_bytes == other.block_bytes and found.kv_bytes == 150 * other.block_bytes
