"""The helper that compiles, seen from the process that waits for it. No GPU: another program plays the helper."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import models_harness as harness
import pytest

from quire.config import EngineConfig
from quire.executor.precompile import PROMPTS, START, Precompile, _compute_capability, _wake_gpu


def helper(program: str) -> tuple[Precompile, subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return Precompile(process), process


def waits(precompile: Precompile, stage: str, seconds: float) -> bool:
    """Whether it still waits after so long."""
    thread = threading.Thread(target=precompile.wait, args=(stage,), daemon=True)
    thread.start()
    thread.join(seconds)
    return thread.is_alive()


def test_each_stage_is_waited_for_by_itself() -> None:
    program = "print('a library prints'); print('prompts', flush=True); input(); print('start', flush=True); input()"
    precompile, process = helper(program)
    assert process.stdin is not None
    assert not waits(precompile, PROMPTS, 10)
    assert waits(precompile, START, 0.2)
    process.stdin.write(b"go on\n")
    process.stdin.flush()
    assert not waits(precompile, START, 10)
    assert process.poll() is None and not precompile.is_done()  # it goes on with what may be needed later
    process.stdin.close()  # its output is the precompile's to read and close
    process.wait(10)
    deadline_s = time.monotonic() + 10
    while not precompile.is_done() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert precompile.is_done()


@pytest.mark.parametrize("program", ["", "raise SystemExit(3)", "print('prompts')"])
def test_nobody_waits_for_a_helper_that_gave_up(program: str) -> None:
    precompile, process = helper(program)
    assert not waits(precompile, START, 10) and not waits(precompile, PROMPTS, 10)
    process.wait(10)
    assert process.stdin is not None
    process.stdin.close()


def test_a_killed_helper_takes_its_processes_with_it() -> None:
    """They hold its end of the pipe: while one of them lives, the engine would wait."""
    program = (
        "import quire.kernels.triton.precompile as module, time, types\n"
        "kernel = types.SimpleNamespace(fn=module.compile_jobs, ASTSource=lambda *parts: time.sleep(60))\n"
        "module.compile_stages({'prompts': [module.KernelJob(kernel, {}, {}, {}, {})]}, None, when_done=print)\n"
    )
    precompile, process = helper(f"import sys; sys.path[:0] = {sys.path!r}\n{program}")
    process.stdin.close()  # type: ignore[union-attr]
    deadline_s = time.monotonic() + 120
    while not (children := _children_of(process.pid)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert children and waits(precompile, START, 0.5)
    process.kill()
    assert not waits(precompile, START, 10)


@pytest.mark.parametrize("lacking", ["del meta_torch.Tensor.data_ptr", "meta_torch.install = None"])
def test_a_dry_run_that_needs_more_of_torch_is_made_with_torch(tmp_path: Path, lacking: str) -> None:
    """A helper whose stand-in for torch lacks something starts another one with the real thing, which answers."""
    program = (
        "import quire.executor.precompile as module, sys\n"
        "import quire.executor.meta_torch as meta_torch\n"
        f"{lacking}\n"
        "module._compute_capability = lambda index: 90\n"
        "module.subprocess.run = lambda command, **kwargs: print(command[-1], len(kwargs['input']) > 100)\n"
        "module.main()\n"
    )
    spec = harness.spec_of(harness.tiny_model("llama"))
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{program}"],
        input=pickle.dumps((EngineConfig(model="x", dtype="bfloat16"), spec)),
        capture_output=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split() == ["--with-torch", "True"]


def _children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_without_a_gpu_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.executor.precompile._GPU_DEVICES", ("/nowhere",))
    assert Precompile.start(EngineConfig(model="x"), None) is None  # type: ignore[arg-type]
    monkeypatch.setattr("ctypes.CDLL", _no_library)
    assert _compute_capability(0) is None
    _wake_gpu(0)


def _no_library(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")
