"""Can it be installed elsewhere? Resolve, build and try the package: what `make check-install` runs.

Dependencies are resolved, not fetched, by uv, which can pretend to be another platform and another Python. The
package is built as a release is, source distribution and wheel, and the wheel runs in an environment of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from install import CONSTRAINTS, ROOT, pinned

PYTHONS = ("3.11", "3.12", "3.13")
# The second is a part of the first, whose metadata uv then has.
EXTRAS = (("server", "bench", "test"), ("server",))
# What PyTorch's CPU build asks for.
CPU_TORCH_NEEDS = (
    *("filelock", "typing-extensions>=4.10.0", "setuptools>=77.0.3", "sympy>=1.13.3", "networkx>=2.5.1"),
    *("jinja2", "fsspec>=0.8.5"),
)
UV = Path(sys.executable).with_name("uv")


class CheckError(Exception):
    """What does not hold, with the words of the program that found it."""


@dataclass(frozen=True)
class Machine:
    name: str
    platform: str
    torch: str  # the version that it must get
    find_links: Path | None = None


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="quire-check-") as scratch:
        version = pinned("torch", CONSTRAINTS.read_text())
        links = Path(scratch, "links")
        links.mkdir()
        write_cpu_torch(links, version)
        machines = (
            Machine("Linux x86-64, plain PyPI", "x86_64-manylinux_2_31", version),
            Machine("Linux x86-64, a CPU build at hand", "x86_64-manylinux_2_31", f"{version}+cpu", links),
            Machine("Linux aarch64, plain PyPI", "aarch64-manylinux_2_31", version),
            Machine("macOS arm64", "aarch64-apple-darwin", version),
        )
        checks: list[tuple[str, Callable[[], None]]] = [
            ("wheel and source distribution", lambda: package(Path(scratch))),
            ("uv.lock, and constraints.txt exported from it", lock),
        ]
        checks += [
            (f"{machine.name}, Python {python}", partial(resolve, machine, python))
            for machine in machines
            for python in PYTHONS
        ]
        with ThreadPoolExecutor(4) as pool:
            failed = sum(pool.map(lambda check: report(*check), checks))
    return 1 if failed else 0


def report(name: str, check: Callable[[], None]) -> bool:
    """Run one check and say how it went; whether it failed."""
    try:
        check()
    except CheckError as error:
        print(f"FAILED  {name}\n{error}", flush=True)
        return True
    print(f"ok      {name}", flush=True)
    return False


def resolve(machine: Machine, python: str) -> None:
    for extras in EXTRAS:
        command: list[str | Path] = [UV, "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate"]
        command += ["--python-version", python, "--python-platform", machine.platform, "--only-binary", ":all:"]
        command += ["--constraint", CONSTRAINTS, *(f"--extra={extra}" for extra in extras), ROOT / "pyproject.toml"]
        if extras != EXTRAS[0]:
            command.append("--offline")
        if machine.find_links:
            command += ["--find-links", machine.find_links]
        # torch's wheels need macOS 14, and uv assumes an older one.
        found = output(command, {"MACOSX_DEPLOYMENT_TARGET": "14.0"})
        if f"torch=={machine.torch}" not in found.splitlines():
            raise CheckError(f"not torch {machine.torch}:\n{found}")
        if "nvidia-" in found and machine.torch.endswith("+cpu"):
            raise CheckError(f"a CPU build, and CUDA's libraries all the same:\n{found}")


def write_cpu_torch(directory: Path, version: str) -> None:
    """A wheel with nothing but the metadata of PyTorch's CPU build: enough to resolve with, on any machine."""
    lines = ["Metadata-Version: 2.1", "Name: torch", f"Version: {version}+cpu"]
    lines += [f"Requires-Dist: {need}" for need in CPU_TORCH_NEEDS]
    folder = f"torch-{version}+cpu.dist-info"
    with zipfile.ZipFile(directory / f"torch-{version}+cpu-py3-none-manylinux_2_28_x86_64.whl", "w") as wheel:
        wheel.writestr(f"{folder}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-manylinux_2_28_x86_64\n")
        wheel.writestr(f"{folder}/RECORD", "")


def lock() -> None:
    output([UV, "lock", "--check", "--quiet"])
    if exported() != CONSTRAINTS.read_text():
        raise CheckError("constraints.txt is not what uv.lock says: run `make lock`")


def exported() -> str:
    """constraints.txt: uv.lock's versions, without pip's own, which should not replace itself while it runs."""
    command: list[str | Path] = [
        UV,
        "export",
        "--quiet",
        "--frozen",
        "--all-extras",
        "--no-hashes",
        "--no-annotate",
        "--no-header",
    ]
    lines = output([*command, "--no-emit-project", "--no-emit-package=pip"]).splitlines()
    # Markers say where a package is wanted, which a constraint need not know: `fork-strategy` keeps to one version.
    pins = [line.partition(" ;")[0] for line in lines]
    names = [pin.partition("==")[0] for pin in pins]
    if len(set(names)) != len(names):
        raise CheckError(f"two versions of one package: {sorted({name for name in names if names.count(name) > 1})}")
    head = "# The exact versions that `make setup` installs and CI tests. Made from uv.lock by `make lock`.\n"
    return head + "\n".join(pins) + "\n"


def package(scratch: Path) -> None:
    built = scratch / "dist"
    output([UV, "build", "--quiet", "--out-dir", built, ROOT])
    (wheel,) = built.glob("*.whl")
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"].replace("-", "_")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if sys.platform == "linux" and not re.fullmatch(rf"{name}-[\d.]+-py3-none-{platform}\.whl", wheel.name):
        raise CheckError(
            f"one wheel per platform, for every Python, would not be called {wheel.name}: is there a C compiler?"
        )
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    tracked = output(["git", "-C", ROOT, "ls-files", "quire"]).split()
    if missing := [path for path in tracked if path not in packed and (ROOT / path).exists()]:
        raise CheckError(f"the wheel lacks {missing}")
    run_installed(wheel, scratch / "environment")


def run_installed(wheel: Path, environment: Path) -> None:
    """The wheel in an environment of its own; its dependencies are read out of this one, which has them."""
    output([UV, "venv", "--quiet", "--python", sys.executable, environment])
    output([UV, "pip", "install", "--quiet", "--no-deps", "--python", environment, wheel])
    # PYTHONPATH reads no .pth files, so the editable install of this environment stays out of it.
    variables = {"PYTHONPATH": sysconfig.get_path("purelib")}
    quire = environment / "bin" / "quire"
    said = output([quire, "--version"], variables) + output([quire, "env"], variables)
    where = output([environment / "bin" / "python", "-P", "-c", "import quire; print(quire.__file__)"], variables)
    if not where.startswith(str(environment)):
        raise CheckError(f"ran {where}, not the wheel")
    if not re.search(r"^native kernels +.*generic", said, re.MULTILINE):
        raise CheckError(f"the native library was not loaded:\n{said}")


def output(command: list[str | Path], variables: dict[str, str] | None = None) -> str:
    # An active environment is not the one that is meant, and certificates are the system's, as they are for pip.
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment["UV_SYSTEM_CERTS"] = "1"
    done = subprocess.run(
        command, cwd=ROOT, env=environment | (variables or {}), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise CheckError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1:] == ["--write-constraints"]:
        CONSTRAINTS.write_text(exported())
    else:
        sys.exit(main())
