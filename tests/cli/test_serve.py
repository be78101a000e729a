"""quire serve as an operator runs it: its flags, and one real server from its first line to its exit code."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serve_fakes import running

from quire.cli import serve
from quire.cli.main import main
from quire.cli.serve import GROUPS, engine_names, help_of, settings_field
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.server.settings import ServerSettings

SHOWN = [flag for flags in GROUPS.values() for flag in flags]


def read(*arguments: str, environ: dict[str, str] | None = None) -> tuple[EngineConfig, ServerSettings, list[str]]:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    (model,), settings, warnings = serve.read(parser.parse_args(["serve", *arguments]), environ or {})
    return model.config, settings, warnings


def test_without_flags_it_is_the_default_model_on_this_machine_alone() -> None:
    config, settings, warnings = read()
    assert config == EngineConfig()
    assert settings == ServerSettings()
    assert warnings == []


def test_vllms_names_reach_the_engine() -> None:
    config, settings, _ = read(
        *("org/model", "--max-model-len", "4K", "-tp", "1", "--kv-cache-dtype", "float32", "--dtype", "float32"),
        *("--no-enable-prefix-caching", "--max-num-batched-tokens", "2048", "--gpu-memory-utilization", "0.5"),
        *("--scheduling-policy", "priority", "--swap-space", "1", "--hf-overrides", '{"a": 1}', "--seed", "7"),
        *("--served-model-name", "one", "two", "--host", "0.0.0.0", "--port", "9000"),
    )
    assert config.model == "org/model"
    assert config.max_model_len == 4096
    assert not config.enable_prefix_caching
    assert config.swap_space_gb == 1.0
    assert config.hf_overrides == {"a": 1}
    assert config.seed == 7
    assert settings.served_model_names == ("one", "two")
    assert (settings.host, settings.port) == ("0.0.0.0", 9000)
    assert read("--max-model-len", "auto")[0].max_model_len is None
    assert read("--max-model-len", "-1")[0].max_model_len is None


def test_the_model_may_be_positional_or_a_flag_or_a_variable() -> None:
    assert read("m")[0].model == "m"
    assert read("--model", "m")[0].model == "m"
    assert read("m", "--model", "m")[0].model == "m"
    assert read("m", environ={"QUIRE_MODEL": "other"})[0].model == "m"
    assert read(environ={"QUIRE_MODEL": "other"})[0].model == "other"
    with pytest.raises(ConfigError, match="two models are given"):
        read("m", "--model", "other")


def test_keys_from_flags_variables_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice:sk-1\n")
    _, settings, _ = read("--api-key", "a,b", "--api-key", "c", "--api-key-file", str(tmp_path / "keys"))
    assert [key.key for key in settings.api_keys] == ["a,b", "c", "sk-1"]
    assert settings.api_keys[2].tenant == "alice"
    assert [key.key for key in read(environ={"QUIRE_API_KEY": "a b"})[1].api_keys] == ["a", "b"]
    with pytest.raises(ConfigError, match="--api-key: an API key must be"):
        read("--api-key", "two words")


def test_seconds_and_sizes_reach_the_settings() -> None:
    flags = ["--drain-timeout", "5", "--max-body-bytes", "1M", "--cors-origin", "*", "--no-brownout"]
    _, settings, _ = read(*flags, "--max-waiting-requests", "9", "--log-format", "json")
    assert settings.drain_timeout_s == 5.0
    assert settings.max_body_bytes == 1 << 20
    assert settings.cors_origins == ("*",)
    assert not settings.brownout
    assert settings.max_waiting_requests == 9
    assert settings.log_format == "json"


def test_every_setting_has_a_flag_and_every_flag_a_setting() -> None:
    reached = {settings_field(flag.name) for flag in SHOWN} - engine_names() - {"api_key_file", "memory_shares"}
    assert reached == {field.name for field in dataclasses.fields(ServerSettings)}
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    short = {"spec_method", "spec_model", "spec_tokens", "task"}  # keys of speculative_config, and another spelling
    set_by_others = {"given", "skip_tokenizer_init", "kv_listen"}
    assert {flag.name for flag in SHOWN} & engine_names() == (known | short) - set_by_others


def test_help_is_grouped_and_tells_defaults_and_precedence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert [title for title in GROUPS if f"\n{title}:\n" in text] == list(GROUPS)
    assert all(flag.option in text and flag.help in text for flag in SHOWN)
    assert "(default 127.0.0.1)" in text
    assert "the first that has it wins" in text
    assert "--tool-parser-plugin" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert "(default 60)" in help_of(next(flag for flag in SHOWN if flag.name == "drain_timeout"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tensor-parallel-size", "0"], "tensor_parallel_size must be a whole number >= 1"),
        (["-tp", "2", "-pp", "0"], "pipeline_parallel_size must be a whole number >= 1"),
        (["--nnodes", "2"], "--nnodes is not supported"),
        (["--max-loras", "4"], "max_loras has no effect without adapters: set enable_lora=True"),
        (["--enable-lora", "--max-loras", "4", "--max-cpu-loras", "2"], "max_cpu_loras=2 is less than max_loras=4"),
        (["--lora-modules", "a=b"], "--lora-modules needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "a"], "lora_modules must be NAME=PATH"),
        (["--enable-auto-tool-choice", "--tool-parser-plugin", "x.py"], "is not supported"),
        (["--allowed-origins", '["*"]'], "use --cors-origin"),
        (["--speculative-config", '{"method": "eagle"}'], "method in speculative_config must be one of"),
        (["--speculative-config", "ngram"], "--speculative-config must be JSON"),
        (["--spec-method", "ngram", "--spec-tokens", "0"], "num_speculative_tokens in speculative_config must be"),
        (["--port", "many"], "--port must be a whole number"),
        (["--port", "99999"], "port must be between 0 and 65535"),
        (["--max-model-len", "long"], "max_model_len must be auto or a whole number"),
        (["--block-size", "24"], "block_size must be one of"),
        (["--api-key-file", "/no/such/file"], "api_key_file /no/such/file: No such file"),
        (["--ssl-certfile", "/no/such/cert"], "ssl_certfile /no/such/cert: No such file"),
        (["--config", "/no/such.yaml"], "--config /no/such.yaml: No such file"),
        (["--model", "./nowhere", "--port", "0"], "nowhere"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        if name not in ("QUIRE_HOME", "QUIRE_CPU_ISA"):
            monkeypatch.delenv(name)
    if "nowhere" in words:
        return _a_missing_model_is_one_line(arguments, words)
    assert main(["serve", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1
    return None


def _a_missing_model_is_one_line(arguments: list[str], words: str) -> None:
    """In a process of its own: it gets as far as the engine."""
    with running(["-m", "quire.cli.main", "serve", *arguments]) as server:
        assert server.exit_code(60) == 1
        last = server.lines[-1]
        assert last.startswith("quire: error:")
        assert words in last
        assert not any("Traceback" in line for line in server.lines)


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "is in use" in capsys.readouterr().err


def test_a_real_engine_serves_dies_and_takes_the_server_with_it(tiny_model: Path) -> None:
    small = ["--load-format", "dummy", "--device", "cpu", "--num-threads", "1", "--kv-cache-memory-bytes", "4M"]
    with running(["-m", "quire.cli.main", "serve", str(tiny_model), "--port", "0", *small]) as server:
        assert server.get("/health")[1]["status"] == "starting"
        ready = server.wait_for("ready at").string
        assert "blocks" in ready
        body = {"model": str(tiny_model), "prompt": "hello", "max_tokens": 4, "temperature": 0}
        status, answer, _ = server.post("/v1/completions", body)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 4
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        assert server.exit_code() == 1
        assert any("SIGKILL" in line for line in server.lines)


def test_other_commands_and_the_help_need_none_of_the_servers_packages() -> None:
    code = (
        "import sys\n"
        "for name in ('starlette', 'uvicorn', 'zmq', 'msgspec', 'prometheus_client', 'yaml', 'httptools'):\n"
        "    sys.modules[name] = None\n"
        "from quire.cli.main import main\n"
        "sys.exit(main(['serve', '--port', '0']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'quire-llm[server]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def read_several(*arguments: str) -> list[tuple[str, tuple[str, ...], float | None]]:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    models, _, _ = serve.read(parser.parse_args(["serve", *arguments]), {})
    return [(model.config.model, model.names, model.config.memory_share) for model in models]


def test_several_models_with_names_and_shares() -> None:
    assert read_several("a", "b") == [("a", (), None), ("b", (), None)]
    flags = ("--served-model-name", "x", "y", "--memory-shares", "0.6", "0.4")
    assert read_several("a", "b", *flags) == [("a", ("x",), 0.6), ("b", ("y",), 0.4)]
    for wrong, message in (
        (("a", "b", "--served-model-name", "x"), "1 values for 2 models"),
        (("a", "b", "--memory-shares", "1"), "1 values for 2 models"),
        (("a", "b", "--memory-shares", "2", "1"), "memory_share"),
        (("a", "--memory-shares", "1"), "several models"),
        (("a", "b", "--model", "c"), "given twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_several(*wrong)


def test_models_of_a_file_have_settings_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text(
        "max-num-seqs: 8\n"
        "models:\n"
        "- {model: a, served-model-name: x, memory-share: 0.7}\n"
        "- {model: b, served-model-name: [y, z], max-num-seqs: 2}\n"
    )
    assert read_several("--config", str(path)) == [("a", ("x",), 0.7), ("b", ("y", "z"), None)]
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    models, _, _ = serve.read(parser.parse_args(["serve", "--config", str(path)]), {})
    assert [model.config.max_num_seqs for model in models] == [8, 2]
    with pytest.raises(ConfigError, match="leave out one of them"):
        read_several("c", "--config", str(path))
    for lines, message in (
        ("models: a\n", "must be a list"),
        ("models:\n- {port: 1, model: a}\n", "port in model 1 of .* is a setting of the server"),
        ("models:\n- {served-model-name: a}\n", "names no model"),
        ("models:\n- {modle: a}\n", "did you mean"),
        ("served-model-name: x\nmodels:\n- {model: a}\n", "each has its own"),
    ):
        path.write_text(lines)
        with pytest.raises(ConfigError, match=message):
            read_several("--config", str(path))


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([{"model": "a"}, {"model": "a"}], "two models are named 'a'"),
        ([{"model": "a"}, {"model": "b", "data_parallel_size": 2}], "data_parallel_size"),
        ([{"model": "a"}, {"model": "b", "tensor_parallel_size": 2}], "tensor_parallel_size"),
    ],
)
def test_models_that_do_not_go_together(models: list[dict[str, Any]], message: str) -> None:
    from quire.server.run import settle_models
    from quire.server.settings import ModelSettings

    with pytest.raises(ConfigError, match=message):
        settle_models([ModelSettings(EngineConfig(**one)) for one in models])
