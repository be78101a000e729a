from __future__ import annotations

import shutil
import subprocess

import pytest

from quire.cli.main import main


@pytest.fixture
def script(capsys):
    def make(shell: str) -> str:
        assert main(["completion", shell]) == 0
        return capsys.readouterr().out

    return make


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_what_the_parser_has(script):
    def complete(*words: str) -> list[str]:
        quoted = " ".join(f"'{word}'" for word in words)
        ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _quire; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", made + "\n" + ask], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.split()

    made = script("bash")
    assert complete("quire", "be") == ["bench"]
    assert {"generate", "chat", "serve", "rm", "completion", "--version"} <= set(complete("quire", ""))
    assert complete("quire", "bench", "thr") == ["throughput"]
    assert complete("quire", "bench", "latency", "--rep") == ["--repeats"]
    assert complete("quire", "chat", "--sys") == ["--system"]
    assert complete("quire", "chat", "--model", "smollm2-1") == ["smollm2-135m", "smollm2-1.7b"]
    assert complete("quire", "pull", "qwen3-0") == ["qwen3-0.6b"]
    assert complete("quire", "plan", "--device", "") == ["auto", "cpu", "cuda"]
    assert complete("quire", "completion", "") == ["bash", "zsh", "fish", "-h", "--help"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_take_their_script(script, shell):
    made = script(shell)
    assert "--repeats" in made if shell == "zsh" else "-l repeats" in made
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    subprocess.run([shell, "-n"], input=made, text=True, check=True, capture_output=True)
