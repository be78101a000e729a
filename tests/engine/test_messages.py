"""What crosses the border arrives as it left."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
import torch

from quire import errors
from quire.config import EngineConfig
from quire.engine.brownout import BrownoutSettings
from quire.engine.inputs import InputProcessor
from quire.engine.messages import (
    Abort,
    Add,
    Call,
    Ended,
    ErrorInfo,
    Finish,
    Launch,
    Logprobs,
    StepNews,
    Stop,
    decode_command,
    decode_launch,
    decode_news,
    encode,
)
from quire.errors import BadRequestError, MemoryBudgetError, QuireError, WeightsError
from quire.params import SamplingParams
from quire.plan import TokenLogprobs


def test_a_config_arrives_whole() -> None:
    config = EngineConfig.from_kwargs(
        model="m", pinned_prefixes=["text", [1, 2]], hf_overrides={"a": {"b": [1]}}, swap_space_gb=0.5
    )
    launch = Launch(
        config=config,
        outputs_address="a",
        commands_address="b",
        parent_pid=1,
        dies_with_parent_thread=True,
        step_timeout_s=1.5,
        heartbeat_s=1.0,
        dump_dir="/d",
        log_level=20,
        brownout=BrownoutSettings(enabled=False),
    )
    back = decode_launch(encode(launch))
    assert back == launch
    assert back.config.given == config.given


def test_numbers_of_numpy_and_tensors_cross_as_pythons() -> None:
    inputs = InputProcessor(None, vocab_size=1000, max_model_len=100, eos_token_ids=[7, 8], seed=0)
    ints = ("n", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "top_k")
    params = SamplingParams(
        **{name: np.int64(2) for name in ints},
        temperature=np.float32(0.5),
        logit_bias={np.int64(5): np.float64(-1.5)},
        allowed_token_ids=np.array([1, 2]),
        stop_token_ids=torch.tensor([3]),
    )
    for prompt in (torch.tensor([1, 2, 3]), np.array([1, 2, 3]), [1, np.int64(2), torch.tensor(3)]):
        request, _ = inputs.make_request("id", prompt, params, arrival_s=0.0, priority=np.int32(1))  # type: ignore[arg-type]
        add = decode_command(encode(Add.of(request, 1)))
        assert isinstance(add, Add)
        back = add.to_request()
        assert (back.prompt_token_ids, back.specs, back.priority) == ([1, 2, 3], request.specs, 1)
    config = EngineConfig(max_num_seqs=np.int64(4), seed=torch.tensor(1), pinned_prefixes=[np.array([1, 2])])
    assert msgspec.msgpack.decode(encode(config), type=EngineConfig) == config


def test_a_request_arrives_as_the_scheduler_needs_it() -> None:
    inputs = InputProcessor(None, vocab_size=1000, max_model_len=100, eos_token_ids=[7, 8], seed=0)
    params = SamplingParams(
        n=3,
        seed=2**64 - 1,
        min_tokens=2,
        max_tokens=9,
        logit_bias={5: -1.5},
        allowed_token_ids=[1, 2],
        stop_token_ids=[3],
        logprobs=2,
        prompt_logprobs=1,
        top_p=0.5,
    )
    request, _ = inputs.make_request(
        "id", {"prompt_token_ids": [1, 2, 3], "cache_salt": "s\ud800"}, params, arrival_s=12.5, priority=-3, tenant="t"
    )
    add = decode_command(encode(Add.of(request, 41)))
    assert isinstance(add, Add)
    assert add.key == 41
    back = add.to_request()
    for name in ("request_id", "prompt_token_ids", "max_tokens", "end_token_ids", "eos_token_ids", "specs", "priority"):
        assert getattr(back, name) == getattr(request, name), name
    for name in ("arrival_s", "salt", "adapter", "tenant", "skip_prefix_cache_read"):
        assert getattr(back, name) == getattr(request, name), name
    for name in ("n", "min_tokens", "prompt_logprobs"):
        assert getattr(back.params, name) == getattr(params, name), name


@pytest.mark.parametrize("command", [Abort(3), Finish(3, 1, "stop"), Call(1, "x", {"a": [1, None]}), Stop()], ids=str)
def test_commands(command: object) -> None:
    assert decode_command(encode(command)) == command


def test_errors_keep_their_class_and_words() -> None:
    for error in (MemoryBudgetError("too big"), WeightsError("broken"), BadRequestError("no", param="n")):
        back = ErrorInfo.of(error).to_error()
        assert type(back) is type(error)
        assert str(back) == str(error)
        assert getattr(back, "param", None) == getattr(error, "param", None)
    assert str(ErrorInfo.of(KeyError("x")).to_error()) == "KeyError: 'x'"
    assert type(ErrorInfo.of(KeyError("x")).to_error()) is QuireError


def test_every_error_class_can_cross() -> None:
    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, QuireError)]
    assert len(kinds) > 5
    for kind in kinds:
        assert type(ErrorInfo.of(kind("words")).to_error()) is kind


def test_a_step_of_a_thousand_is_small_and_quick() -> None:
    keys = list(range(5_000, 6_000))
    news = StepNews(1.5, keys, [49_000 + i % 100 for i in range(1000)], [], [], [], [])
    assert len(encode(news)) < 7_000
    best_s = 1.0
    for _ in range(20):
        started = time.perf_counter()
        decode_news(encode(news))
        best_s = min(best_s, time.perf_counter() - started)
    assert best_s < 1e-3


def test_step_news() -> None:
    entry = TokenLogprobs(3, -0.5, 1, [3, 4], [-0.5, float("-inf")])
    news = StepNews(0.5, [1], [3], [], [], [Logprobs(1, [entry], None)], [Ended(1, "stop", "x", None)])
    assert decode_news(encode(news)) == news


def test_foreign_bytes_are_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_command(b"\x93\x07\x01\x02")
