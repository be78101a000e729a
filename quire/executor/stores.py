"""The stores below an executor, from its config: the disk level, and a store of the user's own."""

from __future__ import annotations

import hashlib

from quire import __version__
from quire.config import EngineConfig
from quire.executor.device import Backend
from quire.models.decoder import Decoder
from quire.tiers.connector import make_connector
from quire.tiers.disk import DiskStore
from quire.tiers.sealed import SEAL_BYTES, SealedStore
from quire.weights import Checkpoint
from quire.weights.fingerprint import weights_fingerprint


def describe_blocks(
    config: EngineConfig,
    checkpoint: Checkpoint,
    backend: Backend,
    decoder: Decoder,
) -> str:
    """Everything that makes a block's bytes what they are, beside its tokens: equal text, equal bytes."""
    parts = {
        "quire": __version__,
        "model": config.model,
        "weights": weights_fingerprint(checkpoint, config.seed),
        "spec": repr(decoder.spec),
        "quantization": config.quantization,
        "activations": str(backend.activation_dtype),
        "weight dtype": backend.weight_dtype,
        "KV": str(backend.kv_dtype),
        "KV scales": repr(decoder.kv_scales),
        "batch invariant": config.batch_invariant,
        "kernels": f"{backend.device.type} {backend.ops.name}",
        "block size": config.block_size,
        "layout": repr(decoder.layout),
        "share": repr(decoder.share),
    }
    return "\n".join(f"{name}: {value}" for name, value in parts.items())


def build_stores(config: EngineConfig, description: str, block_bytes: int) -> list[SealedStore]:
    """In the order in which they are asked: the disk, then the user's own."""
    identity = hashlib.sha256(description.encode()).digest()[:16]
    stores: list[SealedStore] = []
    if config.kv_disk_path is not None:
        assert config.kv_disk_size is not None
        disk = DiskStore(
            config.kv_disk_path,
            max_bytes=int(config.kv_disk_size),
            record_bytes=block_bytes + SEAL_BYTES,
            identity=identity,
            description=description,
        )
        stores.append(SealedStore("disk", disk, identity=identity, block_bytes=block_bytes))
    if config.kv_transfer_config:
        name, connector = make_connector(config.kv_transfer_config)
        stores.append(SealedStore(name, connector, identity=identity, block_bytes=block_bytes))
    return stores
