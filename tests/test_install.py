"""What installs Quire: the choice of torch, and every hint that names a package. `make check-install` does the rest."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.errors import install_hint

ROOT = Path(__file__).parent.parent
INSTALL = runpy.run_path(str(ROOT / "scripts/install.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def choose(wanted: str = "auto", *, on_linux: bool = True, gpu: bool = False, pip: bool = False, pytorch: bool = False):
    return INSTALL["choose_torch"](
        "2.13.0",
        wanted,
        on_linux=on_linux,
        has_gpu=gpu,
        offered_by_pip=lambda: pip,
        offered_by_pytorch=lambda: pytorch,
    )


@pytest.mark.parametrize(
    ("facts", "options", "size"),
    [
        ({"pip": True}, ["torch==2.13.0+cpu"], "200 MB"),
        ({"pytorch": True}, ["--index-url", INSTALL["CPU_INDEX"], "torch==2.13.0+cpu"], "200 MB"),
        ({"gpu": True, "pip": True}, ["torch===2.13.0"], "2.7 GB"),
        ({"wanted": "cpu", "gpu": True, "pip": True}, ["torch==2.13.0+cpu"], "200 MB"),
        ({"wanted": "cuda", "pip": True}, ["torch===2.13.0"], "2.7 GB"),
        ({"on_linux": False}, [], "110 MB"),
        ({}, [], "2.7 GB"),
    ],
)
def test_torch_is_chosen_for_the_machine_and_its_size_said(facts: Any, options: list[str], size: str) -> None:
    says, chosen = choose(**facts)
    assert chosen == options and f"about {size}" in says and len(says.splitlines()) == 1


def test_who_gets_cuda_is_told_how_to_get_the_small_build() -> None:
    assert "TORCH=cpu" in choose(gpu=True)[0]
    assert "PIP_FIND_LINKS" in choose()[0] and "about 200 MB" in choose()[0]


def test_a_cpu_build_that_was_asked_for_and_is_not_there_is_no_cuda_build() -> None:
    with pytest.raises(SystemExit, match="PIP_FIND_LINKS"):
        choose("cpu", gpu=True)


def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(SystemExit, match="TORCH=cuda"):
        choose("cuda", on_linux=False)


@pytest.mark.parametrize(
    ("installed", "wanted", "on_linux", "fits"),
    [
        ("", "auto", True, False),
        ("2.12.0+cpu", "auto", True, False),
        ("2.13.0+cpu", "auto", True, True),
        ("2.13.0", "auto", True, True),
        ("2.13.0", "cpu", True, False),
        ("2.13.0+cpu", "cuda", True, False),
        ("2.13.0+cu130", "cuda", True, True),
        ("2.13.0", "cpu", False, True),
    ],
)
def test_another_build_is_fetched_over_the_one_that_is_there(
    installed: str, wanted: str, on_linux: bool, fits: bool
) -> None:
    assert INSTALL["fits"](installed, "2.13.0", wanted, on_linux=on_linux) == fits


def test_offers_are_read_from_the_index_not_from_what_is_installed(tmp_path: Path) -> None:
    pip = tmp_path / "python"
    pip.write_text(
        "#!/bin/sh\n"
        "echo 'torch (2.15.0)'\n"
        'case "$*" in *--index-url*) versions="2.13.0+cpu, 2.9.0+cpu";; *) versions="2.13.0, 2.9.0+cpu";; esac\n'
        'echo "Available versions: $versions"\n'
        "echo '  INSTALLED: 2.13.0+cpu'\n"
    )
    pip.chmod(0o755)
    assert not INSTALL["offered"](pip, "2.13.0")
    assert INSTALL["offered"](pip, "2.13.0", "--index-url", INSTALL["CPU_INDEX"])


def test_an_old_python_is_told_so_before_anything_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["install.py", "server"])
    monkeypatch.setattr("sys.version_info", (3, 9, 6))
    main = INSTALL["main"]
    monkeypatch.setitem(main.__globals__, "VENV", tmp_path / "venv")
    with pytest.raises(SystemExit, match="make demo PYTHON="):
        main()
    assert not (tmp_path / "venv").exists()


def test_hints_name_this_package_and_parts_that_it_has() -> None:
    assert install_hint("server") == f"pip install '{PROJECT['name']}[server]'"
    sources = {path: path.read_text() for path in (ROOT / "quire").rglob("*.py")}
    used = {extra for text in sources.values() for extra in re.findall(r"install_hint\(['\"](\w+)['\"]\)", text)}
    assert used and used <= set(PROJECT["optional-dependencies"])
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*"), ROOT / "Makefile"]
    for path in [*sources, *(path for path in documents if path.is_file())]:
        # `quire` on PyPI is somebody else's.
        assert not re.search(r"install\b.*[ '\"]quire(\[|['\"\s]*$)", path.read_text(), re.MULTILINE), path


def test_the_commands_of_the_readme_and_of_ci_are_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        named = set(re.findall(r"^\s*make ([a-z-]+)", (ROOT / name).read_text(), re.MULTILINE))
        assert named and named <= targets, f"{name}: {named - targets}"


def test_the_readme_names_the_pinned_torch() -> None:
    version = INSTALL["pinned"]("torch", (ROOT / "constraints.txt").read_text())
    assert re.findall(r"torch==([\d.]+)", (ROOT / "README.md").read_text()) == [version]


def test_the_lock_file_names_no_host_but_pypis_own() -> None:
    # A mirror's address would only resolve for those who have that mirror.
    hosts = set(re.findall(r"\w+://[^/\"]*", (ROOT / "uv.lock").read_text()))
    assert hosts == {"https://pypi.org", "https://files.pythonhosted.org"}


def test_an_editable_install_is_a_path(tmp_path: Path) -> None:
    """Not a finder, which comes after the current folder: beside a checkout called quire, `import quire` got that."""
    pytest.importorskip("setuptools.command.editable_wheel", reason="needs the setuptools that a build fetches")
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, "editable_wheel", "-d", tmp_path]
    variables = os.environ | {"CC": "/bin/false"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(*tmp_path.glob("*.whl")) as wheel:
        (path,) = (name for name in wheel.namelist() if "/" not in name)
        assert wheel.read(path).decode().strip() == str(ROOT)


def test_without_a_compiler_the_wheel_is_for_any_platform(tmp_path: Path) -> None:
    pytest.importorskip("setuptools.command.bdist_wheel", reason="needs the setuptools that a build fetches")
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, "build", "-b", tmp_path / "build"]
    command += ["bdist_wheel", "-d", tmp_path, "-b", tmp_path / "wheel"]
    variables = os.environ | {"CC": "/bin/false"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "native CPU kernels not built" in done.stderr
    assert [path.name for path in tmp_path.glob("*.whl")] == [f"quire_llm-{quire.__version__}-py3-none-any.whl"]


def test_every_file_beside_the_modules_is_in_the_wheel() -> None:
    """Styles, the page, kernels in C: what package-data does not name would be missing where Quire is installed."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["quire"]
    named = {path for pattern in patterns for path in (ROOT / "quire").glob(pattern)}
    files = {path for path in (ROOT / "quire").rglob("*.*") if path.suffix not in (".py", ".pyc", ".so", ".dylib")}
    assert not files - named
