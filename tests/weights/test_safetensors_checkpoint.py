from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import WeightsError
from quire.models.slots import WeightSlot
from quire.weights.safetensors_checkpoint import INDEX_NAME, SafetensorsCheckpoint, list_tensors, read_header


def shapes_of(tensors):
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def load(directory, recorded, ignored=()):
    SafetensorsCheckpoint(directory).load_into(recorded.slots, lambda name: name in ignored)
    return recorded.loaded


def split(tensors):
    items = list(tensors.items())
    return dict(items[:1]), dict(items[1:])


@pytest.mark.parametrize("sharded", [False, True])
def test_every_tensor_arrives_as_it_was_saved(write_safetensors, small_tensors, recorder, sharded):
    groups = split(small_tensors) if sharded else [small_tensors]
    loaded = load(write_safetensors(*groups), recorder(shapes_of(small_tensors)))
    assert loaded.keys() == small_tensors.keys()
    for name, tensor in small_tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_shards_without_an_index(tmp_path, write_safetensors, small_tensors, recorder):
    directory = write_safetensors(*split(small_tensors))
    (directory / INDEX_NAME).unlink()
    save_file(small_tensors, directory / "consolidated.safetensors")  # Mistral's second copy stays out
    assert load(directory, recorder(shapes_of(small_tensors))).keys() == small_tensors.keys()


def test_progress_counts_bytes(write_safetensors, small_tensors, recorder, nothing_ignored):
    calls = []
    checkpoint = SafetensorsCheckpoint(write_safetensors(*split(small_tensors)))
    recorded = recorder(shapes_of(small_tensors))
    checkpoint.load_into(recorded.slots, nothing_ignored, progress=lambda *args: calls.append(args))
    assert calls[-1] == (200, 200)  # 8*4*4 + 4*2 + 8*4*2
    assert len(calls) == 3


def test_configs(write_safetensors, small_tensors):
    directory = write_safetensors(small_tensors, config={"hidden_size": 4, "vocab_size": 8})
    assert SafetensorsCheckpoint(directory).generation_config == {}
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = SafetensorsCheckpoint(directory, hf_overrides={"vocab_size": 9})
    assert checkpoint.config == {"hidden_size": 4, "vocab_size": 9}
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert checkpoint.gguf_metadata is None


@pytest.mark.parametrize(("text", "says"), [(None, "missing"), ("{", "not valid JSON"), ("[]", "expected an object")])
def test_broken_config(write_safetensors, small_tensors, text, says):
    directory = write_safetensors(small_tensors)
    (directory / "config.json").unlink()
    if text is not None:
        (directory / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=f"config.json: .*{says}"):
        SafetensorsCheckpoint(directory)


def test_missing_shard(write_safetensors, small_tensors, recorder):
    directory = write_safetensors(*split(small_tensors))
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00002.safetensors: missing: shard 2 of 2.*fetch it again"):
        load(directory, recorder(shapes_of(small_tensors)))


def test_truncated_shard_is_found_before_anything_is_loaded(write_safetensors, small_tensors, recorder):
    directory = write_safetensors(*split(small_tensors))
    shard = directory / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    for length in range(len(whole)):
        shard.write_bytes(whole[:length])
        recorded = recorder(shapes_of(small_tensors))
        with pytest.raises(WeightsError, match=r"model-00002-of-00002.safetensors: truncated.*fetch it again"):
            load(directory, recorded)
        assert not recorded.loaded
    shard.write_bytes(whole + b"\0")
    with pytest.raises(WeightsError, match="too long"):
        load(directory, recorder(shapes_of(small_tensors)))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"PK\x03\x04" + b"\xff" * 40, "not a safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "not a safetensors file"),
        ((2).to_bytes(8, "little") + b"{{", "not a safetensors file"),
        ((11).to_bytes(8, "little") + b'{"a": null}', "not a safetensors file"),
    ],
)
def test_foreign_files(tmp_path, content, says):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(WeightsError, match=says) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


def test_header_that_contradicts_itself(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(WeightsError, match=r"corrupt header: tensor w of shape \[4\] and type F32 at bytes 0 to 8"):
        read_header(file)


def write_header(file, header: bytes, num_data_bytes: int = 8):
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * num_data_bytes)
    return file


