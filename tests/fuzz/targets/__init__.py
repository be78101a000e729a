"""One module a target, each with a `TARGET`."""

from __future__ import annotations

import importlib
import pkgutil

from fuzz.harness import Target


def target_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_target(name: str) -> Target:
    target = importlib.import_module(f"fuzz.targets.{name}").TARGET
    assert isinstance(target, Target)
    assert target.name == name, "a target is named as its module"
    return target
