"""Reading a Hugging Face config: every complaint names the key and the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import UnsupportedModelError

MAX_INTEGER, MAX_NUMBER = 2**31 - 1, 1e30  # more than any of a real config
_MAX_MESSAGE_CHARS = 600  # a file can have a megabyte where a word belongs


class ConfigReader:
    """A config.json (or a part of it) with typed access. A key that is null counts as missing.

    `keys`: what a family calls them, where it has names of its own.
    """

    def __init__(self, values: Mapping[str, Any], source: str, keys: Mapping[str, str] | None = None) -> None:
        self.values = values
        self.source = source
        self._keys = keys or {}

    def named(self, key: str) -> str:
        """The name that the config has for it."""
        return self._keys.get(key, key)

    def error(self, message: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.source}: {message[:_MAX_MESSAGE_CHARS]}")

    def get(self, key: str) -> Any:
        return self.values.get(self.named(key))

    def integer(self, key: str, default: int | None = None, *, at_most: int = MAX_INTEGER) -> int:
        """A positive whole number."""
        value = self._required(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{self.named(key)} is {shown(value)}: expected a positive whole number")
        if value > at_most:
            raise self.error(f"{self.named(key)} is {value:,}: no model that Quire runs has more than {at_most:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MAX_NUMBER:
            raise self.error(f"{self.named(key)} is {shown(value)}: expected a positive number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{self.named(key)} is {shown(value)}: expected true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self.error(f"{self.named(key)} is {shown(value)}: expected a string")
        return value

    def part(self, key: str) -> ConfigReader | None:
        """The object under `key`, with its own complaints prefixed by the key."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{self.named(key)} is {shown(value)}: expected an object")
        return ConfigReader(value, f"{self.source}: {key}")

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{self.named(key)} is missing")
        return value


def shown(value: Any) -> str:
    """A value as a message may hold it: a file can have a list of a million entries where a number belongs."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
