"""Install this checkout into .venv with a torch that fits the machine: what `make setup` and `make demo` run.

    python3 scripts/install.py [--torch auto|cpu|cuda] EXTRA...

Standard library only, and readable by an old Python, which has to be told that it is too old.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST_PYTHON = (3, 11)
# What torch and everything that it needs weigh on the wire: Linux on x86-64, and macOS.
CPU_BUILD, CUDA_BUILD, MACOS_BUILD = "about 200 MB", "about 2.7 GB", "about 110 MB"


def main() -> None:
    parser = argparse.ArgumentParser(description="Install this checkout into .venv.")
    parser.add_argument("extras", nargs="+", metavar="EXTRA", help="parts beside the engine, as in pyproject.toml")
    parser.add_argument("--torch", choices=("auto", "cpu", "cuda"), default="auto", help="which build of torch")
    args = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(
            f"Quire needs Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer, and {sys.executable} is "
            f"{platform.python_version()}: name another one, as in `make demo PYTHON=python3.12`"
        )
    python = make_environment(VENV)
    version = pinned("torch", CONSTRAINTS.read_text())
    on_linux = platform.system() == "Linux"
    if not fits(installed_torch(python), version, args.torch, on_linux=on_linux):
        says, options = choose_torch(
            version,
            args.torch,
            on_linux=on_linux,
            has_gpu=has_gpu(),
            offered_by_pip=lambda: offered(python, version),
            offered_by_pytorch=lambda: offered(python, version, "--index-url", CPU_INDEX),
        )
        print(f"quire: {says}", flush=True)
        if options:
            pip_install(python, "--no-deps", *options)
    pip_install(python, "--constraint", str(CONSTRAINTS), "--editable", f".[{','.join(args.extras)}]")


def fits(installed: str, version: str, wanted: str, *, on_linux: bool) -> bool:
    """Whether the torch that is installed is the one that is wanted: nothing is fetched then."""
    right_build = wanted == "auto" or not on_linux or installed.endswith("+cpu") == (wanted == "cpu")
    return installed.partition("+")[0] == version and right_build


def choose_torch(
    version: str,
    wanted: str,
    *,
    on_linux: bool,
    has_gpu: bool,
    offered_by_pip: Callable[[], bool],
    offered_by_pytorch: Callable[[], bool],
) -> tuple[str, list[str]]:
    """(What to say, what to give pip before the rest). Left to itself pip takes CUDA's build on every Linux machine."""
    cuda = f"fetching torch {version} with CUDA, {CUDA_BUILD}"
    cpu = f"fetching torch {version} for CPUs, {CPU_BUILD}"
    if not on_linux:
        if wanted == "cuda":
            sys.exit("torch has CUDA on Linux alone: leave TORCH=cuda out")
        return f"fetching torch {version}, {MACOS_BUILD}", []
    if wanted == "cuda" or (wanted == "auto" and has_gpu):
        # `===`, because `==` would take a CPU build where pip is set up to find one.
        return f"{cuda}; without a GPU's libraries ({CPU_BUILD}): make setup TORCH=cpu", [f"torch==={version}"]
    if offered_by_pip():
        return f"{cpu}, from where pip is set up to look", [f"torch=={version}+cpu"]
    if offered_by_pytorch():
        return f"{cpu}, from {CPU_INDEX}", ["--index-url", CPU_INDEX, f"torch=={version}+cpu"]
    how = f"let this machine reach {CPU_INDEX}, or set PIP_FIND_LINKS to a folder with the wheel of torch {version}+cpu"
    if wanted == "cpu":
        sys.exit(f"no CPU build of torch {version} can be found: {how}")
    return f"{cuda}, though no GPU was found. For the small build ({CPU_BUILD}) stop this, then {how}", []


def pinned(package: str, constraints: str) -> str:
    found = re.search(rf"^{package}==(\S+)", constraints, re.MULTILINE)
    assert found is not None, f"constraints.txt has no {package}"
    return found.group(1)


def has_gpu() -> bool:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    smi = shutil.which("nvidia-smi")  # under WSL there is no such device file
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True).stdout.startswith(b"GPU")


def make_environment(directory: Path) -> Path:
    python = directory / "bin" / "python"
    if not python.exists():
        made = subprocess.run([sys.executable, "-m", "venv", str(directory)])
        if made.returncode != 0:  # on Debian without python3-venv: half of one is left, which must not be used
            shutil.rmtree(directory, ignore_errors=True)
            sys.exit(made.returncode)
    return python


def installed_torch(python: Path) -> str:
    code = "import importlib.metadata as m; print(m.version('torch'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def offered(python: Path, version: str, *options: str) -> bool:
    """Whether pip finds a CPU build of this version there. Asked with pip, so that its proxy and certificates apply."""
    command = [str(python), "-m", "pip", "index", "versions", "torch", "--retries", "0", "--timeout", "10", *options]
    answer = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.search(r"^Available versions: (.*)$", answer, re.MULTILINE)
    return found is not None and f"{version}+cpu" in found.group(1).split(", ")


def pip_install(python: Path, *arguments: str) -> None:
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *quiet, *arguments]
    if (status := subprocess.run(command, cwd=ROOT).returncode) != 0:
        sys.exit(status)


if __name__ == "__main__":
    main()
