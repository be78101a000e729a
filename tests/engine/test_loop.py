"""The loop between its messages, in this process and without sockets."""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections import deque
from typing import Any

import pytest
from engine.test_core import Always, watched
from sim_engine import BREAK, SimSettings, make_core

from quire.engine import calls
from quire.engine.brownout import Brownout, BrownoutSettings
from quire.engine.inputs import InputProcessor
from quire.engine.link import commands, messages
from quire.engine.loop import _QUIET_S, EngineLoop
from quire.engine.messages import (
    Abort,
    Add,
    Call,
    CallDone,
    CallFailed,
    Finish,
    LoadReport,
    Refused,
    StepOutputs,
    Stop,
)
from quire.errors import EngineDeadError
from quire.params import SamplingParams
from quire.request import Request, Sequence

LONG = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
INPUTS = InputProcessor(None, vocab_size=320, max_model_len=1000, eos_token_ids=frozenset(), seed=0)


class Driver:
    """Feeds a loop: one list of commands at each turn, and Stop when it goes to sleep after the last."""

    def __init__(
        self, sim: SimSettings | None = None, *, settings: BrownoutSettings | None = None, **scheduling: Any
    ) -> None:
        self.core = make_core(sim, **scheduling)
        self.turns: deque[list[Any]] = deque()
        self.sent: list[Any] = []
        brownout = Brownout(settings)
        self.loop = EngineLoop(self.core, self._receive, self._send, brownout)
        self._now: deque[Any] = deque()
        self._is_new_turn = True
        self.waited: list[float | None] = []

    def _send(self, message: Any) -> None:
        self.sent.append(messages.decode(messages.encode(message)))

    def _receive(self, wait_s: float | None) -> Any:
        if wait_s == _QUIET_S and not self.turns and not self._now:
            return None
        if wait_s and self.core.has_work:  # while a step runs: nobody comes
            time.sleep(wait_s)
            return None
        if wait_s != 0.0:
            self.waited.append(wait_s)
        if self._is_new_turn:
            self._now = deque(self.turns.popleft() if self.turns else [Stop()] if wait_s != 0.0 else [])
        self._is_new_turn = not self._now
        return commands.decode(commands.encode(self._now.popleft())) if self._now else None

    def run(self, *turns: list[Any]) -> None:
        self.turns.extend(turns)
        self.loop.run()

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def tokens(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for message in self.of(StepOutputs):
            for key, token in zip(message.keys, message.tokens, strict=True):
                found.setdefault(key, []).append(token)
        return found


def add(key: int, prompt: list[int], params: SamplingParams = LONG, **kwargs: Any) -> Add:
    return Add(key, INPUTS.make_request(f"r{key}", prompt, params, arrival_s=0.0, **kwargs).request)


def test_a_request_that_ended_needs_no_garbage_collector() -> None:
    def num_alive() -> int:
        return sum(type(one) in (Request, Sequence) for one in gc.get_objects())

    driver = Driver()
    gc.collect()
    gc.disable()
    num_before = num_alive()
    try:
        driver.run(
            [add(1, [1, 2, 3]), add(5, [4] * 30, LONG.clone(n=3, temperature=1.0)), add(9, [5] * 9), add(10, [6] * 9)],
            [Abort(9), Finish(10, 0, "stop")],
        )
        assert len(driver.tokens()) == 4 + 2
        assert num_alive() == num_before
    finally:
        gc.enable()


def test_requests_run_to_their_end() -> None:
    driver = Driver()
    driver.run([add(1, [1, 2, 3]), add(5, [4] * 30)])
    tokens = driver.tokens()
    assert {key: len(line) for key, line in tokens.items()} == {1: 20, 5: 20}
    ended = [entry for message in driver.of(StepOutputs) for entry in message.ended]
    assert sorted((e.key, e.reason) for e in ended) == [(1, "length"), (5, "length")]
    started = [entry for message in driver.of(StepOutputs) for entry in message.started]
    assert sorted((s.key, s.index, s.num_cached_tokens) for s in started) == [(1, 0, 0), (5, 0, 0)]
    assert all(s.first_scheduled_s is not None for s in started)
    assert driver.core.kv.num_used_blocks == 0
    assert driver.loop.live_requests() == []
    assert not driver.loop._seq_keys and not driver.loop._keys


def test_forks_have_the_keys_after_their_requests() -> None:
    driver = Driver()
    driver.run([add(10, [1, 2, 3], LONG.clone(n=3, temperature=1.0))])
    tokens = driver.tokens()
    assert sorted(tokens) == [10, 11, 12]
    assert len({tuple(line) for line in tokens.values()}) == 3


def test_forks_that_end_in_one_step() -> None:
    driver = Driver()
    driver.run([add(10, [1, 2, 3], LONG.clone(n=3, temperature=1.0, max_tokens=1))])
    assert {key: len(line) for key, line in driver.tokens().items()} == {10: 1, 11: 1, 12: 1}
    assert [e.key for message in driver.of(StepOutputs) for e in message.ended] == [10, 11, 12]
    assert driver.loop.live_requests() == []


def test_what_the_scheduler_refuses_comes_back_to_its_key() -> None:
    driver = Driver()
    driver.run([add(1, [1] * 3), add(2, [1] * 300), add(3, [2] * 3), add(3, [3])])
    refused = {message.key: message.error for message in driver.of(Refused)}
    assert set(refused) == {2, 3}
    assert refused[2].kind == "ContextLengthError"
    assert refused[2].param == "prompt"
    assert "in use" in refused[3].message  # the same request_id again; the first goes on
    assert {key: len(line) for key, line in driver.tokens().items()} == {1: 20, 3: 20}


def test_an_abort_frees_before_the_next_step() -> None:
    driver = Driver()
    driver.run([add(1, [1] * 8), add(2, [2] * 8)], [], [Abort(1), Abort(1), Abort(99)], [Call(7, "kv_overview", {})])
    [done] = driver.of(CallDone)
    assert done.value["num_running"] == 1
    lengths = {key: len(line) for key, line in driver.tokens().items()}
    assert lengths[2] == 20
    assert 1 <= lengths[1] <= 3
    assert driver.core.kv.num_used_blocks == 0
    assert driver.loop.live_requests() == []


def test_a_stop_string_ends_one_sequence_of_several() -> None:
    driver = Driver()
    driver.run([add(1, [1, 2], LONG.clone(n=2, temperature=1.0))], [], [], [Finish(1, 1, "x"), Finish(1, 1, "x")])
    lengths = {key: len(line) for key, line in driver.tokens().items()}
    assert lengths[1] == 20
    assert lengths[2] < 6
    assert driver.loop.live_requests() == []


def test_logprobs_and_prompt_logprobs() -> None:
    driver = Driver()
    driver.run([add(1, list(range(100)), SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=1, ignore_eos=True))])
    parts = [part for message in driver.of(StepOutputs) for part in message.logprobs]
    assert sum(len(part.of_prompt or []) for part in parts) == 99  # over two chunks: the budget is 64
    assert [entry.token_id for part in parts for entry in part.of_tokens or []] == driver.tokens()[1]


