"""The command line, run as a user runs it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from quire.cli.main import main


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
    common = ["--max-tokens", "8", "--temperature", "0", "--ignore-eos", "--quiet", *flags]
    texts = []
    for prompt in ("one", "two"):
        main(["generate", prompt, *common])
        texts.append(capsys.readouterr().out)
    main(["generate", "one", "two", *common])
    assert capsys.readouterr().out == f"> one\n{texts[0]}\n> two\n{texts[1]}"


def test_generate_json(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "a", "b", "--json", "--n", "2", "--max-tokens", "4", "--ignore-eos", *flags]
    assert main(arguments) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(r["prompt"] for r in records) == ["a", "b"]
    assert all(len(r["outputs"]) == 2 and r["outputs"][1]["finish_reason"] == "length" for r in records)
    assert all(r["metrics"]["first_token_s"] > 0 for r in records)


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
        (["chat", "--n", "2"], 2, "--n"),
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


def test_unknown_flag_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["generate", "--no-such-flag"], []):
        with pytest.raises(SystemExit) as refused:
            main(arguments)
        assert refused.value.code == 2
    assert "usage" in capsys.readouterr().err
