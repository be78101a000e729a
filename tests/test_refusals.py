"""What vLLM has and Quire does not: refused by name and with the reason wherever it is written, unless it changes
nothing."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

import quire
from quire import refusals
from quire.cli import serve
from quire.cli.serve import GROUPS, REFUSED_FLAGS
from quire.config import EngineConfig
from quire.errors import BadRequestError, ConfigError
from quire.params import SamplingParams
from quire.refusals import Refusal


def other_than(refusal: Refusal) -> Any:
    """A value that means something."""
    kinds = {type(value) for value in refusal.neutral}
    if kinds == {bool}:
        return next((value for value in (True, False) if value not in refusal.neutral), "neither")
    return 12345 if kinds <= {int, float} else ["something"]


def test_an_engine_argument_is_taken_where_it_changes_nothing_and_else_refused_with_its_reason() -> None:
    for name in refusals.ENGINE:
        refusal = refusals.ENGINE[name]
        assert name not in {field.name for field in dataclasses.fields(EngineConfig)}, f"{name} is served and refused"
        for value in (None, *refusal.neutral):
            assert EngineConfig(**{name: value}) == EngineConfig()
        with pytest.raises(ConfigError) as refused:
            EngineConfig(**{name: other_than(refusal)})
        assert name in str(refused.value)
        assert refusal.why in str(refused.value)


def test_what_is_refused_is_left_out_or_replaced() -> None:
    assert Refusal("Quire reads text").message("x") == "x is not supported: Quire reads text. Leave it out"
    assert Refusal("use y", (1, 0)).message("x") == "x is not supported: use y instead, or set it to 1"


def test_a_sampling_field_likewise() -> None:
    for name in refusals.SAMPLING:
        refusal = refusals.SAMPLING[name]
        for value in (None, *refusal.neutral):
            assert SamplingParams(**{name: value}) == SamplingParams.from_optional(**{name: value}) == SamplingParams()
        with pytest.raises(BadRequestError) as refused:
            SamplingParams(**{name: other_than(refusal)})
        assert refused.value.param == name
        assert refusal.why in str(refused.value)


@functools.cache
def serve_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return parser


def read_flags(*arguments: str, environ: dict[str, str] | None = None) -> EngineConfig:
    return serve.read(serve_parser().parse_args(["serve", *arguments]), environ or {})[0][0].config


def test_a_flag_of_serve_likewise() -> None:
    for flag in REFUSED_FLAGS:
        check_flag(flag)


def check_flag(flag: Any) -> None:
    refusal = {**refusals.ENGINE, **refusals.SERVER}[flag.name]
    meaning = other_than(refusal)
    if flag.is_switch:
        for value in refusal.neutral:
            assert read_flags(flag.option if value else flag.option.replace("--", "--no-", 1), "a-model").model
        if meaning != "neither":
            with pytest.raises(ConfigError, match=f"^{flag.option} is not supported"):
                read_flags(flag.option if meaning else flag.option.replace("--", "--no-", 1))
        return
    for value in refusal.neutral:
        if not isinstance(value, list):
            text = value if isinstance(value, str) else json.dumps(value)
            assert read_flags(flag.option, text, "a-model").model == "a-model"
    with pytest.raises(ConfigError, match=f"^{flag.option} is not supported"):
        read_flags(flag.option, "12345")


def test_flags_are_refused_in_variables_and_files_too(tmp_path: Path) -> None:
    assert read_flags(environ={"QUIRE_TENSOR_PARALLEL_SIZE": "1", "QUIRE_ENABLE_LORA": "false"}) == EngineConfig()
    with pytest.raises(ConfigError, match="QUIRE_TOOL_SERVER is not supported: Quire runs no code from flags"):
        read_flags(environ={"QUIRE_TOOL_SERVER": "x"})
    file = tmp_path / "quire.yaml"
    file.write_text("diffusion-config: {method: x}\n")
    with pytest.raises(ConfigError, match=r"diffusion-config in .* is not supported: Quire serves no diffusion"):
        read_flags("--config", str(file))
    file.write_text("max-prompt-adapter: 1\n")
    with pytest.raises(ConfigError, match=r"is no flag of quire serve$"):  # none that is refused is suggested
        read_flags("--config", str(file))


def test_every_argument_that_serve_has_is_shown_or_refused() -> None:
    shown = {name for flags in GROUPS.values() for flag in flags for name in flag.names}
    assert shown | {flag.name for flag in REFUSED_FLAGS} >= set(refusals.ENGINE) | set(refusals.SERVER)
    served = EngineConfig(download_dir="/d", num_gpu_blocks_override=9)
    assert read_flags("--download-dir", "/d", "--num-gpu-blocks-override", "9") == served
    assert read_flags(environ={"QUIRE_DOWNLOAD_DIR": "/d", "QUIRE_NUM_GPU_BLOCKS_OVERRIDE": "9"}) == served


def test_an_unknown_argument_gets_the_nearest_that_is_served() -> None:
    with pytest.raises(ConfigError, match=r"'max_model_length'. Did you mean max_model_len\?"):
        EngineConfig(max_model_length=5)  # type: ignore[call-arg]
    with pytest.raises(BadRequestError, match=r"'max_new_tokens'. Did you mean max_tokens\?"):
        SamplingParams(max_new_tokens=5)  # type: ignore[call-arg]


@pytest.mark.parametrize("owner", refusals.METHODS)
def test_methods_are_there_to_say_why_not(owner: str) -> None:
    for name, refusal in refusals.METHODS[owner].items():
        method = getattr(getattr(quire, owner), name)
        with pytest.raises(BadRequestError, match=f"^{owner}.{name} is not supported") as refused:
            method(None, ["a prompt"], use_tqdm=False)
        assert refusal.why in str(refused.value)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("quire", "LLM SamplingParams EngineArgs AsyncEngineArgs AsyncLLMEngine PromptType PoolingParams"),
        ("quire.sampling_params", "SamplingParams RequestOutputKind BeamSearchParams StructuredOutputsParams"),
        ("quire.sampling_params", "GuidedDecodingParams"),
        ("quire.lora.request", "LoRARequest"),
        ("quire.inputs", "TextPrompt TokensPrompt PromptType"),
        ("quire.outputs", "RequestOutput CompletionOutput Logprob"),
        ("quire.engine.arg_utils", "EngineArgs AsyncEngineArgs"),
        ("quire.engine.llm_engine", "LLMEngine"),
        ("quire.utils", "random_uuid"),
    ],
)
def test_programs_find_what_they_import(module: str, names: str) -> None:
    for name in names.split():
        found = getattr(importlib.import_module(module), name)
        if name in refusals.CLASSES:
            assert not isinstance(None, found)
            with pytest.raises(BadRequestError, match=f"^{name} is not supported: {refusals.CLASSES[name].why}"):
                found("adapter", 1, "/path")


def test_engine_args_can_be_spread_into_an_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    args = quire.EngineArgs(model="m", nnodes=1, max_seq_len=64, max_num_seqs=None, gpu_memory_utilization=0.5)
    again = EngineConfig(**dataclasses.asdict(args))
    assert again == args
    assert again.max_model_len == 64
    assert again.given == args.given == {"model", "max_model_len", "max_num_seqs", "gpu_memory_utilization"}
    made = []
    monkeypatch.setattr(quire.LLM, "__init__", lambda self, **given: made.append(EngineConfig(**given)))
    quire.LLM.from_engine_args(args)
    assert made == [args]
    assert again.replace(max_model_len=None) == EngineConfig(model="m", gpu_memory_utilization=0.5)
