"""Families beside Llama's nearest, by way of the files that transformers writes: its logits on every CPU backend."""

from __future__ import annotations

import models_harness as harness
import pytest
import torch

from quire.errors import ConfigError, UnsupportedModelError, WeightsError
from quire.executor.sizing import weight_bytes
from quire.kernels.reference import ReferenceOps
from quire.layers.rotary import pairs_order
from quire.models.architectures import spec_from_config
from quire.models.decoder import Decoder
from quire.models.share import share_of
from quire.models.tensors import checkpoint_tensors
from quire.weights import open_checkpoint
from tests.models.families import EXPERTS, FAMILIES, saved, tiny_model

LENGTHS = (29, 9, 1)


@pytest.mark.parametrize("name", FAMILIES | EXPERTS)
def test_logits_are_those_of_transformers(name, tmp_path):
    model = tiny_model((FAMILIES | EXPERTS)[name])
    spec, tensors = saved(model, tmp_path)
    sequences = harness.random_sequences(spec.vocab_size, LENGTHS)
    expected = [harness.oracle_logits(model, sequence) for sequence in sequences]
    assert expected[0].std() > 0.3, "logits near zero would prove little"
    for ops in harness.cpu_backends():
        for steps in (harness.whole(LENGTHS), harness.mixed(LENGTHS)):
            logits = harness.run_paged(spec, tensors, ops, sequences, steps, 16)
            for got, want in zip(logits, expected, strict=True):
                assert (got - want).abs().max() <= 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoint_and_sizes_are_the_decoders(name, tmp_path):
    """Names and shapes are known from the config, the loader fills every slot, and the planner knows the bytes."""
    spec, _ = saved(tiny_model(FAMILIES[name]), tmp_path)
    decoder = Decoder(spec, ReferenceOps("cpu", torch.float32), device="cpu", dtype=torch.float32, max_position=64)
    slots = decoder.weight_slots()
    assert checkpoint_tensors(spec) == {name: slot.shape for name, slot in slots.items()}
    open_checkpoint(tmp_path).load_into(slots, decoder.is_ignored_weight)
    assert decoder.weight_bytes == weight_bytes(spec, "float32", 64)


def test_ranks_cannot_divide_a_norm_over_all_heads(tmp_path):
    spec, _ = saved(tiny_model(FAMILIES["olmo2"]), tmp_path)
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        share_of(spec, 0, 2)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("DeepseekV3ForCausalLM", "MLA"), ("Llama4ForCausalLM", "chunked"), ("Gemma3nForCausalLM", "Gemma3ForCausalLM")],
)
def test_a_refusal_says_what_a_family_has_that_is_not_served(architecture, reason):
    with pytest.raises(UnsupportedModelError, match=f"{architecture} is not served.*{reason}"):
        spec_from_config({"architectures": [architecture]}, source="config.json")


def test_longrope_past_the_trained_length(tmp_path):
    """transformers takes the long factors where the sequence is longer than that, an engine where one may be."""
    model = tiny_model(FAMILIES["phi3-longrope"])
    spec, tensors = saved(model, tmp_path)
    sequences = harness.random_sequences(spec.vocab_size, (270,))
    decoder = harness.load_decoder(spec, tensors, ReferenceOps("cpu", torch.float32), max_position=512)
    run = harness.PagedRun(decoder, sequences, 16)
    logits = torch.cat([run.step([(0, count)])[0] for count in (200, 69, 1)])
    assert (logits - harness.oracle_logits(model, sequences[0])).abs().max() <= 1e-4


def test_a_fused_tensor_of_another_size_is_named(tmp_path):
    model = tiny_model(FAMILIES["phi3"])
    saved(model, tmp_path)
    checkpoint = open_checkpoint(tmp_path, hf_overrides={"num_key_value_heads": 4})
    with pytest.raises(WeightsError, match=r"missing: model\.layers\.0\.self_attn\.q_proj\.weight"):
        checkpoint.check(spec_from_config(checkpoint.config, source="config.json"))


def test_heads_that_turn_in_part_are_paired_as_kernels_pair_them():
    assert pairs_order(8, 4) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert pairs_order(8, 8) == list(range(8))


@pytest.mark.parametrize(
    ("architecture", "near"), [("Phi4ForCausalLM", "Phi3ForCausalLM"), ("OlmoForCausalLM", "Olmo2ForCausalLM")]
)
def test_a_refused_architecture_is_told_its_nearest(architecture, near):
    with pytest.raises(UnsupportedModelError, match=rf"{architecture} is not served.*Nearest: .*{near}"):
        spec_from_config({"architectures": [architecture]}, source="config.json")


def test_own_names_of_keys_are_in_complaints(tmp_path):
    saved(tiny_model(FAMILIES["gpt2"]), tmp_path)
    config = open_checkpoint(tmp_path).config
    with pytest.raises(UnsupportedModelError, match="n_embd is missing"):
        spec_from_config({key: value for key, value in config.items() if key != "n_embd"}, source="config.json")
