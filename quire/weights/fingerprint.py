"""Which weights these are, in few bytes read: for whatever outlives the process that computed with them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quire.weights.checkpoint import Checkpoint

_SAMPLE_BYTES = 4096


def weights_fingerprint(checkpoint: Checkpoint, seed: int) -> str:
    """A digest of every tensor's name, shape, dtype and first bytes, and of the files' sizes and times of change.

    Whoever changes a tensor changes the file's time, if not the sample. A copy elsewhere counts as other weights.
    """
    digest = hashlib.sha256()
    tensors = checkpoint.tensors()
    if tensors is None:  # made up from a seed
        return f"dummy, seed {seed}"
    files: dict[Path, None] = {}
    for entry in sorted(tensors, key=lambda entry: entry.name):
        files.setdefault(entry.file)
        digest.update(repr((entry.name, entry.shape, entry.dtype, entry.offset)).encode())
        with entry.file.open("rb") as file:
            file.seek(entry.offset)
            digest.update(file.read(min(_SAMPLE_BYTES, entry.num_bytes)))
    for path in sorted(files):
        status = path.stat()
        digest.update(repr((path.name, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()
