"""The file of --api-key-file."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fuzz.harness import Target
from quire.errors import ConfigError
from quire.server.settings import read_key_file

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-keys")


def parse(data: bytes) -> None:
    path = Path(_FOLDER.name, "keys.txt")
    path.write_bytes(data)
    keys = read_key_file(str(path))
    # Whoever is let in must have been given a key: none is empty, and each is a line's own text.
    assert keys
    lines = data.decode().splitlines()
    assert all(key.key and key.tenant and any(key.key in line for line in lines) for key in keys[:100])


TARGET = Target(
    name="key_file",
    parse=parse,
    refusals=(ConfigError,),
    words=(
        b":",
        b"#",
        b"\n",
        b"\r\n",
        b" ",
        b" admin",
        b"name:",
        b"\xef\xbb\xbf",
        b"\xc2\xa0",
        b"\x00",
        b"\xe2\x80\xa8",
    ),
)
