"""Models from the Hugging Face hub, through its own library and into its own cache.

`owner/name:Q4_K_M` is one GGUF file out of a repository of many; a file's name may stand in the place of Q4_K_M.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from quire.errors import DownloadError
from quire.nearest import nearest
from quire.weights.aliases import alias_names

_CONFIG_FILES = ["*.json", "*.model", "*.jinja", "*.txt"]  # config, tokenizer, chat template
_WEIGHT_FILES = ["*.safetensors"]
# The same weights in a vendor's own layout, and what lies in subdirectories, but for those of sentence-transformers'
# modules, such as 1_Pooling.
_NOT_NEEDED = ["consolidated*", "[!0-9]*/*"]
_CONNECT_S = 5.0


def fetch_from_hub(
    repo: str, *, revision: str | None = None, config_only: bool = False, cache_dir: Path | None = None
) -> Path:
    """A directory with the repository's config, tokenizer and (unless `config_only`) safetensors; no pickles. For a
    repository of GGUF files, the path of one file. `cache_dir` is used in place of the hub's own cache."""
    import huggingface_hub

    if repo.lower().endswith("-gguf"):  # a custom that saves asking twice
        return fetch_gguf(repo, None, revision=revision, cache_dir=cache_dir)
    patterns = _CONFIG_FILES + ([] if config_only else _WEIGHT_FILES)
    with _telling(repo, revision) as is_offline:
        path = Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=patterns,
                ignore_patterns=_NOT_NEEDED,
                local_files_only=is_offline,
            )
        )
    has_config = (path / "config.json").is_file()
    if has_config and (config_only or any(path.glob("*.safetensors"))):
        return path
    if not has_config and any(path.glob("*.safetensors")):
        raise DownloadError(f"{repo} has no config.json, so that its weights cannot be understood: use another one")
    return fetch_gguf(repo, None, revision=revision, cache_dir=cache_dir)


def fetch_adapter(repo: str, files: list[str]) -> Path:
    """A directory with these files of a repository."""
    import huggingface_hub

    with _telling(repo, None):
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=files))


def fetch_gguf(repo: str, wanted: str | None, *, revision: str | None = None, cache_dir: Path | None = None) -> Path:
    """One file of a repository of GGUF files, as `choose_gguf` understands `wanted`."""
    import huggingface_hub

    with _telling(repo, revision) as is_offline:
        names = _list_files(repo, revision, cache_dir, is_offline)
        name = choose_gguf(names, wanted, repo)
        return Path(
            huggingface_hub.hf_hub_download(
                repo, name, revision=revision, cache_dir=cache_dir, local_files_only=is_offline
            )
        )


def _list_files(repo: str, revision: str | None, cache_dir: Path | None, is_offline: bool) -> list[str]:
    """The repository's files; where the hub cannot be asked, those that are here."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        if is_offline:
            raise ConnectionError("the hub cannot be reached")
        return huggingface_hub.HfApi().list_repo_files(repo, revision=revision)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        raise
    except Exception:
        snapshot = Path(
            huggingface_hub.snapshot_download(repo, revision=revision, cache_dir=cache_dir, local_files_only=True)
        )
        found = [str(file.relative_to(snapshot)) for file in snapshot.rglob("*.gguf")]
        if not found:
            raise
        return found


def _hub_failure() -> OSError | None:
    """Why the hub cannot be reached, where that is plain to see. The library would try for half a minute, also for a
    model that is here. Behind a proxy only the library can tell."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    host = parts.hostname or ""
    has_proxy = parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)
    if has_proxy or constants.HF_HUB_OFFLINE:
        return None
    try:
        socket.create_connection((host, parts.port or (80 if parts.scheme == "http" else 443)), _CONNECT_S).close()
    except OSError as error:
        return error
    return None


@contextmanager
def _telling(repo: str, revision: str | None) -> Iterator[bool]:
    """-> whether the hub is out of reach. The library's errors become ours, and off a terminal its bars are off."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    failure = _hub_failure()
    quiet = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        yield failure is not None
    except DownloadError:
        raise
    except Exception as error:  # the library raises its HTTP client's errors too, which differ by its version
        raise _explain(error, repo, revision, failure) from error
    finally:
        if quiet:
            enable_progress_bars()


def _explain(error: Exception, repo: str, revision: str | None, failure: OSError | None) -> DownloadError:
    from huggingface_hub import errors

    where = f"the hub's {repo!r}" + (f" at revision {revision!r}" if revision else "")
    has_token = bool(os.environ.get("HF_TOKEN"))
    # Order matters: a gated repository is a kind of one that is not found.
    if isinstance(error, errors.GatedRepoError):
        do = (
            "HF_TOKEN's account has not been granted access: ask for it on the model's page"
            if has_token
            else "ask for access on the model's page, then set HF_TOKEN to a token of your account"
        )
        return DownloadError(f"{where} is gated: {do} (https://huggingface.co/{repo})")
    if isinstance(error, errors.RevisionNotFoundError):
        return DownloadError(f"{where} does not exist: check the revision")
    if "/" not in repo:  # hardly a hub id: all but a few old ones have an owner
        return _no_such_name(repo, is_asked=isinstance(error, errors.RepositoryNotFoundError))
    if isinstance(error, errors.RepositoryNotFoundError):
        token = "" if has_token else ", and set HF_TOKEN if it is private"
        return DownloadError(f"{where} does not exist or is private: {_guess(repo)}check the spelling{token}")
    if isinstance(error, (errors.HFValidationError, errors.OfflineModeIsEnabled)):
        return DownloadError(f"{where} cannot be fetched: {error}")
    if isinstance(error, errors.LocalEntryNotFoundError):
        if os.environ.get("HF_HUB_OFFLINE"):
            return DownloadError(
                f"{where} is not in the local cache and HF_HUB_OFFLINE is set: unset it once to fetch it"
            )
        return DownloadError(
            f"{where} is not in the local cache and the hub cannot be reached: check the network and proxy, or give a "
            f"path ({_first_line(failure or _root(error))})"
        )
    return DownloadError(f"{where} could not be fetched: {_first_line(error)}: check the network and try again")


def _no_such_name(name: str, *, is_asked: bool) -> DownloadError:
    hub = "the hub has none either" if is_asked else "the hub could not be asked"
    return DownloadError(
        f"no file, folder or alias is called {name!r} ({hub}): {_guess(name)}give a path, an alias (`quire models` "
        "lists them) or a hub id of the form owner/name"
    )


def _guess(name: str) -> str:
    near = nearest(name.lower(), alias_names())
    return f"did you mean the alias {near[0]!r}? Otherwise " if near else ""


def _root(error: BaseException) -> BaseException:
    """The first error of a chain: the library's own words for it are advice to programmers."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


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
