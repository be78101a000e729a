"""One GGUF file out of a hub's repository of many: `owner/name:Q4_K_M`, or a file's name in the place of Q4_K_M."""

from __future__ import annotations

import re
from collections.abc import Iterable

from quire.errors import DownloadError

DEFAULT_QUANTIZATION = "Q4_K_M"  # llama.cpp's too
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_NO_MODEL = re.compile(r"(^|[-_./])(mmproj|imatrix)([-_./]|$)", re.IGNORECASE)
_UNREAD = re.compile(r"(^|[-./])NVFP\d", re.IGNORECASE)  # a way of quantizing that Quire lacks
_UNPACKED = re.compile(r"(^|[-./])(IQ\d|TQ\d|NVFP\d)", re.IGNORECASE)  # ways that take more memory than their files


def choose_gguf(names: Iterable[str], wanted: str | None, repo: str) -> str:
    """The file that `wanted` means: its name, or a quantization that its name holds, in capitals or not. None means
    Q4_K_M, or the first file where there is none. DownloadError with what there is if no file, or more than one, fits.
    """
    listed = sorted(name for name in names if name.endswith(".gguf"))
    if not listed:
        raise DownloadError(f"{repo} has neither safetensors nor GGUF files, which Quire reads: use another one")
    if wanted is not None and wanted.endswith(".gguf"):
        if wanted not in listed:
            raise DownloadError(f"{repo} has no file {wanted!r}: {_there(repo, listed)}")
        return wanted
    whole = [name for name in listed if not _NO_MODEL.search(name) and not _PART.search(name)]
    if wanted is not None and _UNREAD.match(wanted):
        raise DownloadError(f"{repo}:{wanted} is quantized in a way that Quire does not read: {_there(repo, whole)}")
    fits = [name for name in whole if _holds(name, wanted or DEFAULT_QUANTIZATION)]
    if not fits and wanted is None:
        fits = [name for name in whole if not _UNPACKED.search(name)][:1]
    if not fits:
        in_parts = [name for name in listed if _PART.search(name) and _holds(_PART.sub("", name), wanted or "")]
        if in_parts:
            raise DownloadError(
                f"{in_parts[0]} of {repo} is a part of a file, which Quire does not read: fetch all parts, join them "
                f"with llama.cpp's `llama-gguf-split --merge` and give the path. {_there(repo, whole)}"
            )
        raise DownloadError(f"{repo} has no GGUF file that is quantized as {wanted}: {_there(repo, whole)}")
    if len(fits) > 1:
        raise DownloadError(f"{repo} has {len(fits)} files for {wanted or DEFAULT_QUANTIZATION}: {_there(repo, fits)}")
    return fits[0]


def _holds(name: str, quantization: str) -> bool:
    """Whether a file's name has it as a word: Q4_K is not in model-Q4_K_M.gguf."""
    word = rf"(^|[-./]){re.escape(quantization)}([-./]|$)"
    return not quantization or re.search(word, name, re.IGNORECASE) is not None


def _there(repo: str, names: list[str]) -> str:
    if not names:
        return "there is no other"
    shown = ", ".join(f"{repo}:{name}" for name in names[:12])
    return f"use {shown}" + (f" or one of {len(names) - 12} more" if len(names) > 12 else "")
