"""A rank reads of an adapter what belongs to its part of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import adapter_files
import models_harness as harness
import pytest
import torch
from rank_models import write_lively_model
from safetensors.torch import load_file

from quire.errors import WeightsError
from quire.executor.adapter_store import DeviceAdapters
from quire.kernels.adapters import AdapterBank
from quire.kernels.reference import ReferenceOps
from quire.models.architectures import spec_from_config
from quire.models.decoder import Decoder
from quire.models.kv_layout import kv_layout
from quire.models.share import ModelShare, share_of
from quire.models.spec import ModelSpec
from quire.models.stored_names import StoredNames
from quire.models.tensors import adaptable_matrices

RANK = 5


class NoRanks:
    """Nothing is summed here."""

    samples = True


def adapters_of(spec: ModelSpec, share: ModelShare) -> tuple[DeviceAdapters, AdapterBank]:
    ops = ReferenceOps("cpu", torch.float32)
    bank = AdapterBank(2, RANK, device="cpu", dtype=torch.float32, tile=ops.adapter_tile)
    ranks: Any = NoRanks()
    decoder = Decoder(
        spec, ops, device="cpu", dtype=torch.float32, max_position=64, share=share, ranks=ranks, adapters=bank,
        layout=share.layout(kv_layout(spec, 64)),
    )  # fmt: skip
    decoder.finish_loading()
    return DeviceAdapters(bank, spec, StoredNames(), max_rank=RANK), bank


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelSpec]:
    model = write_lively_model(tmp_path_factory.mktemp("lively"))
    adapter_files.write_adapter(model / "adapter", model, rank=RANK, lora_alpha=3)
    return model / "adapter", spec_from_config(json.loads((model / "config.json").read_text()), source="test")


@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)], ids=str)
def test_the_ranks_parts_are_the_whole_adapter(files: tuple[Path, ModelSpec], degrees: tuple[int, int]) -> None:
    """In shares that are not equal, and with KV heads that several ranks have. Every part of B A is on its ranks: of
    what is summed over them, the products of parts of A with all of B."""
    path, spec = files
    thin = load_file(path / "adapter_model.safetensors")
    found: dict[str, torch.Tensor] = {}
    keys = set()
    for rank in range(degrees[0] * degrees[1]):
        adapters, bank = adapters_of(spec, share_of(spec, rank, *degrees))
        keys.add(key := adapters.read("a", str(path)).key)
        adapters.place(key, 1)
        assert adapters.slot_of(key) == 1
        for module, site in bank.sites.items():
            place = site.matrix.low_rank
            assert place is not None and bank.host_ranks[1][place.index] == RANK
            whole = found.setdefault(module, torch.full(adaptable_matrices(spec)[module], torch.nan))
            rows, columns = site.part or (slice(None), slice(None))
            part = [sum(place.part_rows[:i]) for i in range(len(place.part_rows))].index(site.first_row)
            a = place.a(bank.values[1])[part * bank.max_rank :][: bank.max_rank]
            b = place.b(bank.values[1])[:, site.first_row :][:, : place.part_rows[part]].T
            if site.head_order is not None:
                back = torch.tensor(site.head_order).argsort()
                b = b.reshape(-1, len(back), b.shape[1])[:, back].reshape(b.shape)
            whole[rows, columns] = b @ a
    assert len(keys) == 1 and found.keys() == adaptable_matrices(spec).keys()
    for module, whole in found.items():
        a, b = (thin[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        torch.testing.assert_close(whole, 3 / RANK * (b @ a))


def test_files_that_change_while_they_are_read(
    files: tuple[Path, ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = files[1]
    folders = [adapter_files.write_adapter(tmp_path / str(n), files[0].parent, rank=RANK, seed=n) for n in range(2)]
    adapters, bank = adapters_of(spec, ModelShare.whole(spec))
    pack = bank.pack

    def replace_and_pack(pairs: Any) -> Any:
        (folders[1] / "adapter_model.safetensors").rename(folders[0] / "adapter_model.safetensors")
        return pack(pairs)

    monkeypatch.setattr(bank, "pack", replace_and_pack)
    with pytest.raises(WeightsError, match="changed while they were read: load it again"):
        adapters.read("a", str(folders[0]))
    adapters.keep([])
    monkeypatch.setattr(bank, "pack", pack)
    adapters.keep([adapters.read("a", str(folders[0])).key])


def test_a_stage_refuses_what_fits_no_layer_of_the_model(files: tuple[Path, ModelSpec], tmp_path: Path) -> None:
    """The layers of others it checks, and keeps nothing of them."""
    _, spec = files
    model = write_lively_model(tmp_path / "deeper", num_hidden_layers=spec.num_layers + 1)
    adapter = adapter_files.write_adapter(tmp_path / "a", model, rank=RANK)
    with pytest.raises(WeightsError, match=r"changes model\.layers\.2\.mlp\.down_proj, of which this model has none"):
        adapters_of(spec, share_of(spec, 0, 1, 2))[0].read("a", str(adapter))


@pytest.mark.parametrize("name", harness.TINY_MODELS)
def test_what_adapters_can_change_is_what_they_are_laid_out_for(name: str) -> None:
    spec = harness.spec_of(harness.tiny_model(name))
    assert adapters_of(spec, ModelShare.whole(spec))[1].sites.keys() == adaptable_matrices(spec).keys()
