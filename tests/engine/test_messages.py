"""What crosses the border arrives as it left."""

from __future__ import annotations

import time
from array import array
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire import errors
from quire.config import EngineConfig
from quire.engine.brownout import BrownoutSettings
from quire.engine.inputs import InputProcessor
from quire.engine.launch import EngineProcessOptions
from quire.engine.link import commands, decode_launch, encode_launch, messages
from quire.engine.messages import Abort, Add, Call, Ended, ErrorInfo, Finish, Launch, Logprobs, StepOutputs, Stop
from quire.errors import BadRequestError, MemoryBudgetError, QuireError, WeightsError
from quire.params import SamplingParams, SamplingSpec
from quire.plan import TokenLogprobs
from quire.request import Request


def test_a_config_arrives_whole() -> None:
    config = EngineConfig(
        model="m", pinned_prefixes=["text", [1, 2]], hf_overrides={"a": {"b": [1]}}, spec_method="suffix", spec_tokens=7
    )
    launch = Launch(
        config=config,
        link=7,
        parent_pid=1,
        dies_with_parent_thread=True,
        log_level=20,
        options=EngineProcessOptions(step_timeout_s=1.5, dump_dir="/d", brownout=BrownoutSettings(enabled=False)),
    )
    back = decode_launch(encode_launch(launch))
    assert back == launch
    assert back.config.given == config.given


def test_numbers_of_numpy_and_tensors_cross_as_pythons() -> None:
    inputs = InputProcessor(None, vocab_size=1000, max_model_len=100, eos_token_ids=frozenset([7, 8]), seed=0)
    ints = ("n", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "top_k")
    params = SamplingParams(
        **{name: np.int64(2) for name in ints},
        temperature=np.float32(0.5),
        logit_bias={np.int64(5): np.float64(-1.5)},
        allowed_token_ids=np.array([1, 2]),
        stop_token_ids=torch.tensor([3]),
    )
    for prompt in (torch.tensor([1, 2, 3]), np.array([1, 2, 3]), [1, np.int64(2), torch.tensor(3)]):
        request = inputs.make_request("id", prompt, params, arrival_s=0.0, priority=np.int32(1)).request  # type: ignore[arg-type]
        add = commands.decode(commands.encode(Add(1, request)))
        assert isinstance(add, Add)
        back = add.request
        assert (back.prompt_token_ids, back.spec, back.priority) == ([1, 2, 3], request.spec, 1)
    config = EngineConfig(max_num_seqs=np.int64(4), seed=torch.tensor(1), pinned_prefixes=[np.array([1, 2])])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


def test_a_request_arrives_as_it_was_made() -> None:
    inputs = InputProcessor(None, vocab_size=1000, max_model_len=100, eos_token_ids=frozenset([7, 8]), seed=0)
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
    request = inputs.make_request(
        "id", {"prompt_token_ids": [1, 2, 3], "cache_salt": "s\ud800"}, params, arrival_s=12.5, priority=-3, tenant="t"
    ).request
    add = commands.decode(commands.encode(Add(41, request)))
    assert isinstance(add, Add)
    assert add.key == 41
    assert asdict(add.request) == asdict(request)
    assert [add.request.spec_of(i) for i in range(3)] == [request.spec_of(i) for i in range(3)]
    assert type(add.request.spec.allowed_token_ids) is array


def test_the_sequences_of_a_request_differ_in_their_index() -> None:
    request = Request(
        request_id="a",
        prompt_token_ids=[1],
        max_tokens=1,
        end_token_ids=frozenset(),
        spec=SamplingSpec(seed=3, prompt_logprobs=1),
        n=2,
    )
    assert request.spec_of(0) is request.spec
    assert request.spec_of(1) == SamplingSpec(seed=3, index=1)


@pytest.mark.parametrize("command", [Abort(3), Finish(3, 1, "stop"), Call(1, "x", {"a": [1, None]}), Stop()], ids=str)
def test_commands(command: Any) -> None:
    assert commands.decode(commands.encode(command)) == command


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
    outputs = StepOutputs(1.5, keys, [49_000 + i % 100 for i in range(1000)])
    assert len(messages.encode(outputs)) < 7_000
    best_s = 1.0
    for _ in range(20):
        started = time.perf_counter()
        messages.decode(messages.encode(outputs))
        best_s = min(best_s, time.perf_counter() - started)
    assert best_s < 1e-3


def test_step_outputs() -> None:
    entry = TokenLogprobs(3, -0.5, 1, [3, 4], [-0.5, float("-inf")])
    parts: Any = {"logprobs": [Logprobs(1, [entry], None)], "ended": [Ended(1, "stop", "x", None)]}
    outputs = StepOutputs(0.5, [1], [3], **parts)
    assert messages.decode(messages.encode(outputs)) == outputs


def test_foreign_bytes_are_refused() -> None:
    for data in (b"\x93\x07\x01\x02", b"\x00\x93\x07\x01\x02"):
        with pytest.raises((IndexError, msgspec.MsgspecError)):
            commands.decode(data)
