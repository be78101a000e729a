"""Messages as bytes, for an engine in another process: one byte that names the kind, then its fields in msgpack."""

from __future__ import annotations

from array import array
from typing import Any, Generic, TypeVar, get_args

import msgspec

from quire.engine.messages import Command, EngineMessage, Launch

T = TypeVar("T")


def _pack(value: Any) -> bytes:
    """Allowed token ids, four bytes each: they may be a whole vocabulary."""
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} does not cross to another process")


def _unpack(_: type, packed: bytes) -> array[int]:
    return array("i", packed)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)


class Codec(Generic[T]):
    """One direction's messages."""

    def __init__(self, kinds: Any) -> None:
        """kinds: the messages' types, as a union."""
        self._tags = {kind: bytes([tag]) for tag, kind in enumerate(get_args(kinds))}
        self._decoders = [msgspec.msgpack.Decoder(kind, dec_hook=_unpack) for kind in get_args(kinds)]

    def encode(self, message: T) -> bytes:
        return self._tags[type(message)] + _encoder.encode(message)

    def decode(self, data: bytes) -> T:
        message: T = self._decoders[data[0]].decode(memoryview(data)[1:])
        return message


commands: Codec[Command] = Codec(Command)
messages: Codec[EngineMessage] = Codec(EngineMessage)
encode_launch = _encoder.encode
decode_launch = msgspec.msgpack.Decoder(Launch).decode
