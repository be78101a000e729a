"""Messages between processes as bytes: msgpack of plain data, nothing that runs when it is read."""

from __future__ import annotations

from array import array
from typing import Any, Generic, TypeVar, get_args

import msgspec

T = TypeVar("T")


def _pack(value: Any) -> bytes:
    """Allowed token ids, four bytes each: they may be a whole vocabulary."""
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} does not cross to another process")


def _unpack(_: type, packed: bytes) -> array[int]:
    return array("i", packed)


encoder = msgspec.msgpack.Encoder(enc_hook=_pack)


class Codec(Generic[T]):
    """One direction's messages: a byte that names the kind, then its fields in msgpack."""

    def __init__(self, kinds: Any) -> None:
        """kinds: the messages' types, as a union."""
        self._tags = {kind: bytes([tag]) for tag, kind in enumerate(get_args(kinds))}
        self._decoders = [msgspec.msgpack.Decoder(kind, dec_hook=_unpack) for kind in get_args(kinds)]

    def encode(self, message: T) -> bytes:
        return self._tags[type(message)] + encoder.encode(message)

    def decode(self, data: bytes) -> T:
        message: T = self._decoders[data[0]].decode(memoryview(data)[1:])
        return message
