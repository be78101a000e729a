"""The stores below an executor, from its config: the disk level, and a store of the user's own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from quire import __version__
from quire.config import EngineConfig
from quire.executor.device import Backend
from quire.models.decoder import Decoder
from quire.tiers.connector import make_connector
from quire.tiers.disk import DiskStore
from quire.tiers.peers import Peers
from quire.tiers.sealed import SEAL_BYTES, SealedStore
from quire.tiers.split import SplitStore
from quire.weights.checkpoint import Checkpoint, weights_fingerprint

_INBOX_BYTES = 2 << 30  # blocks that other engines sent and nobody has loaded yet


def describe_blocks(config: EngineConfig, checkpoint: Checkpoint, backend: Backend, decoder: Decoder) -> str:
    """Everything that makes a block's bytes what they are, beside its tokens: equal text, equal bytes."""
    weights, files = weights_fingerprint(checkpoint, config.seed)
    offsets = decoder.kv_offsets
    parts = {
        "quire": __version__,
        "model": config.model,
        "weights": weights,
        "files": files,
        "spec": repr(decoder.spec),
        "quantization": config.quantization,
        "activations": str(backend.activation_dtype),
        "weight dtype": backend.weight_dtype,
        # On a CPU, float32 by name multiplies packed weights otherwise than float32 that was left to us.
        "exact": getattr(backend.ops, "exact", None),
        "KV": str(backend.kv_dtype),
        "KV scales": repr(decoder.kv_scales),
        "KV offsets": None if offsets is None else hashlib.sha256(offsets.cpu().numpy().tobytes()).hexdigest(),
        "kernels": f"{backend.device.type} {type(backend.ops).__name__}",
        "block size": config.block_size,
        "layout": repr(decoder.layout),
        "share": repr(decoder.share),
    }
    return "\n".join(f"{name}: {value}" for name, value in parts.items())


def build_stores(
    config: EngineConfig,
    description: str,
    block_bytes: int,
    *,
    whole_block_bytes: int | None = None,
    num_ranks_on_host: int = 1,
) -> list[SealedStore]:
    """In the order in which they are asked: the disk, the user's own, then what other engines sent. A rank's blocks are
    parts of those of `whole_block_bytes`; what the disk level may take is divided so that all ranks hold as many."""
    identity = hashlib.sha256(description.encode()).digest()[:16]
    stores: list[SealedStore] = []
    if config.kv_disk_path is not None:
        size = config.kv_disk_size
        disk = DiskStore(
            config.kv_disk_path,
            max_bytes=None if size is None else size * block_bytes // (whole_block_bytes or block_bytes),
            record_bytes=block_bytes + SEAL_BYTES,
            identity=identity,
            description=description,
            num_sharers=num_ranks_on_host,
        )
        stores.append(SealedStore("disk", disk, identity=identity, block_bytes=block_bytes))
    if config.kv_transfer_config:
        name, connector = make_connector(config.kv_transfer_config)
        stores.append(SealedStore(name, connector, identity=identity, block_bytes=block_bytes))
    if config.kv_listen is not None:
        # The same model may lie elsewhere on another machine.
        lines = [line for line in description.splitlines() if not line.startswith(("model: ", "files: "))]
        identity = hashlib.sha256("\n".join(lines).encode()).digest()[:16]
        peers = Peers(config.kv_listen, description="\n".join(lines), block_bytes=block_bytes, max_bytes=_INBOX_BYTES)
        stores.append(SealedStore("peers", peers, identity=identity, block_bytes=block_bytes))
    return stores


def address_of(stores: Sequence[SealedStore | SplitStore]) -> str | None:
    """Where other engines reach this one, if they do."""
    own = [store.connector for store in stores if isinstance(store, SealedStore)]
    return next((connector.address for connector in own if isinstance(connector, Peers)), None)
