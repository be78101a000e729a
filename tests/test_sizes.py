from __future__ import annotations

import argparse

import pytest

from quire.cli.main import make_parser
from quire.cli.serve import read
from quire.config import GIB, EngineConfig
from quire.errors import ConfigError
from quire.sizes import read_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4GiB", 4 * GIB),
        ("4G", 4 * GIB),
        ("4096M", 4 * GIB),
        ("4Gi", 4 * GIB),
        ("4gib", 4 * GIB),
        ("4294967296", 4 * GIB),
        ("4294967296B", 4 * GIB),
        ("0.5 GiB", GIB // 2),
        ("2Ti", 2 << 40),
        ("80GB", 80 * 10**9),
        ("80gb", 80 * 10**9),
        ("1.5g", 1_500_000_000),
        ("8K", 8192),
        ("8k", 8000),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert read_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "G", "-4G", "4 gigs", "4GG", "0", "0GiB", "1e9", "4,5G", "٤G", "inf", "0.1"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="a size such as 4GiB"):
        read_size(text)


def serve(*arguments: str, **environ: str) -> EngineConfig:
    args: argparse.Namespace = make_parser().parse_args(["serve", *arguments])
    return read(args, environ)[0][0].config


@pytest.mark.parametrize("size", ["4GiB", "4G", "4096M", str(4 * GIB)])
def test_the_same_in_every_place(size: str, tmp_path, capsys) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text(f"kv-cache-memory-bytes: {size}\nswap-space-gb: 2GiB\n")
    configs = [
        EngineConfig(kv_cache_memory_bytes=size, swap_space_gb="2GiB"),
        serve("--kv-cache-memory-bytes", size, "--swap-space", "2GiB"),
        serve(QUIRE_KV_CACHE_MEMORY_BYTES=size, QUIRE_SWAP_SPACE_GB="2048M"),
        serve("--config", str(file)),
    ]
    assert {(config.kv_cache_memory_bytes, config.swap_space_gb) for config in configs} == {(4 * GIB, 2.0)}
    assert make_parser().parse_args(["plan", "--memory", size]).memory == size
    assert EngineConfig(swap_space_gb="2").swap_space_gb == 2.0, "a number alone is what the name says"


def test_the_servers_own_sizes() -> None:
    args = make_parser().parse_args(["serve", "--max-body-bytes", "8MiB"])
    assert read(args, {"QUIRE_MAX_HEADER_BYTES": "64K"})[1].max_body_bytes == 8 << 20
    assert read(args, {"QUIRE_MAX_HEADER_BYTES": "64K"})[1].max_header_bytes == 65536


def test_messages_name_the_argument() -> None:
    for name in ("kv_cache_memory_bytes", "swap_space_gb"):
        with pytest.raises(ConfigError, match=f"{name} must be a size such as 4GiB.*got 'lots'"):
            EngineConfig(**{name: "lots"})
    with pytest.raises(ConfigError, match=r"--max-body-bytes must be a size such as 4GiB.*got 'lots'"):
        read(make_parser().parse_args(["serve", "--max-body-bytes", "lots"]), {})