@pytest.mark.parametrize("depth", [1, 2])
def test_preemptions_are_told(depth: int) -> None:
    driver = Driver(SimSettings(num_blocks=12, depth=depth), preemption="recompute")
    alone = Driver()
    work = [add(1, [1] * 8, LONG.clone(max_tokens=30)), add(2, [2] * 8, LONG.clone(max_tokens=30))]
    driver.run(work)
    alone.run(work)
    assert driver.tokens() == alone.tokens()
    told = {entry.key: entry for message in driver.of(StepOutputs) for entry in message.preempted}
    assert driver.core.scheduler.stats.num_preemptions > 0
    assert sum(entry.num_preemptions for entry in told.values()) == driver.core.scheduler.stats.num_preemptions
    recomputed = driver.core.scheduler.stats.num_recomputed_tokens
    assert sum(entry.num_recomputed_tokens for entry in told.values()) == recomputed
    assert not driver.loop._preemptions


def test_a_call_that_fails_hurts_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(calls.CALLS, "bug", lambda core: 1 / 0)
    monkeypatch.setitem(calls.CALLS, "odd", lambda core: object())
    driver = Driver()
    names = ["bug", "odd", "no_such", "kv_overview"]
    wrong = Call(9, "reset_prefix_cache", {"nonsense": 1})
    driver.run([add(1, [1]), *(Call(i, name, {}) for i, name in enumerate(names)), wrong])
    assert [message.call_id for message in driver.of(CallDone)] == [3]
    failed = {message.call_id: message.error for message in driver.of(CallFailed)}
    assert "ZeroDivisionError" in failed[0].message
    assert failed[2].kind == "BadRequestError"
    assert set(failed) == {0, 1, 2, 9}
    assert len(driver.tokens()[1]) == 20


def test_metrics() -> None:
    driver = Driver()
    driver.run([add(1, [1] * 10)], *[[] for _ in range(30)], [Call(1, "metrics", {})])
    [done] = driver.of(CallDone)
    values = {(m["name"], *m["labels"].values()): m["value"] for m in done.value}
    assert values[("vllm:generation_tokens_total",)] == 20
    assert values[("quire:steps_total",)] == 20
    assert values[("quire:brownout_level",)] == 0
    assert values[("vllm:iteration_tokens_total", "8.0")] == 19  # decodes
    assert values[("vllm:iteration_tokens_total", "16.0")] == 20  # and the prompt
    assert values[("vllm:iteration_tokens_total", "+Inf")] == 20
    assert values[("vllm:iteration_tokens_total",)] == 29
    assert ("vllm:prompt_tokens_total",) not in values  # counted where the text is made


