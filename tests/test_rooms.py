"""The import rules of docs/tour.md, enforced: downward only, and no torch where only numbers live."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import quire

ROOT = Path(__file__).parent.parent / "quire"

FOUNDATION = {
    "errors",
    "beams",
    "child",
    "wire",
    "socket_folder",
    "config",
    "params",
    "request",
    "plan",
    "pooling",
    "outputs",
    "log",
    "nearest",
    "lora",
    "interrupt",
    "refusals",
    "inputs",
    "sizes",
    "step_costs",
    "speculation",
    "structured",
}
# Room -> rooms it may import, besides itself and the foundation.
MAY_IMPORT = {
    "kv": set(),
    "tiers": set(),
    "text": set(),
    "kernels": set(),
    "scheduler": {"kv"},
    "drafting": {"scheduler", "kernels"},
    "agents": set(),
    "layers": {"kernels"},
    "parallel": {"kernels"},
    "models": {"layers", "parallel", "kernels"},
    "sampling": {"kernels"},
    "grammar": {"text", "weights", "models"},
    "weights": {"models", "layers", "kernels"},
    "executor": {"tiers", "grammar", "sampling", "weights", "models", "layers", "parallel", "kernels"},
    "engine": {"agents", "grammar", "text", "drafting", "scheduler", "kv", "executor", "weights", "models"},
    "router": {"agents", "engine", "kv", "text"},
    "server": {"agents", "engine", "text", "router"},
    "lab": {"bench", "sim", "engine", "executor", "models", "weights", "scheduler", "tiers"},
    "sim": {"executor", "kv", "scheduler", "models", "bench", "router"},
    "llm": {"agents", "text", "engine"},
    "async_llm": {"text", "engine", "llm"},
    "cli": {
        *("llm", "async_llm", "text", "engine", "weights", "executor", "kernels", "bench", "server", "lab", "router"),
        "sim",
    },
    "bench": {"llm", "engine", "weights", "router"},
    "__main__": {"cli"},
}
WITHOUT_TORCH = {"agents", "kv", "tiers", "drafting", "scheduler", "text", "grammar", "sim"} | FOUNDATION


@functools.cache
def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


@functools.cache
def imports_of(path: Path) -> list[str]:
    """Absolute names of what a file imports, wherever the import stands; type-only imports count too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("room", sorted({room_of(path) for path in modules()} - {"__init__"}))
def test_imports_go_downward(room: str) -> None:
    """Nothing is said of __init__, which has the public names and imports them when they are first used."""
    for path, name in [(one, name) for one in modules() if room_of(one) == room for name in imports_of(one)]:
        parts = name.split(".")
        if parts[0] != "quire" or len(parts) < 2:
            continue
        # A public name counts as the room that it lives in.
        other = quire._HOMES[parts[1]].split(".")[1] if parts[1] in quire._HOMES else parts[1]
        if other == room or other in FOUNDATION or other == "__version__":
            continue
        assert room not in FOUNDATION, f"{path.name} is foundation and imports {name}"
        assert other in MAY_IMPORT[room], f"{path}: {room} may not import {other} ({name})"


def test_numbers_need_no_torch() -> None:
    for path in modules():
        if room_of(path) in WITHOUT_TORCH:
            assert not [name for name in imports_of(path) if name.split(".")[0] == "torch"], path


def test_only_the_right_rooms_name_a_device() -> None:
    for path in modules():
        if room_of(path) in {"executor", "kernels", "bench", "cli"}:
            continue
        assert "torch.cuda" not in path.read_text(encoding="utf-8"), f"{path} names a device"


def test_transformers_is_never_imported_by_the_engine() -> None:
    for path in modules():
        if room_of(path) != "bench":
            assert not [name for name in imports_of(path) if name.split(".")[0] == "transformers"], path


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_quire_loads_neither_torch_nor_the_server() -> None:
    out = run_python(
        "import sys, quire; quire.SamplingParams; "
        "print([m for m in ('torch', 'numpy', 'tokenizers', 'fastapi', 'zmq', 'msgspec') if m in sys.modules])"
    )
    assert out.strip() == "[]"


def test_the_engine_works_without_the_servers_packages() -> None:
    run_python(
        "import sys\n"
        "for name in ('fastapi', 'starlette', 'uvicorn', 'zmq', 'msgspec', 'prometheus_client', 'matplotlib',"
        " 'transformers', 'huggingface_hub'):\n"
        "    sys.modules[name] = None\n"
        "from quire import LLM, AsyncLLM, LLMEngine\n"
    )
