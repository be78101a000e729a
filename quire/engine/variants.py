"""Engines around one set of weights.

Loading a model takes longer than most measurements of a setting, and settings do not change the weights. So the
weights are loaded once, and each setting gets a scheduler and a block manager of its own; only another block size needs
another cache. Each is what an engine started with those settings would be.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.engine.build import assemble_token_side
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError
from quire.executor.precompile import Precompile

if TYPE_CHECKING:
    from quire.executor.base import BuiltExecutor


@dataclass(slots=True)
class EngineVariants:
    """Holds the loaded model. One engine of it may run at a time; asking for the next ends the one before."""

    config: EngineConfig  # with the most rows, tokens a step and blocks that any variant asks for
    _base: LLMEngine | None = None
    _other: BuiltExecutor | None = None  # with another block size; one at a time

    def base(self) -> LLMEngine:
        """The engine as configured, loaded when it is first asked for."""
        if self._base is None:
            self._base = LLMEngine.from_config(self.config)
        return self._base

    def engine(self, *, num_blocks: int | None = None, **changes: Any) -> LLMEngine:
        """An empty engine that differs from the configured one by `changes`, and by how many blocks it may use."""
        base = self.base()
        config = base.config.replace(**changes)
        for one in (base.built.executor, self._other):
            if one is not None:
                one.executor.reset()
        executor = self._executor(config.block_size)
        self._set_stores(executor, config)
        ledger = executor.ledger
        if num_blocks is not None:
            if num_blocks > ledger.num_blocks:
                raise ConfigError(
                    f"{num_blocks:,} blocks of {config.block_size} tokens were asked for, and the cache has "
                    f"{ledger.num_blocks:,}: it takes a machine with more memory"
                )
            ledger = replace(
                ledger,
                num_blocks=num_blocks,
                kv_bytes=num_blocks * ledger.block_bytes,
                max_model_len=min(ledger.max_model_len, num_blocks * config.block_size),
            )
            config = config.replace(num_gpu_blocks_override=num_blocks, kv_cache_memory_bytes=None)
        max_num_seqs = config.max_num_seqs or executor.max_num_seqs
        max_tokens = config.max_num_batched_tokens or executor.max_num_batched_tokens
        assert max_num_seqs <= executor.max_num_seqs and max_tokens <= executor.max_num_batched_tokens
        executor = replace(executor, ledger=ledger, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens)
        text = base.built.text
        built = replace(
            base.built,
            config=config,
            tokens=assemble_token_side(config, executor),
            inputs=text.make_inputs(ledger.max_model_len, max_num_seqs, executor.backend.serves_determinism),
            outputs=text.make_outputs(),
        )
        return LLMEngine(built)

    def _set_stores(self, built: BuiltExecutor, config: EngineConfig) -> None:
        """Levels below the device belong to a variant, not to the weights."""
        from quire.executor.device import Backend
        from quire.executor.local import LocalExecutor
        from quire.executor.store_moves import StoreMoves
        from quire.executor.stores import build_stores, describe_blocks

        if not isinstance(built.executor, LocalExecutor):
            # An encoder has none, and ranks keep those that they have had from their start.
            names = ("kv_disk_path", "kv_disk_size", "kv_transfer_config")
            if any(getattr(config, name) != getattr(self.config, name) for name in names):
                raise ConfigError("ranks have their levels below the device from the start: give them to the first")
            return
        worker = built.executor.worker
        worker.stores.close()
        description = ""
        if config.has_kv_stores:
            assert isinstance(built.backend, Backend)
            description = describe_blocks(config, self.base().built.checkpoint, built.backend, worker.decoder)
        stores = build_stores(config, description, worker.cache.block_bytes)
        worker.stores = StoreMoves(worker.cache, stores, worker.decoder.layout)

    def clear(self) -> None:
        """Give the memory back."""
        if self._base is not None:
            self._base.close()
        self._base = self._other = None
        gc.collect()

    def _executor(self, block_size: int) -> BuiltExecutor:
        built = self.base().built.executor
        if block_size == built.ledger.block_size:
            self._other = None
            return built
        if self._other is None or self._other.ledger.block_size != block_size:
            self._other = None
            gc.collect()  # the cache before this one, on a GPU, has to be gone first
            self._other = self._with_block_size(built, block_size)
        return self._other

    def _with_block_size(self, built: BuiltExecutor, block_size: int) -> BuiltExecutor:
        """The same weights, with a cache of as many bytes in blocks of another size; none of them on the host."""
        from quire.executor.build import assemble_executor
        from quire.executor.device import Backend
        from quire.executor.kv_cache import KVCache
        from quire.executor.local import LocalExecutor
        from quire.executor.profile import let_go_of_held_memory

        if not isinstance(built.executor, LocalExecutor) or not isinstance(built.backend, Backend):
            raise ConfigError("another block size needs a model in one process: leave tensor_parallel_size at 1")
        if self.config.enable_lora:
            raise ConfigError("another block size is measured without adapters: leave enable_lora away")
        spec, backend, ledger = self.base().spec, built.backend, built.ledger
        if precompile := Precompile.start(self.config.replace(block_size=block_size), spec):
            precompile.wait()  # on all cores; else each kernel would be compiled where it is launched first
        let_go_of_held_memory(backend.device)
        layout = built.executor.worker.decoder.layout
        num_bytes = layout.block_bytes(spec, block_size, backend.kv_dtype.itemsize)
        num_blocks = ledger.kv_bytes // num_bytes
        cache = KVCache(
            spec,
            layout,
            num_blocks=num_blocks,
            num_host_blocks=0,
            block_size=block_size,
            dtype=backend.kv_dtype,
            device=backend.device,
        )
        # The sampler knows rows and the vocabulary, not blocks: the two executors, of which one runs, share it.
        executor = assemble_executor(
            built.executor.worker.decoder,
            cache,
            built.executor.worker.sampler,
            backend,
            ledger,
            block_size=block_size,
            max_num_seqs=built.max_num_seqs,
            with_graphs=built.executor.worker.graphs is not None,
            precompile=precompile,
            constraints=built.executor.worker.constraints,
        )
        return replace(
            built,
            executor=executor,
            ledger=replace(
                ledger,
                block_size=block_size,
                block_bytes=num_bytes,
                num_blocks=num_blocks,
                num_host_blocks=0,
                kv_bytes=num_blocks * num_bytes,
                swap_bytes=0,
            ),
        )
