"""The connector protocol: what a store of KV blocks has to do, and how one is made from a setting.

A block comes as bytes and goes as bytes, sealed by the engine (`sealed.py`): a store need not check anything.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.tiers.memory_store import MemoryStore

Bytes = bytes | bytearray | memoryview

_METHODS = ("contains", "load", "store", "forget", "close")
_EXAMPLES = {"MemoryStore": MemoryStore}
_KNOWN = ("kv_connector", "kv_connector_extra_config")
# vLLM's other fields, with the values that ask for nothing.
_NEUTRAL = {"kv_role": ("kv_both", None), "engine_id": (None,), "kv_load_failure_policy": ("recompute", None)}


class Connector(Protocol):
    """A store of blocks by key. `load` and `store` are called on threads beside the engine's steps, `load` on several
    at once, and may take their time; the others may not wait. An exception counts as a miss, and is logged."""

    def contains(self, key: bytes) -> bool:
        """Whether the block is there. Asked while a step is planned. A yes is no promise."""
        ...

    def load(self, keys: Sequence[bytes]) -> Sequence[Bytes | None]:
        """The blocks, in order; None for each that is not there (any more)."""
        ...

    def store(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        """Keep them, or some of them. The memory is the caller's again when this returns."""
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """Never give these again, unless they are stored anew."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class HasUsage(Protocol):
    """A store that can say what it holds."""

    def usage(self) -> Mapping[str, float]:
        """Numbers by name: num_blocks, num_bytes, max_bytes, oldest_s, ..."""
        ...


@runtime_checkable
class Expires(Protocol):
    """A store that can drop what was not used for some time."""

    def expire(self, older_than_s: float) -> int:
        """Returns how many blocks it dropped."""
        ...


@runtime_checkable
class TellsKeys(Protocol):
    """A store that tells for each key whether it has it. Each rank of a split model has a store, and the engine learns
    from what they tell which blocks all of them have. For a store that does not tell, it knows what it has put there
    since its start."""

    def tell_keys(self, tell: Callable[[bytes, bool], None]) -> None:
        """Call `tell` for each key that is there, and from now on for each that is gained (True) or lost (False), from
        any thread. It does not wait."""
        ...


def store_names(config: EngineConfig) -> list[str]:
    """The levels of this configuration that keep every block, in the order in which they are asked."""
    names = [] if config.kv_disk_path is None else ["disk"]
    if config.kv_transfer_config:
        names.append(_name_of(str(config.kv_transfer_config.get("kv_connector"))))
    return names


def make_connector(config: Mapping[str, Any]) -> tuple[str, Connector]:
    """A name and a store, from `kv_transfer_config`."""
    others = {name: value for name, value in config.items() if name not in _KNOWN}
    for name, value in others.items():
        if value not in _NEUTRAL.get(name, ()):
            raise ConfigError(
                f"kv_transfer_config has no {name}={value!r} here: give kv_connector, and kv_connector_extra_config"
                + (" (engines have roles with quire serve -dp 2 --roles prefill decode)" if name == "kv_role" else "")
            )
    path, extra = config.get("kv_connector"), config.get("kv_connector_extra_config") or {}
    if not isinstance(path, str) or not isinstance(extra, Mapping):
        raise ConfigError(
            "kv_transfer_config needs kv_connector, the name of a class such as your_package.YourStore, and may have "
            f"kv_connector_extra_config, a mapping of its arguments; got {dict(config)!r}"
        )
    store_class = _EXAMPLES.get(path) or _import(path)
    try:
        store = store_class(**extra)
    except Exception as error:
        raise ConfigError(f"kv_connector {path} could not be made with {dict(extra)!r}: {error}") from error
    lacking = [name for name in _METHODS if not callable(getattr(store, name, None))]
    if lacking:
        raise ConfigError(f"kv_connector {path} is no store of blocks: it has no {', '.join(lacking)}")
    return _name_of(path), store


def _name_of(path: str) -> str:
    return path.rpartition(".")[2]


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(_EXAMPLES)
        raise ConfigError(
            f"kv_connector {path!r} cannot be imported ({error}): give package.module.Class, or {known}"
        ) from None
