"""Building the library, and noticing when it is not the one its sources describe."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys

import pytest

from quire.kernels.cpu import build, library

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")


def test_no_compiler_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match="install gcc or clang"):
        build.build(tmp_path)


@needs_compiler
def test_a_failing_compiler_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", f"{sys.executable} -c raise(SystemExit('no-such-flag'))")
    with pytest.raises(build.BuildError, match="no-such-flag"):
        build.build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(build.BuildError, match="/no/such/compiler"):
        build.build(tmp_path)


def test_the_hash_covers_every_source(monkeypatch, tmp_path):
    copy = tmp_path / "native"
    shutil.copytree(build.SOURCE_DIR, copy)
    monkeypatch.setattr(build, "SOURCE_DIR", copy)
    before = build.source_hash()
    with open(copy / "tile.h", "a") as file:
        file.write("\n")
    assert build.source_hash() != before


def test_a_stale_library_is_refused_with_the_command(monkeypatch):
    if isinstance(library.load_library(), str):
        pytest.skip(str(library.load_library()))
    monkeypatch.setattr(build, "source_hash", lambda: "other")
    reason = library.load_library.__wrapped__()
    assert isinstance(reason, str) and "python -m quire.kernels.cpu.build" in reason


def test_an_absent_library_is_a_reason_and_not_an_error(monkeypatch):
    monkeypatch.setattr(build, "LIBRARY_NAME", "absent.so")
    reason = library.load_library.__wrapped__()
    assert isinstance(reason, str) and "python -m quire.kernels.cpu.build" in reason


@needs_compiler
def test_sources_compile_without_warnings(tmp_path):
    """Only the syntax, for speed; with the warnings that the build itself does not ask for."""
    for isa, flags in build.ISA_FLAGS.items():
        sources = [str(build.SOURCE_DIR / name) for name in build.SOURCES_PER_ISA]
        command = [*build.find_compiler(), *build.FLAGS, *flags, "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
        done = subprocess.run([*command, f"-DQUIRE_ISA={isa}", *sources], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_forced_isa(monkeypatch):
    isas = library.available_isas()
    if not isas:
        pytest.skip(str(library.load_library()))
    assert isas[-1] == "generic"
    monkeypatch.setenv("QUIRE_CPU_ISA", "generic")
    assert library.load_functions().isa == "generic"
    monkeypatch.delenv("QUIRE_CPU_ISA")
    assert library.load_functions().isa == isas[0]
    assert isinstance(library.load_library(), ctypes.CDLL)
