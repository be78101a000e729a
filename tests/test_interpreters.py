"""Interpreters that Quire starts do not look for modules in the folder in which it was started."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from quire.child import child_environment

PACKAGE = Path(quire.__file__).parent


def test_every_interpreter_is_started_with_the_safe_path() -> None:
    found = 0
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "sys.executable" in source else ():
            if isinstance(node, (ast.List, ast.Tuple)) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                found += 1
                where = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                flag = ast.unparse(node.elts[1]) if len(node.elts) > 1 else ""
                assert flag in ("'-P'", "'-I'"), f"{where} starts Python without -P"  # -I is isolated, and includes it
    assert found >= 4


def test_a_module_in_the_working_directory_is_not_taken_for_a_library(tmp_path: Path) -> None:
    for name in ("zmq", "msgspec", "quire"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger in the working directory ran')")
    command = [sys.executable, "-P", "-c", "import quire.engine.messages, os; print(os.environ['PYTHONPATH'])"]
    done = subprocess.run(
        command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().split(os.pathsep)[0] == str(PACKAGE.parent)


def test_the_users_own_path_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/their/own")
    assert child_environment()["PYTHONPATH"] == os.pathsep.join([str(PACKAGE.parent), "/their/own"])