def test_overlapping_tensors(tmp_path):
    half = {"dtype": "F16", "shape": [3]}
    header = json.dumps({"a": half | {"data_offsets": [0, 6]}, "b": half | {"data_offsets": [2, 8]}}).encode()
    with pytest.raises(WeightsError, match="tensors a and b overlap"):
        read_header(write_header(tmp_path / "x.safetensors", header))


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"w": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]}}',
        b'{"w": {"dtype": "F32", "shape": [true, 2], "data_offsets": [0, 8]}}',
    ],
)
def test_headers_that_are_none(tmp_path, header):
    with pytest.raises(WeightsError, match="not a safetensors file"):
        read_header(write_header(tmp_path / "x.safetensors", header))


def test_what_only_the_library_refuses_is_our_error_too(tmp_path, recorder):
    (tmp_path / "config.json").write_text("{}")
    header = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"a": 1}}'
    write_header(tmp_path / "model.safetensors", header)
    with pytest.raises(WeightsError, match="library cannot read it"):
        load(tmp_path, recorder({"w": (2,)}))


def test_shards_with_impossible_names(write_safetensors, small_tensors):
    directory = write_safetensors(*split(small_tensors))
    for shard in (["list"], 7, "../up.safetensors", "", "x" * 5000):
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
        with pytest.raises(WeightsError, match="expected a file beside the index"):
            SafetensorsCheckpoint(directory).tensors()


def test_wrong_shape_missing_and_extra(write_safetensors, small_tensors, recorder):
    directory = write_safetensors(small_tensors)
    shapes = shapes_of(small_tensors)
    with pytest.raises(WeightsError, match=r"model.safetensors: tensor model.norm.weight has shape \[4\].*\[5\]"):
        load(directory, recorder(shapes | {"model.norm.weight": (5,)}))
    with pytest.raises(WeightsError, match=r"missing: model.layers.0.mlp.up_proj.weight"):
        load(directory, recorder(shapes | {"model.layers.0.mlp.up_proj.weight": (2, 2)}))
    del shapes["lm_head.weight"]
    with pytest.raises(WeightsError, match=r"no place for: lm_head.weight"):
        load(directory, recorder(shapes))
    assert load(directory, recorder(shapes), ignored={"lm_head.weight"}).keys() == shapes.keys()


def test_tensor_in_two_files(write_safetensors, small_tensors, recorder):
    directory = write_safetensors(*split(small_tensors))
    (directory / INDEX_NAME).unlink()
    save_file({"model.norm.weight": torch.zeros(4)}, directory / "stray.safetensors")
    with pytest.raises(WeightsError, match=r"model.norm.weight stands in both .*stray.safetensors"):
        load(directory, recorder(shapes_of(small_tensors)))


def test_quantized_dtype_is_refused(write_safetensors, recorder):
    directory = write_safetensors({"w": torch.zeros(4, dtype=torch.int8)})
    with pytest.raises(WeightsError, match="tensor w is stored as I8, Quire reads F64, F32, F16, BF16"):
        load(directory, recorder({"w": (4,)}))


def test_index_that_lies(write_safetensors, small_tensors):
    directory = write_safetensors(*split(small_tensors))
    index = json.loads((directory / INDEX_NAME).read_text())
    for weight_map, says in [
        (index["weight_map"] | {"ghost": "model-00001-of-00002.safetensors"}, "lacks the tensor ghost"),
        ({"w": "../outside.safetensors"}, "expected a file beside the index"),
        ({}, "has no weight_map"),
    ]:
        (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(WeightsError, match=says):
            list_tensors(directory)


def test_directories_without_safetensors(tmp_path):
    with pytest.raises(WeightsError, match=r"has no \*.safetensors.*load_format='dummy'"):
        list_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(WeightsError, match="PyTorch pickles"):
        list_tensors(tmp_path)


def test_a_slot_that_holds_a_part_gets_that_part(write_safetensors):
    whole = {"m.weight": torch.randn(6, 8), "m.bias": torch.randn(6)}
    loaded = {}
    slots = {
        name: WeightSlot(
            name, tuple(tensor.shape), partial(loaded.__setitem__, name), lambda std, seed: None, part=part
        )
        for (name, tensor), part in zip(whole.items(), [(slice(2, 5), slice(4, 8)), (slice(2, 5),)], strict=True)
    }
    SafetensorsCheckpoint(write_safetensors(whole)).load_into(slots, lambda name: False)
    assert torch.equal(loaded["m.weight"], whole["m.weight"][2:5, 4:8])
    assert torch.equal(loaded["m.bias"], whole["m.bias"][2:5])
