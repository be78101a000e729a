"""Mistyped flags, as a user meets them: one line, the nearest flag, exit code 2, and nothing has run."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from quire.cli.main import main, make_parser
from quire.cli.parser import Parser

ROOT = Path(__file__).parent.parent.parent / "quire"


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("quire: error: ") and err.count("\n") == 1, err
    return err.removeprefix("quire: error: ").rstrip()


@pytest.mark.parametrize(
    ("words", "flag", "command", "near"),
    [
        ("serve --prot 8001", "--prot", "serve", "--port"),  # 8001 is taken for MODEL
        ("serve --prot=8001", "--prot", "serve", "--port"),
        ("serve smollm2 -prot 8001", "-prot", "serve", "--port"),
        ("generate hi --temprature 0", "--temprature", "generate", "--temperature"),
        ("generate --temprature -1 hi", "--temprature", "generate", "--temperature"),
        ("generate hi --max-tokens x --temprature 0", "--temprature", "generate", "--temperature"),
        ("chat --sytem x", "--sytem", "chat", "--system"),
        ("pull --revison main owner/name", "--revison", "pull", "--revision"),
        ("models --jsn", "--jsn", "models", "--json"),
        ("env --jsn", "--jsn", "env", "--json"),
        ("plan --memry 80GB", "--memry", "plan", "--memory"),
        ("lab --onyl memory", "--onyl", "lab", "--only"),
        ("bench throughput --repeat 1", "--repeat", "bench throughput", "--repeats"),
        ("bench serve --base-ulr x", "--base-ulr", "bench serve", "--base-url"),
        ("bench compare --polt a.png a.json b.json", "--polt", "bench compare", "--plot"),
        # What argparse finds first is that block-size=8 is no benchmark.
        ("bench sweep --vry block-size=8 throughput", "--vry", "bench sweep", "--vary"),
        ("bench sweep --vary block-size=8 throughput --repeat 1", "--repeat", "bench throughput", "--repeats"),
        ("bench sweep --vary blok-size=8 throughput", "--blok-size", "bench throughput", "--block-size"),
        ("generate hi --temp 0", "--temp", "generate", "--temperature"),
        # What llama.cpp calls them.
        ("serve -m smollm2", "-m", "serve", "--model"),
        ("serve --ctx-size 4096", "--ctx-size", "serve", "--max-model-len"),
        ("serve -c 4096", "-c", "serve", "--max-model-len"),
        ("chat --threads 2", "--threads", "chat", "--num-threads"),
        # argparse takes what begins like a flag with one dash for that flag, here -pp and -tp.
        ("serve -p 8000", "-p", "serve", "--port"),
        ("serve -t 2", "-t", "serve", "--num-threads"),
    ],
)
def test_a_mistyped_flag_is_named_with_the_nearest(
    words: str, flag: str, command: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = f"{flag} is no flag of quire {command}: did you mean {near}? (see quire {command} --help)"
    assert refusal(words.split(), capsys) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--verison", "--verison is no flag of quire: did you mean --version? (see quire --help)"),
        ("chat --n 2", "--n is no flag of quire chat (see quire chat --help)"),
        ("serve -d 2", "-d is no flag of quire serve (see quire serve --help)"),
        (
            "chat qwen3-0.6b",
            "'qwen3-0.6b' is one argument too many (a model is given as --model qwen3-0.6b) (see quire chat --help)",
        ),
        ("serve --colour red", "--colour is no flag of quire serve (see quire serve --help)"),
        ("pull owner/name other", "'other' is one argument too many (see quire pull --help)"),
        (
            "serve --hf-overrides.rope=3",
            "--hf-overrides.rope sets one entry, and --hf-overrides takes them all, as JSON (see quire serve --help)",
        ),
        (
            "generate one --max-tokens 3 two",
            "'two' stands apart from the other PROMPTs: put the flags before or behind all of them "
            "(see quire generate --help)",
        ),
        (
            "generate x --max-tokens many",
            "argument --max-tokens: invalid int value: 'many' (see quire generate --help)",
        ),
        (
            "completion",
            "the following arguments are required: SHELL: there are bash, zsh, fish (see quire completion --help)",
        ),
        # Its flags are those of the benchmark inside, and none of them is at fault.
        (
            "bench sweep throughput --block-size 8",
            "the following arguments are required: --vary (see quire bench sweep --help)",
        ),
    ],
)
def test_other_mistakes_are_one_line_too(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(words.split(), capsys) == message


def test_no_command_and_a_wrong_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "COMMAND" in refusal([], capsys)
    assert "'generat'" in refusal(["generat"], capsys)


def test_a_value_is_never_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "secret" not in refusal(["serve", "--api-kye=secret"], capsys)
    assert "secret" not in refusal(["serve", "--api-kye", "secret"], capsys)


def test_flags_that_are_hidden_are_not_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean" not in refusal(["serve", "--max-prompt-adapter", "2"], capsys)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("generate hi --max-tok 3", "--max-tok"),
        ("plan llama-3.1-8b --gpu-memory 80", "--gpu-memory"),
        ("bench throughput --num-prompt 3", "--num-prompt"),
        ("bench sweep --var block-size=8 throughput", "--var"),
        ("bench sweep --vary block-size=8 throughput --num-prompt 3", "--num-prompt"),
        ("lab --qui", "--qui"),
        ("models --js", "--js"),
        ("--versio", "--versio"),
    ],
)
def test_prefixes_are_not_flags(words: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(words.split(), capsys).startswith(f"{flag} is no flag of quire")


def test_every_command_has_this_parser() -> None:
    waiting: list[argparse.ArgumentParser] = [make_parser()]
    names = set()
    while waiting:
        parser = waiting.pop()
        assert isinstance(parser, Parser) and not parser.allow_abbrev, parser.prog
        names.add(parser.prog)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()
    assert {"quire", "quire serve", "quire plan", "quire bench sweep"} <= names


def test_no_other_parser_takes_prefixes() -> None:
    for path in ROOT.rglob("*.py"):
        for call in re.findall(r"argparse\.ArgumentParser\((.*?)\n    parser\.", path.read_text(), re.S):
            assert "allow_abbrev=False" in call, path


def test_texts_and_numbers_that_begin_with_a_dash_are_no_flags() -> None:
    parser = Parser(prog="quire")
    parser.add_argument("texts", nargs="*")
    parser.add_argument("--level", type=float)
    parser.add_argument("-q")
    args = parser.parse_args(["-5", "- a list", "--level", "-1", "-q8"])
    assert (args.texts, args.level, args.q) == (["-5", "- a list"], -1.0, "8")
    assert parser.parse_args(["--", "--prot"]).texts == ["--prot"]


@pytest.mark.parametrize(("word", "meant"), [("generat", "generate"), ("sevre", "serve"), ("runbatch", "run-batch")])
def test_a_mistyped_command_is_answered_with_the_nearest(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([word, "something"])
    assert f"did you mean {meant}?" in capsys.readouterr().err
