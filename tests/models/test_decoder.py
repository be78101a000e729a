"""Every architecture gives transformers' logits, whatever the batching and the block size."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import models_harness as harness
import pytest
import torch

from quire.kernels.reference import ReferenceLinear, ReferenceOps
from quire.kernels.triton import TritonOps
from quire.models.decoder import Decoder
from quire.models.layer import ReadRows

LENGTHS = (37, 19, 1, 26)
TOLERANCE = 1e-4


@functools.cache
def _case(name):
    """A model's spec, weights, sequences and transformers' logits for them."""
    model = harness.tiny_model(name)
    sequences = harness.random_sequences(model.config.vocab_size, LENGTHS)
    expected = [harness.oracle_logits(model, sequence) for sequence in sequences]
    return harness.spec_of(model), model.state_dict(), sequences, expected


def _assert_close(logits, expected):
    for got, want in zip(logits, expected, strict=True):
        assert got.shape == want.shape
        assert (got - want).abs().max().item() <= TOLERANCE


@pytest.mark.parametrize("block_size", [4, 16, 128])
@pytest.mark.parametrize("schedule", harness.SCHEDULES)
@pytest.mark.parametrize("name", harness.TINY_MODELS)
def test_logits_are_those_of_transformers(name, schedule, block_size):
    spec, state_dict, sequences, expected = _case(name)
    assert expected[0].std() > 0.5, "logits near zero would prove little"
    ops = ReferenceOps("cpu", torch.float32)
    logits = harness.run_paged(spec, state_dict, ops, sequences, harness.SCHEDULES[schedule](LENGTHS), block_size)
    _assert_close(logits, expected)


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window", "qwen3-window", "gemma3"])
def test_windows_matter_in_these_tests(name):
    """Without its windows the model gives other logits: else the tests above would not see them."""
    spec, state_dict, sequences, expected = _case(name)
    blind = replace(spec, layers=tuple(replace(layer, window=None) for layer in spec.layers))
    ops = ReferenceOps("cpu", torch.float32)
    logits = harness.run_paged(blind, state_dict, ops, sequences, harness.whole(LENGTHS), 16)
    assert (logits[0] - expected[0]).abs().max() > 0.01


def test_a_sequence_reads_blocks_that_another_writes_in_the_same_step():
    spec, state_dict, sequences, _ = _case("llama")
    twins = [sequences[0], sequences[0][:16] + sequences[1]]
    model_logits = [harness.run_paged(spec, state_dict, _ops(), [s], harness.whole([len(s)]), 8)[0] for s in twins]
    logits = harness.run_paged(
        spec, state_dict, _ops(), twins, [[(1, len(twins[1]) - 16), (0, 37)]], 8, shared_prefix={1: (0, 2)}
    )
    _assert_close(logits, [model_logits[0], model_logits[1][16:]])


def test_logits_of_chosen_tokens_only():
    spec, state_dict, _, _ = _case("qwen3")
    decoder = harness.load_decoder(spec, state_dict, _ops())
    hidden = torch.randn(5, spec.hidden_size)
    everything = decoder.logits(hidden, None)
    chosen = decoder.logits(hidden, torch.tensor([4, 1]))
    assert chosen.dtype == torch.float32
    torch.testing.assert_close(chosen, everything[[4, 1]])


def test_gemma_embedding_scale_is_rounded_to_the_activations_dtype(monkeypatch):
    spec, state_dict, _, _ = _case("gemma3")
    spec = replace(spec, embedding_scale=3072**0.5)
    for dtype, rounded in ((torch.bfloat16, 55.5), (torch.float32, torch.tensor(3072**0.5).item())):
        seen = []

        class Spy(ReferenceLinear):
            def embed(self, token_ids, scale=None):
                seen.append(scale)  # noqa: B023
                return super().embed(token_ids, scale)

        monkeypatch.setattr("quire.kernels.reference.ops.ReferenceLinear", Spy)
        ops = ReferenceOps("cpu", dtype)
        harness.run_paged(spec, state_dict, ops, [[1, 2]], [[(0, 2)]], 4, dtype=dtype)
        assert seen == [rounded]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype):
    spec, state_dict, sequences, expected = _case("llama")
    ops = ReferenceOps("cpu", dtype)
    logits = harness.run_paged(spec, state_dict, ops, sequences, harness.mixed(LENGTHS), 16, dtype=dtype)
    for got, want in zip(logits, expected, strict=True):
        assert got.dtype == torch.float32
        assert (got - want).abs().mean() < 0.05 * want.std()


def test_float64_is_an_oracle_for_float32():
    spec, state_dict, sequences, expected = _case("gemma3")
    ops = ReferenceOps("cpu", torch.float64)
    logits = harness.run_paged(spec, state_dict, ops, sequences, harness.whole(LENGTHS), 16, dtype=torch.float64)
    assert logits[0].dtype == torch.float64
    _assert_close([part.float() for part in logits], expected)


def test_weight_bytes_counts_each_matrix_once():
    for name, num_vocab_matrices in (("llama", 2), ("llama-tied", 1)):
        spec, state_dict, _, _ = _case(name)
        decoder = harness.load_decoder(spec, state_dict, _ops(), max_position=100)
        unique = {tensor.data_ptr(): tensor.nbytes for tensor in state_dict.values()}
        assert len([n for n in state_dict if n in ("lm_head.weight", "model.embed_tokens.weight")]) == 2
        assert decoder.weight_bytes == sum(unique.values()) + 100 * spec.head_dim * 4
        assert ("lm_head.weight" in decoder.weight_slots()) == (num_vocab_matrices == 2)


def test_ignored_weights():
    tied = harness.load_decoder(*_case("llama-tied")[:2], _ops())
    untied = harness.load_decoder(*_case("llama")[:2], _ops())
    assert tied.is_ignored_weight("lm_head.weight") and not untied.is_ignored_weight("lm_head.weight")
    assert untied.is_ignored_weight("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not untied.is_ignored_weight("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_pass_tells_of_each_layer_once_its_keys_and_values_are_written(name):
    spec, state_dict, sequences, _ = _case(name)
    decoder = harness.load_decoder(spec, state_dict, _ops())
    run = harness.PagedRun(decoder, sequences[:1], 8)
    forward, told, found = decoder.forward, [], []

    def on_written(layer):
        told.append(layer)
        found.append(run.kv[layer].clone())
        assert all(later.isnan().all() for later in run.kv[layer + 1 :])

    decoder.forward = functools.partial(forward, on_written=on_written)
    run.step([(0, len(sequences[0]))])
    assert told == list(range(spec.num_layers - 1))  # of the last, the end of the pass tells
    for layer, kv in enumerate(found):
        assert torch.equal(kv.nan_to_num(), run.kv[layer].nan_to_num()) and kv.isfinite().any()


def test_a_pass_begins_with_nothing_of_an_earlier_one():
    """Pieces of attention are cut once for all layers of a pass; a batch that runs again may have other lengths."""
    spec, state_dict, sequences, _ = _case("gemma3")
    run = harness.PagedRun(harness.load_decoder(spec, state_dict, _ops()), sequences, 16)
    order = [(0, 1), (1, 1)]
    token_ids, batches = run._token_ids(order), [run._batch(order, tables) for tables in run.tables]
    alone = replace(batches[-1])
    for batch in (*batches, alone):
        batch.decode_pieces["cut before"] = token_ids
    run.decoder.forward(token_ids, batches, run.kv, ReadRows(torch.tensor([0, 1]), alone))
    assert len(batches) > 1 and not any(batch.decode_pieces for batch in (*batches, alone))


def test_layers_with_the_same_rotary_share_one_table():
    decoder = harness.load_decoder(*_case("gemma3")[:2], _ops())
    tables = {layer.attention.rotary.cos_sin.data_ptr() for layer in decoder._layers}
    assert len(decoder._layers) == 4 and len(tables) == 2


@pytest.mark.parametrize("name", ["llama-biases", "gemma3"])
def test_dummy_weights_fill_everything_and_follow_the_seed(name):
    spec = _case(name)[0]

    def logits(seed):
        decoder = Decoder(spec, _ops(), device="cpu", dtype=torch.float32, max_position=64)
        for layer in decoder._layers:
            for matrix, _ in (*layer.attention.matrices(), *layer.mlp.matrices()):
                matrix.weight.fill_(float("nan"))
        for index, slot in enumerate(decoder.weight_slots().values()):
            slot.randomize(0.02, seed + index)
        run = harness.PagedRun(decoder, [[5, 6, 7]], 4)
        return run.step([(0, 3)])[0]

    first = logits(1)
    assert first.isfinite().all()
    assert torch.equal(first, logits(1))
    assert not torch.equal(first, logits(1000))


@pytest.mark.parametrize(("name", "num_added"), [("llama", 2), ("gemma3", 0)])
def test_each_matrix_is_multiplied_once_in_the_way_of_the_steps(name, num_added, monkeypatch):
    """Products that are added to the residual stream are other code of the library's than those that are not."""
    from quire.kernels.triton.linear import TritonLinear

    calls = Counter()

    class Recording(TritonLinear):
        def _multiply_many(self, x, bias):
            calls["alone", *x.shape, self.out_features] += 1

        def _multiply_add_many(self, x, residual):
            assert residual.shape == (len(x), self.out_features)
            calls["added", *x.shape, self.out_features] += 1

    spec, device = _case(name)[0], torch.device("meta")
    monkeypatch.setattr("quire.kernels.triton.linear.TritonLinear", Recording)
    ops = TritonOps(device, torch.bfloat16)
    decoder = Decoder(spec, ops, device=device, dtype=torch.bfloat16, max_position=64)
    decoder.finish_loading()
    decoder.multiply_once(100)
    assert sum(calls.values()) == 4
    assert sum(count for (kind, *_), count in calls.items() if kind == "added") == num_added
    assert all(num_rows == 100 for _, num_rows, *_ in calls)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_excerpt_has_each_kind_of_layer_and_the_last(name):
    spec = _case(name)[0]
    spec = replace(spec, num_layers=3 * len(spec.layers), layers=spec.layers * 3)
    decoder = Decoder(spec, _ops(), device="cpu", dtype=torch.float32, max_position=64)
    excerpt, kept = decoder.excerpt()
    assert kept == sorted(set(kept)) and kept[-1] == spec.num_layers - 1
    assert {spec.layers[index] for index in kept} == set(spec.layers) and len(kept) <= len(set(spec.layers)) + 1
    assert all(one is decoder._layers[index] for one, index in zip(excerpt._layers, kept, strict=True))
    assert len(decoder._layers) == spec.num_layers


def _ops():
    return ReferenceOps("cpu", torch.float32)
