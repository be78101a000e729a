"""Compile the native library: `python -m quire.kernels.cpu.build`. Installing the package does the same.

Standard library only, because setup.py runs this file before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "native"
LIBRARY_NAME = "libquire_cpu.so"  # loaded with ctypes, which does not mind the suffix on macOS

SOURCES_ONCE = ("drafting.c", "exchange.c", "isa.c", "memory.c", "pool.c")
SOURCES_PER_ISA = ("attention.c", "elementwise.c", "encoder.c", "linear.c", "load.c", "paired.c", "stack.c")
ISA_FLAGS: dict[str, tuple[str, ...]] = {"generic": ()}
if platform.machine().lower() in ("x86_64", "amd64"):
    ISA_FLAGS["avx2"] = ("-mavx2", "-mfma", "-mf16c")
    ISA_FLAGS["avx512"] = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c")
    ISA_FLAGS["avx512vnni"] = (*ISA_FLAGS["avx512"], "-mavx512vnni")  # sums of products of bytes

# No -march=native: the library is built once and may run elsewhere; isa.c asks the processor at load.
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-pthread")


class BuildError(Exception):
    """The library could not be compiled; the message has the compiler's own words."""


def source_hash() -> str:
    """A hash of everything that goes into the library, which a loaded one must match."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE_DIR.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str]:
    if command := os.environ.get("CC"):
        return shlex.split(command)
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C compiler: install gcc or clang (or set CC) for the native CPU kernels")


def build(target_dir: Path) -> Path:
    """Compile into target_dir and return the library's path. The old library stays until the new one is complete."""
    if sys.platform == "win32":
        raise BuildError("the native CPU kernels need POSIX threads; on Windows use WSL")
    compiler = find_compiler()
    target_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="quire-build-") as scratch:
        jobs: list[tuple[str, str, tuple[str, ...]]] = [(name, "", ()) for name in SOURCES_ONCE]
        jobs += [(name, isa, flags) for isa, flags in ISA_FLAGS.items() for name in SOURCES_PER_ISA]
        objects, running = [], []
        for name, isa, flags in jobs:
            output = Path(scratch) / f"{Path(name).stem}_{isa}.o"
            defines = [f'-DQUIRE_SOURCE_HASH="{source_hash()}"', *([f"-DQUIRE_ISA={isa}"] if isa else [])]
            command = [*compiler, *FLAGS, *flags, *defines, "-c", str(SOURCE_DIR / name), "-o", str(output)]
            objects.append(str(output))
            running.append(_start(command))
        _finish(running)
        # In the target's directory, so that the rename below is atomic: a process that has the old one keeps it.
        complete = target_dir / f"{LIBRARY_NAME}.{os.getpid()}"
        _finish([_start([*compiler, "-shared", "-pthread", *objects, "-lm", "-o", str(complete)])])
        return complete.replace(target_dir / LIBRARY_NAME)


def _start(command: list[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise BuildError(f"cannot run the C compiler: {error}") from error


def _finish(running: list[subprocess.Popen[str]]) -> None:
    outputs = [process.communicate()[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        if process.returncode != 0:
            raise BuildError(f"{process.args!r}\n{output.strip()}")


if __name__ == "__main__":
    try:
        print(build(Path(__file__).parent))
    except BuildError as error:
        sys.exit(f"error: {error}")
