"""Adapters in captured steps on CUDA, whose A x runs on a stream beside the product: the tokens without graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import adapter_files
import pytest
import torch
from test_gpu import make, requests, run_all, same_up_to_ties

from quire import SamplingParams
from quire.executor.captured import CapturedSteps
from quire.executor.decode_graphs import DecodeShape
from quire.executor.mixed_graphs import MixedShape
from quire.lora.request import LoRARequest

pytestmark = pytest.mark.gpu

SIZES = {2: 2, 8: 8, 33: 40}  # sequences that decode together, and for how many their step is captured


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[LoRARequest | None]]:
    """A model, and what requests take in turn: an adapter, none, another adapter."""
    root = tmp_path_factory.mktemp("beside")
    model = adapter_files.write_model(root / "model")
    paths = [adapter_files.write_adapter(root / str(rank), model, rank=rank, seed=rank) for rank in (4, 20)]
    first, second = (LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, 1))
    return model, [first, None, second]


def decoding_together(count: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(count)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    return [([rng.randrange(250) for _ in range(rng.randint(2, 30))], params) for _ in range(count)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_captured_fork_beside_products_changes_nothing(
    files: tuple[Path, list[LoRARequest | None]], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.kernels.triton import adapters

    model, in_turn = files
    replayed: set[object] = set()
    forks: list[torch.cuda.Stream] = []
    replay, beside = CapturedSteps._replay, adapters._beside

    def noted_replay(steps: CapturedSteps[Any], shape: Any, num_rows: int) -> torch.Tensor | None:
        replayed.add(shape)
        return replay(steps, shape, num_rows)

    def noted_beside(
        side: torch.cuda.Stream, device: torch.device, launch: Callable[[], None]
    ) -> AbstractContextManager[None]:
        assert torch.cuda.is_current_stream_capturing() and side != torch.cuda.current_stream(device)
        forks.append(side)
        return beside(side, device, launch)

    monkeypatch.setattr(CapturedSteps, "_replay", noted_replay)
    monkeypatch.setattr(adapters, "_beside", noted_beside)
    monkeypatch.setattr(adapters, "_MIN_BESIDE", 0)  # matrices are tiny here
    # More requests than sequences that run at once: the last ones' prompts come while others decode.
    work = [*map(decoding_together, SIZES), requests(56)]
    sizes = {"max_loras": 2, "max_lora_rank": 32, "max_num_seqs": 40, "kv_cache_memory_bytes": 8 << 20}
    engines = [
        make(model, device="cuda", dtype=dtype, enable_lora=True, enforce_eager=eager, **sizes)
        for eager in (False, True)
    ]
    while engines[0].core.prepare_more():
        pass
    with_graphs, without = ([one for each in work for one in run_all(engine, each, in_turn)] for engine in engines)
    assert len(forks) > 100 and set(forks) == {engines[0].core.executor.worker.decoder.ops.side_stream}
    assert {DecodeShape(size, shares=False, adapted=True) for size in SIZES.values()} <= replayed
    assert any(isinstance(shape, MixedShape) and shape.adapted and shape.num_decodes for shape in replayed)
    if dtype == "float32":
        same_up_to_ties(with_graphs, without)
    else:
        same = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(with_graphs, without, strict=True))
        assert same >= 0.9 * len(without), f"{same} of {len(without)} answers are the same"  # rounding differs by size
    for engine in engines:
        engine.close()
