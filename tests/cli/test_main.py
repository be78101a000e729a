"""The command line, run as a user runs it."""

from __future__ import annotations

import ast
import io
import json
import logging
import math
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.models.decoder import Decoder


@pytest.fixture
def flags(tiny_model: Path) -> list[str]:
    small = ["--load-format", "dummy", "--device", "cpu", "--num-threads", "1", "--kv-cache-memory-bytes", str(4 << 20)]
    return ["--model", str(tiny_model), *small]


def test_generate_streams_text_to_stdout_and_the_account_to_stderr(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hello", "--max-tokens", "8", "--temperature", "0", "--ignore-eos", *flags]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert "8 tokens out, 5 in" in err
    assert "KV cache: 256 blocks of 16 tokens, at most 1 in use" in err
    assert "prefix cache: 0 of 5 prompt tokens found" in err


def test_several_prompts_never_mix(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--max-tokens", "8", "--temperature", "0", "--ignore-eos", *flags]
    texts = []
    for prompt in ("one", "two"):
        main(["generate", prompt, *common, "--quiet"])
        texts.append(capsys.readouterr().out)
    main(["generate", "one", "two", *common])
    assert capsys.readouterr().out == f"> one\n{texts[0]}\n> two\n{texts[1]}"
    main(["generate", "one", "two", *common, "--quiet"])
    assert capsys.readouterr() == ("".join(texts), ""), "the answers and nothing else"


def test_generate_json(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "a", "b", "--json", "--n", "2", "--max-tokens", "4", "--ignore-eos", *flags]
    assert main(arguments) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(r["prompt"] for r in records) == ["a", "b"]
    assert all(len(r["outputs"]) == 2 and r["outputs"][1]["finish_reason"] == "length" for r in records)
    assert all(r["metrics"]["first_token_s"] > 0 for r in records)


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_model_whose_logits_are_no_numbers_is_a_failure(
    more: list[str], flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda *args, **kwargs: logits(*args, **kwargs).fill_(math.nan))
    assert main(["generate", "hello", "--max-tokens", "4", *more, *flags]) == 1
    assert "quire: prompt 0 failed: the model's logits are not finite (NaN or infinity)" in capsys.readouterr().err


def test_generate_reads_stdin(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["generate", "--max-tokens", "2", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "hello"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["generate", *flags]) == 2
    assert "no prompt" in capsys.readouterr().err


def test_chat_keeps_a_history(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "first\nsecond\n/stats\n/reset\n/nonsense\n\n/help\nthird\n/exit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    with pytest.raises(SystemExit) as left:
        main(["chat", "--system", "Be brief.", "--max-tokens", "4", "--temperature", "0", "--ignore-eos", *flags])
    assert left.value.code == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) >= 3
    assert "unknown command /nonsense" in err
    assert "forgotten" in err
    # The second turn's prompt holds the first: its blocks were found.
    found = int(err.split("prefix cache: ")[1].split(" of")[0])
    assert found > 16


def test_chat_that_grows_too_long_says_what_to_do(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 400 + "\nshort\n"))
    assert main(["chat", "--max-tokens", "4", *flags]) == 0
    assert "/reset" in capsys.readouterr().err


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    assert "native kernels" in capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["torch"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["generate", "x", "--block-size", "24"], 2, "block_size must be one of"),
        (["generate", "x", "--model", "./nowhere"], 1, "nowhere"),
        (["generate", "x", "--top-p", "7"], 2, "top_p"),
        (["generate", "x", "--max-model-len", "many"], 2, "max_model_len"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], code: int, words: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments if "--model" in arguments else arguments + flags
    assert main(given) == code
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "--max-tokens", "0"], "max_tokens must be >= 1"),
        (["generate", "x", "--temperature", "-1"], "temperature must be >= 0"),
        (["generate", "x", "--n", "2", "--temperature", "0"], "n=2 with temperature=0"),
        (["generate", "x", "--stop", ""], "stop must be"),
        (["chat", "--max-tokens", "0"], "max_tokens must be >= 1"),
    ],
)
def test_bad_sampling_is_refused_before_anything_is_loaded(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        pytest.fail("the model was loaded first")

    monkeypatch.setattr("quire.cli.session.Session.__init__", load)
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompts", "words"),
    [([""], "the prompt is empty"), (["a", ""], "prompt 1 is empty"), (["", "--chat"], "is empty")],
)
def test_an_empty_prompt_is_refused_before_anything_is_loaded(
    prompts: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.session.Session.__init__", lambda *_, **__: pytest.fail("the model was loaded"))
    assert main(["generate", *prompts]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "hello"], ["chat"]])
def test_how_much_is_said(
    command: list[str],
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What log handlers print differs between a test and a terminal: records are what reaches them.
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    told: dict[str, list[str]] = {}
    for extra in ("", "--quiet", "--verbose"):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        logging.getLogger("quire").setLevel(logging.INFO)
        caplog.clear()
        assert main([*command, *([extra] if extra else []), "--max-tokens", "4", "--ignore-eos", *flags]) == 0
        out, err = capsys.readouterr()
        told[extra] = [record.getMessage() for record in caplog.records if record.name == "quire"]
        assert out
        if extra == "--quiet":
            assert err == ""
    assert told["--quiet"] == []
    [line] = told[""]
    assert " on cpu, " in line and "ready in" in line
    assert [
        any(text.startswith(part) for text in told["--verbose"]) for part in ("memory: ", "start-up: ", "# CPU")
    ] == [
        True,
        True,
        True,
    ]


def test_help_is_short_and_has_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    for command, max_tokens in (("generate", 256), ("chat", 1024)):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = capsys.readouterr().out
        assert text.splitlines()[1] == "", "the usage is one line"
        assert f"--max-tokens N                      most tokens to generate (default {max_tokens})" in text
        assert "default: the model's own" in text
        assert "LONG_PREFILL_TOKEN_THRESHOLD" not in text and "--long-prefill-token-threshold N " in text
    assert " --n " not in text, "a chat has one line"


def test_the_defaults_that_help_names_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.cli import chat, generate
    from quire.cli.options import sampling_params
    from quire.cli.parser import Parser
    from quire.params import SamplingParams

    own = SamplingParams(temperature=0.3)
    for command, words, max_tokens in ((generate, ["generate"], 256), (chat, ["chat"], 1024)):
        parser = Parser(prog="quire")
        command.add_parser(parser.add_subparsers())
        params = sampling_params(parser.parse_args(words), own)
        assert (params.max_tokens, params.temperature, params.n) == (max_tokens, 0.3, 1)
        assert sampling_params(parser.parse_args([*words, "--max-tokens", "7"]), own).max_tokens == 7


def test_switches_have_both_spellings() -> None:
    from quire.cli import generate
    from quire.cli.options import engine_config
    from quire.cli.parser import Parser

    parser = Parser(prog="quire")
    generate.add_parser(parser.add_subparsers())
    for words, expected in ((["--no-enable-prefix-caching"], False), (["--enable-prefix-caching"], True), ([], True)):
        assert engine_config(parser.parse_args(["generate", *words])).enable_prefix_caching is expected


def test_ctrl_c_while_the_commands_are_set_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(subparsers: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quire.cli.serve.add_parser", interrupted)
    assert main(["env"]) == 130
    assert capsys.readouterr().err == "quire: interrupted\n"


def test_what_is_slow_to_import_is_imported_where_ctrl_c_is_taken() -> None:
    code = "import sys, quire.cli.main; print(sorted(m for m in sys.modules if m.startswith('quire.')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(ast.literal_eval(found)) == {"quire.cli", "quire.cli.main", "quire.errors"}
