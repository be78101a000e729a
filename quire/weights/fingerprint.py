"""Which weights these are, in few bytes read: for whatever outlives the process that computed with them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quire.weights.checkpoint import Checkpoint

_SAMPLE_BYTES = 4096


def weights_fingerprint(checkpoint: Checkpoint, seed: int) -> tuple[str, str]:
    """A digest of every tensor's name, shape, dtype, first and last bytes, which a copy elsewhere has too; and one of
    the files' sizes and times of change, which it has not. Whoever changes a tensor changes one of them."""
    digest, of_files = hashlib.sha256(), hashlib.sha256()
    tensors = checkpoint.tensors()
    if tensors is None:  # made up from a seed
        return f"dummy, seed {seed}", ""
    files: dict[Path, None] = {}
    for entry in sorted(tensors, key=lambda entry: entry.name):
        files.setdefault(entry.file)
        digest.update(repr((entry.name, entry.shape, entry.dtype, entry.offset)).encode())
        with entry.file.open("rb") as file:
            num_sampled = min(_SAMPLE_BYTES, entry.num_bytes)
            for at in (entry.offset, entry.offset + entry.num_bytes - num_sampled):
                file.seek(at)
                digest.update(file.read(num_sampled))
    for path in sorted(files):
        status = path.stat()
        of_files.update(repr((path.name, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest(), of_files.hexdigest()
