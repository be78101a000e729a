"""`quire plan`, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fakes
import pytest

from quire.cli import plan as plan_command
from quire.cli.main import main
from quire.config import GIB, EngineConfig
from quire.executor.gpu_record import GpuRecord, record_key, remember_gpu
from quire.lab.shapes import read_model_spec


@pytest.fixture(autouse=True)
def _no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_command, "local_gpu", lambda: None)


def test_the_default_model_on_this_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 0
    out = capsys.readouterr().out
    assert "2 (K, V) × 30 layers × 3 KV heads × 64 × 4 B = 46,080 B" in out
    assert "1,073,741,824 B / 737,280 B = exactly 1,456 blocks = 23,296 tokens" in out
    assert "quire serve --model smollm2" in out


def test_a_gpu_and_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", "--gpu", "H100", "--prompt-len", "1024", "--output-len", "256"]) == 0
    out = capsys.readouterr().out
    assert "16 tokens × 131,072 B = 2,097,152 B" in out
    assert "1,024 in, 256 out" in out
    assert "--model meta-llama/Llama-3.1-8B-Instruct --max-model-len 1280" in out
    assert "fp8" in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("  quire serve")) <= 120


def test_what_the_user_set_goes_into_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "llama-3.1-8b", "--memory", "80GiB", "--block-size", "32", "--kv-cache-dtype", "fp8"])
    out = capsys.readouterr().out
    assert "--block-size 32 --kv-cache-dtype fp8" in out.split("Flags")[1]


def test_weights_that_stay_packed_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "smollm2"]) == 0
    text = capsys.readouterr().out
    assert "unpacked" in text and "weights near its 93.81 MiB" in text
    for arguments in (["smollm2", "--quantization", "int8"], ["smollm2", "--gpu", "h100"], ["llama-3.1-8b"]):
        main(["plan", *arguments])
        assert "unpacked" not in capsys.readouterr().out


def test_a_gpu_elsewhere_is_not_given_a_fixed_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", "--memory", "80GiB", "--prompt-len", "1024", "--output-len", "256"]) == 0
    flags = capsys.readouterr().out.split("Flags")[1]
    assert "--kv-cache-memory-bytes" not in flags and "with these: about " in flags


def test_memory_without_its_unit_is_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", "--memory", "80"]) == 2
    assert "did you mean 80GiB?" in capsys.readouterr().err


def test_json_is_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    mix = ["--mix", "200:400:3", "--mix", "6000:300", "--concurrency", "8"]
    assert main(["plan", "llama-3.1-8b", "--memory", "80GiB", "--json", *mix]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["memory_bytes"] == 80 * GIB
    assert [kind["share"] for kind in data["mix"]] == [3.0, 1.0]
    assert data["chosen"]["fit"]["typical"] >= 8


def test_a_config_file_and_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fakes.TINY_LLAMA))
    for model in (tmp_path, tmp_path / "config.json"):
        assert main(["plan", str(model), "--kv-cache-memory-bytes", "1MiB"]) == 0
        assert "1,048,576 B / 16,384 B = exactly 64 blocks" in capsys.readouterr().out


def test_too_large_says_so_and_what_would_hold_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-70b", "--gpu", "h100"]) == 1
    out = capsys.readouterr().out
    assert "does not fit: weights of 131.48 GiB" in out
    assert "it fits on 2 such GPUs" in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["./nowhere"], 1, "no such file"),
        (["--gpu", "h900"], 2, "give --memory instead"),
        (["--gpu", "h100", "--memory", "80GB"], 2, "give one of them"),
        (["--gpu", "h100", "--device", "cpu"], 2, "give one of them"),
        (["--memory", "lots"], 2, "a size such as 4GiB"),
        (["--memory", "0"], 2, "a size such as 4GiB"),
        (["--mix", "3"], 2, "PROMPT:OUTPUT"),
        (["--mix", "3:4:x"], 2, "PROMPT:OUTPUT"),
        (["--mix", "3:4", "--prompt-len", "5"], 2, "give one of them"),
        (["--prompt-len", "5"], 2, "give both"),
        (["--prompt-len", "0", "--output-len", "1"], 2, "1 or more"),
        (["--prompt-len", "9000", "--output-len", "1"], 2, "the longest sequence is 8192"),
        (["--concurrency", "4"], 2, "--concurrency needs"),
        (["--block-size", "24"], 2, "block_size must be one of"),
        (["--max-model-len", "9000"], 2, "8192 positions"),
        (["--device", "cuda"], 2, "--gpu NAME or --memory SIZE"),
        (["--kv-cache-dtype", "fp8"], 2, "needs a GPU"),
        (["--memory", "8GB", "--quantization", "int8"], 2, "is for the CPU"),
        (["--device", "cpu", "--quantization", "fp8"], 2, "needs a GPU"),
    ],
)
def test_errors_are_one_line(arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == code
    out, err = capsys.readouterr()
    assert words in err
    assert len(err.splitlines()) == 1
    assert not out


def test_a_malformed_config_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{")
    assert main(["plan", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"architectures": ["T5ForConditionalGeneration"]}')
    assert main(["plan", str(tmp_path)]) == 1
    assert "T5ForConditionalGeneration is not served" in capsys.readouterr().err


def test_neither_torch_nor_numpy_is_loaded() -> None:
    code = (
        "import sys; from quire.cli.main import main; main(['plan', 'llama-3.1-8b', '--gpu', 'h100']); "
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_an_engine_found_here_makes_the_plan_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))
    monkeypatch.setattr(plan_command, "local_gpu", lambda: ("NVIDIA H200", 143_771 << 20))
    assert main(["plan", "llama-3.1-8b"]) == 0
    assert "driver and kernels, about" in capsys.readouterr().out
    config = EngineConfig(model="llama-3.1-8b")
    spec = read_model_spec("llama-3.1-8b")
    total, rest = 150_109_880_320, 900_000_000
    remember_gpu("NVIDIA H200", GpuRecord(total, rest, record_key(config, spec)))
    assert main(["plan", "llama-3.1-8b", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["exact"] and plan["memory_bytes"] == total and plan["chosen"]["driver_bytes"] == rest
    taken = sum(
        plan["chosen"][name] for name in ("weight_bytes", "step_bytes", "graph_bytes", "batch_bytes", "driver_bytes")
    )
    assert plan["chosen"]["kv_budget_bytes"] == int(total * 0.92) - taken
    assert main(["plan", "llama-3.1-8b", "--max-num-seqs", "16"]) == 0
    out = capsys.readouterr().out
    assert "as the last start here found" in out and "About: the last start here served another model" in out


def test_the_drivers_tool_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100, 80GB HBM3, 81559'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert plan_command.local_gpu() == ("NVIDIA H100, 80GB HBM3", 81559 << 20)
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert plan_command.local_gpu() is None