def test_the_load_is_told_when_it_changes_and_at_rest() -> None:
    driver = Driver()
    driver.run([add(1, [1] * 10)])
    loads = [message.load for message in driver.of(LoadReport)]
    assert (loads[-1].num_running, loads[-1].num_waiting, loads[-1].kv_usage) == (0, 0, 0.0)
    assert loads[-1].num_steps == 20
    assert loads[-1].tokens_per_s > 0
    assert all(a != b for a, b in itertools.pairwise(loads))


def test_brownout_reaches_scheduler_load_and_log(caplog: pytest.LogCaptureFixture) -> None:
    """Far too little memory for what was let in: work is undone again and again."""
    settings = BrownoutSettings(rise_s=0.001, window_s=10.0, fall_s=0.001, preempted_per_finished=0.01)
    driver = Driver(SimSettings(num_blocks=40, step_s=0.002), settings=settings)
    work = [add(i, [i] * 8, LONG.clone(max_tokens=100)) for i in range(8)]
    limits: list[int | None] = []
    driver.core.scheduler.set_prefill_limit = limits.append  # type: ignore[method-assign]
    with caplog.at_level(logging.DEBUG, "quire"):
        driver.run(work)
    levels = [message.load.brownout_level for message in driver.of(LoadReport)]
    assert max(levels) > 0
    assert limits[0] == 16  # a quarter of the step's budget
    assert "brownout level 0 -> 1: prompts get less of each step" in caplog.text


def test_an_idle_loop_sleeps_until_it_is_called() -> None:
    driver = Driver()
    driver.run()
    assert driver.waited == [None]
    driver = Driver()
    driver.run([add(1, [1])])
    assert driver.waited == [1.0]  # not for good: its rate of tokens has still to fall to nothing


def test_a_quiet_loop_prepares_until_nothing_is_left() -> None:
    driver = Driver()
    left = [True, True, False]
    driver.core.executor.prepare_more = lambda: left.pop(0)  # type: ignore[method-assign]
    driver.run([add(1, [1])])
    assert not left
    assert driver.waited == [1.0]


def test_only_the_first_preparation_waits_for_quiet() -> None:
    driver = Driver()
    left = [True, True, True, False]
    driver.core.executor.prepare_more = lambda: left.pop(0)  # type: ignore[method-assign]
    waits: list[float | None] = []
    receive = driver.loop._receive

    def note_down(wait_s: float | None) -> bytes | None:
        waits.append(wait_s)
        return receive(wait_s)

    driver.loop._receive = note_down
    driver.run()
    assert not left and waits.count(_QUIET_S) == 1


def test_first_tokens_come_first() -> None:
    """Whoever passes on a step's tokens takes a while for all of them; a new request has waited long enough."""
    driver = Driver()
    driver.run([add(1, [1, 2, 3]), add(2, [4, 5])], [add(3, [6]), add(4, [7])])
    steps = [message.keys for message in driver.of(StepOutputs)]
    assert steps[0] == [1, 2]
    assert [3, 4, 1, 2] in steps
    assert steps[-3] == [1, 2, 3, 4]
    assert {key: len(line) for key, line in driver.tokens().items()} == dict.fromkeys((1, 2, 3, 4), 20)


def test_a_failed_step_ends_the_loop() -> None:
    driver = Driver()
    with pytest.raises(EngineDeadError, match="boom"):
        driver.run([add(1, [BREAK])])


def test_a_step_of_a_thousand_is_a_small_message() -> None:
    settings = SimSettings(
        num_blocks=20_000, max_num_seqs=1000, max_num_batched_tokens=2000, max_model_len=1000, verify=False
    )
    driver = Driver(settings)
    for key in range(1000):
        driver.loop._handle(add(key, [key % 256], LONG.clone(max_tokens=500)))
    for _ in range(4):
        outputs = driver.loop._step_outputs(driver.core.step())
    assert len(outputs.keys) == 1000
    assert len(messages.encode(outputs)) < 8_000


def test_after_a_step_with_drafts_the_next_begins_before_outputs_are_sent() -> None:
    driver = Driver(SimSettings(depth=2))
    driver.core.scheduler.drafter = Always()
    events = watched(driver.core)
    send = driver._send

    def sent(message: Any) -> None:
        if isinstance(message, StepOutputs):
            events.append("send")
        send(message)

    driver.loop._send = sent
    driver.run([add(1, [1, 2])], *[[] for _ in range(8)], [add(2, [3, 4])])
    with_drafts = events[events.index("send") :]
    assert with_drafts.count("send") > 10
    pairs = [f"{a} {b}" for a, b in itertools.pairwise(with_drafts)]
    assert pairs.count("submit send") > 5  # the next has begun
    assert len(driver.tokens()[1]) == len(driver.tokens()[2]) == 20
