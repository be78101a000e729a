"""The file of quire serve --config, with the whole of what is made of it."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from fuzz.harness import Target
from quire.cli.serve import read
from quire.errors import QuireError

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-yaml")


def parse(data: bytes) -> None:
    path = Path(_FOLDER.name, "quire.yaml")
    path.write_bytes(data)
    # A file that mentions keys must not make a server without any.
    _, settings, _ = read(_arguments(path), {})
    if b"\napi-key" in data and b"#" not in data:
        assert settings.api_keys, "a server that anyone may use"


def _arguments(path: Path) -> argparse.Namespace:
    return argparse.Namespace(positional_models=[], config=str(path))


TARGET = Target(
    name="yaml_settings",
    parse=parse,
    refusals=(QuireError,),
    words=(
        *(
            b": ",
            b"- ",
            b"\n",
            b"\n  ",
            b"[",
            b"]",
            b"{",
            b"}",
            b"&a ",
            b"*a",
            b"<<: ",
            b"!!int ",
            b"!!binary ",
            b"|\n ",
        ),
        *(
            b"'",
            b'"',
            b"null",
            b"~",
            b"true",
            b"0x7f",
            b"1_0",
            b"1:30",
            b".inf",
            b".nan",
            b"2024-13-45",
            b"...",
            b"---\n",
        ),
        *(b"\napi-key: ", b"\napi-key-file: ", b"\nport: ", b"\nhf-overrides: ", b"\npinned-prefixes: "),
    ),
    max_input_bytes=1 << 14,  # PyYAML reads some 40 KB in a second
    max_message_chars=1 << 16,  # who wrote the file reads the message
    max_cpu_s=3.0,
)
