"""The sampler as the executor uses it: rows come, fork, sample together, fail alone, leave and come back."""

from __future__ import annotations

import math
import warnings
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.params import SamplingSpec
from quire.request import FinishReason
from quire.sampling import SampledBatch, Sampler, reference
from quire.sampling.noise import exponentials, token_words
from quire.sampling.scratch import Scratch

VOCAB = 300
NUM_ROWS = 12


def new_sampler(num_rows: int = NUM_ROWS, vocab_size: int = VOCAB, device: str = "cpu") -> Sampler:
    return Sampler(num_rows=num_rows, vocab_size=vocab_size, device=torch.device(device), max_model_len=1000)


def logits_at(sequence: int, position: int, vocab_size: int = VOCAB) -> Tensor:
    """Stands for a model: what a sequence's logits are at a position."""
    generator = torch.Generator().manual_seed(sequence * 10_007 + position)
    return torch.randn(vocab_size, generator=generator) * 3


def tokens_of(batch: SampledBatch) -> list[int]:
    tokens, _, failed = batch.to_lists()
    assert not failed
    return [token for [token] in tokens]


@dataclass(slots=True)
class Run:
    """A sequence in the hands of a sampler."""

    number: int
    spec: SamplingSpec
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    row: int = 0

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.output

    def logits(self) -> Tensor:
        return logits_at(self.number, len(self.token_ids))


def step(sampler: Sampler, runs: list[Run]) -> None:
    logits = torch.stack([run.logits() for run in runs])
    batch = sampler.sample(logits, [run.row for run in runs], [len(run.token_ids) for run in runs])
    for run, token in zip(runs, tokens_of(batch), strict=True):
        run.output.append(token)


def alone(run: Run, num_tokens: int) -> list[int]:
    """What the sequence draws with a sampler to itself."""
    sampler = new_sampler()
    single = Run(run.number, run.spec, run.prompt)
    sampler.admit(0, run.spec, run.prompt, len(run.prompt))
    for _ in range(num_tokens):
        step(sampler, [single])
    return single.output


FIELDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 2},
    "large top_k": {"top_k": 150},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.05},
    "all filters": {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"temperature": 0.0, "frequency_penalty": 1.5},
    "repetition": {"temperature": 0.0, "repetition_penalty": 3.0},
    "all penalties": {"presence_penalty": -1.0, "frequency_penalty": 0.5, "repetition_penalty": 0.7},
    "min_tokens": {"temperature": 0.0, "min_tokens": 4, "end_token_ids": tuple(range(0, VOCAB, 2))},
    "logit_bias": {"logit_bias": {5: 9.0, 299: 8.0}},
    "allowed": {"allowed_token_ids": (1, 4, 250)},
    "allowed and top_k": {"allowed_token_ids": (1, 4, 250), "top_k": 2},
    "bad words": {"allowed_token_ids": (1, 2, 3), "bad_words": ((1, 1), (2, 3), (3, 1, 2))},
    "bias and repetition": {"temperature": 0.0, "logit_bias": {7: 12.0, 8: 11.0}, "repetition_penalty": 2.0},
    "logprobs": {"logprobs": 3},
    "seed": {"seed": 2**64 - 3, "index": 4},
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_samples_what_the_oracle_samples(name: str) -> None:
    spec = SamplingSpec(**{"seed": 11, **FIELDS[name]})
    run = Run(3, spec, [7, 8, 7, 1])
    sampler = new_sampler()
    sampler.admit(0, spec, run.prompt, 4)
    for _ in range(8):
        expected = reference.sample(run.logits().tolist(), spec, run.token_ids, 4)
        step(sampler, [run])
        assert run.output[-1] == expected


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - {"seed", "logprobs"}))
def test_every_field_takes_effect(name: str) -> None:
    """Some of sixty draws differ from those of a spec without the fields, so that none is accepted and ignored."""
    fields = FIELDS[name]
    plain = {"temperature": fields["temperature"]} if "temperature" in fields and len(fields) > 1 else {}
    outputs = [alone(Run(3, SamplingSpec(seed=1, **chosen), [7, 8, 7, 1]), 60) for chosen in (fields, plain)]
    assert outputs[0] != outputs[1]


def test_min_tokens_ban_the_end_until_then() -> None:
    spec = SamplingSpec(temperature=0.0, min_tokens=2, end_token_ids=(9,), logit_bias={9: 100.0})
    assert [token == 9 for token in alone(Run(0, spec, [1]), 4)] == [False, False, True, True]


SPECS = st.one_of(st.sampled_from(list(FIELDS.values())).map(lambda fields: SamplingSpec(**fields)))


@settings(derandomize=True, max_examples=40, deadline=None)
@given(specs=st.lists(SPECS, min_size=1, max_size=NUM_ROWS), data=st.data())
def test_tokens_do_not_depend_on_batch_row_order_or_preemption(specs: list[SamplingSpec], data: st.DataObject) -> None:
    runs = [Run(i, replace(spec, seed=100 + i % 3, index=i), [i, 7, 7]) for i, spec in enumerate(specs)]
    sampler = new_sampler()
    free = data.draw(st.permutations(range(NUM_ROWS)))
    held: list[Run] = []
    num_tokens = 5
    while any(len(run.output) < num_tokens for run in runs):
        for run in [run for run in runs if run not in held and len(run.output) < num_tokens]:
            if not held or data.draw(st.booleans()):
                run.row = free.pop()
                sampler.admit(run.row, run.spec, run.token_ids, len(run.prompt))
                held.append(run)
        step(sampler, data.draw(st.permutations(held)))
        for run in list(held):
            if len(run.output) == num_tokens or data.draw(st.integers(0, 3)) == 0:
                sampler.release(run.row)
                free.append(run.row)
                held.remove(run)
    for run in runs:
        assert run.output == alone(run, num_tokens)


def test_forks_share_the_history_and_draw_their_own() -> None:
    spec = SamplingSpec(seed=5, frequency_penalty=0.8, bad_words=((8, 9), (1, 2)), top_k=8, logit_bias={8: 5.0, 9: 6.0})
    sampler = new_sampler()
    runs = [Run(0, replace(spec, index=i), [1, 8], row=i) for i in range(4)]
    sampler.admit(0, runs[0].spec, runs[0].prompt, 2)
    for run in runs[1:]:
        sampler.fork(0, run.row, run.spec)
    for _ in range(6):
        step(sampler, runs)
    assert len({tuple(run.output) for run in runs}) == 4
    for run in runs:
        assert run.output == alone(run, 6)


def test_failed_rows_are_told_and_the_others_untouched() -> None:
    specs = [
        SamplingSpec(top_p=0.9),
        SamplingSpec(temperature=0.0),
        SamplingSpec(top_k=4, logprobs=2),
        SamplingSpec(allowed_token_ids=array("i", (3,)), bad_words=((3,),)),
        SamplingSpec(logprobs=1, repetition_penalty=1.2),
        SamplingSpec(),
        SamplingSpec(temperature=0.0, logprobs=0),
    ]
    runs = [Run(i, replace(spec, seed=i), [i], row=i) for i, spec in enumerate(specs)]
    sampler = new_sampler()
    for run in runs:
        sampler.admit(run.row, run.spec, run.prompt, 1)
    logits = torch.stack([run.logits() for run in runs])
    logits[1, 5] = math.nan
    logits[2] = math.nan
    logits[5, 9] = math.inf
    batch = sampler.sample(logits, range(7), [1] * 7)
    tokens, logprobs, failed = batch.to_lists()
    assert batch.finite.tolist() == [True, False, False, False, True, False, True]
    assert ((batch.token_ids >= 0) & (batch.token_ids < VOCAB)).all()
    assert set(failed) == {1, 2, 3, 5} and set(logprobs) == {4, 6}
    reasons = {i: reason for i, (reason, _) in failed.items()}
    assert reasons == {i: FinishReason.BANNED if i == 3 else FinishReason.ERROR for i in (1, 2, 3, 5)}
    assert "not finite" in failed[1][1] and "not finite" in failed[5][1] and "ban all" in failed[3][1]
    for i in range(7):
        assert tokens[i] == ([] if i in failed else alone(runs[i], 1))


def test_logprobs_are_of_the_unmodified_logits() -> None:
    specs = [
        SamplingSpec(temperature=0.3, logprobs=4, repetition_penalty=2.0, logit_bias={4: 50.0}),
        SamplingSpec(temperature=0.0),
        SamplingSpec(top_k=3, logprobs=0),
        SamplingSpec(allowed_token_ids=array("i", (8,)), logprobs=-1),
        SamplingSpec(logprobs=VOCAB + 7),
        SamplingSpec(logprobs=70),
    ]
    runs = [Run(i, spec, [i, 9], row=i) for i, spec in enumerate(specs)]
    sampler = new_sampler()
    for run in runs:
        sampler.admit(run.row, run.spec, run.prompt, 2)
    lines = [run.logits() for run in runs]
    tokens, logprobs, _ = sampler.sample(torch.stack(lines), range(6), [2] * 6).to_lists()
    assert set(logprobs) == {0, 2, 3, 4, 5}
    for i, [entry] in logprobs.items():
        asked = specs[i].logprobs
        assert asked is not None
        expected = reference.token_logprobs(lines[i].tolist(), tokens[i][0], asked)
        assert (entry.token_id, entry.rank) == (expected.token_id, expected.rank)
        assert entry.top_token_ids == expected.top_token_ids
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert entry.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-5)
    assert tokens[0] == [4] and logprobs[0][0].rank > 1
    assert [len(logprobs[i][0].top_token_ids) for i in (0, 2, 3, 4, 5)] == [4, 0, VOCAB, VOCAB, 70]


def test_logprobs_of_a_batch_that_is_edited_as_a_whole() -> None:
    sampler = new_sampler()
    sampler.admit(0, SamplingSpec(logprobs=1, logit_bias={4: 90.0}, repetition_penalty=1.5), [1, 4], 2)
    line = logits_at(0, 2)
    tokens, logprobs, _ = sampler.sample(line[None].clone(), [0], [2]).to_lists()
    assert tokens == [[4]]
    assert logprobs[0][0].logprob == pytest.approx(torch.log_softmax(line, 0)[4].item(), abs=1e-5)


@pytest.mark.parametrize("name", ["greedy", "temperature", "top_p", "top_k", "large top_k", "logprobs"])
def test_logits_without_edits_are_left_alone(name: str) -> None:
    sampler = new_sampler()
    sampler.admit(0, SamplingSpec(**FIELDS[name]), [1], 1)
    logits = logits_at(0, 0)[None].clone()
    sampler.sample(logits, [0], [1])
    assert torch.equal(logits[0], logits_at(0, 0))


def test_state_grows_only_with_what_is_used() -> None:
    sampler = new_sampler()
    at_start = sampler.state_bytes()
    assert at_start < 10_000
    sampler.admit(0, SamplingSpec(top_k=3, logit_bias={1: 2.0}, bad_words=((1,),)), [1], 1)
    assert sampler.state_bytes() == at_start
    sampler.admit(1, SamplingSpec(presence_penalty=0.1), [1], 1)
    assert at_start < sampler.state_bytes() < sampler.max_state_bytes()
    for row in range(2, NUM_ROWS):
        sampler.admit(row, SamplingSpec(presence_penalty=0.1), [1], 1)
    assert sampler.state_bytes() == sampler.max_state_bytes() == at_start + NUM_ROWS * VOCAB * 2


def test_a_batch_of_no_rows() -> None:
    assert new_sampler().sample(torch.empty(0, VOCAB), [], []).to_lists() == ([], {}, {})


def test_misuse_is_caught() -> None:
    sampler = new_sampler()
    sampler.admit(0, SamplingSpec(), [1, 2], 2)
    with pytest.raises(AssertionError, match="held already"):
        sampler.admit(0, SamplingSpec(), [1], 1)
    with pytest.raises(AssertionError, match="not held"):
        sampler.release(1)
    with pytest.raises(AssertionError, match="not held"):
        sampler.fork(1, 2, SamplingSpec())
    with pytest.raises(AssertionError, match="not held"):
        sampler.sample(torch.zeros(1, VOCAB), [1], [2])
    with pytest.raises(AssertionError, match="not sampled"):
        sampler.sample(torch.zeros(1, VOCAB), [0], [1])
    sampler.sample(torch.zeros(2, VOCAB), [0, 0], [2, 3])  # drafts: two positions of one row
    sampler.admit(3, SamplingSpec(presence_penalty=0.5), [1, 2], 2)
    with pytest.raises(AssertionError, match="one token at a time"):
        sampler.sample(torch.zeros(2, VOCAB), [3, 3], [2, 3])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_large_vocabulary_alone_and_batched(num_threads: int) -> None:
    """Big enough for chunks of rows, candidates and threads, whose sums must not change what is drawn."""
    vocab_size, num_rows = 20_001, 20
    specs = [
        SamplingSpec(seed=i, temperature=0.9, top_p=(1.0, 0.95, 0.5)[i % 3], top_k=(0, 0, 0, 60)[i % 4])
        for i in range(num_rows)
    ]
    logits = torch.stack([logits_at(i, 0, vocab_size) * (0.2 + i % 5) for i in range(num_rows)])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        sampler = new_sampler(num_rows, vocab_size)
        for row, spec in enumerate(specs):
            sampler.admit(row, spec, [1], 1)
        for position in range(1, 6):
            together = tokens_of(sampler.sample(logits.clone(), range(num_rows), [position] * num_rows))
            singly = [tokens_of(sampler.sample(logits[i : i + 1].clone(), [i], [position]))[0] for i in range(num_rows)]
            assert together == singly
    finally:
        torch.set_num_threads(before)


def test_a_kernel_draws_for_all_rows_at_once() -> None:
    calls: list[tuple[int, bool, bool]] = []

    def kernel(logits: Tensor, params: Tensor, keys: Tensor | None, *, filters: bool) -> Tensor:
        """The oracle's distribution, and the race in torch."""
        calls.append((len(logits), keys is not None, filters))
        tokens = torch.empty(len(logits), dtype=torch.int64)
        for i, (temperature, min_p, top_p, top_k) in enumerate(params.tolist()):
            spec = SamplingSpec(temperature=temperature, min_p=min_p, top_p=min(top_p, 1.0), top_k=int(top_k))
            kept = reference.distribution(logits[i].tolist(), spec)
            scores = torch.full((VOCAB,), -torch.inf)
            scores[list(kept)] = torch.tensor([math.log(p) for p in kept.values()])
            if keys is not None and temperature > 0:
                cpu = torch.device("cpu")
                scores -= exponentials(keys[i : i + 1], token_words(VOCAB, cpu)[None], Scratch(cpu))[0].log()
            tokens[i] = scores.argmax()
        codes = tokens.where(logits.isfinite().any(1), torch.tensor(-2))
        return torch.stack((tokens, codes))

    sampler = Sampler(num_rows=NUM_ROWS, vocab_size=VOCAB, device=torch.device("cpu"), max_model_len=99, kernel=kernel)
    names = ["greedy", "temperature", "all filters", "bias and repetition", "bad words", "frequency", "logprobs"]
    runs = [Run(i, SamplingSpec(**{"seed": i, **FIELDS[name]}), [i], row=i) for i, name in enumerate(names)]
    banned = SamplingSpec(allowed_token_ids=array("i", (4,)), bad_words=((4,),))
    for run in runs:
        sampler.admit(run.row, run.spec, run.prompt, 1)
    sampler.admit(9, banned, [1], 1)
    for _ in range(3):
        step(sampler, runs)
    step(sampler, [runs[1], runs[0]])
    step(sampler, [runs[0], runs[3]])
    assert calls == [(7, True, True)] * 3 + [(2, True, False), (2, False, False)]
    for run in runs:
        assert run.output == alone(run, len(run.output))
    batch = sampler.sample(torch.stack((runs[0].logits(), runs[1].logits())), [0, 9], [9, 9])
    tokens, _, failed = batch.to_lists()
    assert tokens[1] == [] and "ban all" in failed[1][1] and batch.finite.tolist() == [True, False]


@contextmanager
def refuse_synchronisation() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_draws_the_same_tokens_and_never_waits() -> None:
    specs = [SamplingSpec(**{"seed": i, **fields}) for i, fields in enumerate(FIELDS.values())]
    specs.append(SamplingSpec(logprobs=-1, seed=77))
    outputs = []
    for device in ("cpu", "cuda"):
        sampler = new_sampler(len(specs), device=device)
        runs = [Run(i, spec, [7, 8, 7, 1], row=i) for i, spec in enumerate(specs)]
        steps = [torch.stack([logits_at(run.number, 4 + n) for run in runs]).to(device) for n in range(6)]
        with refuse_synchronisation() if device == "cuda" else nullcontext():
            for run in runs:
                sampler.admit(run.row, run.spec, run.prompt, 4)
            batches = [sampler.sample(logits, range(len(runs)), [4 + n] * len(runs)) for n, logits in enumerate(steps)]
        outputs.append([batch.to_lists() for batch in batches])
    for on_cpu, on_gpu in zip(*outputs, strict=True):
        assert on_cpu[0] == on_gpu[0] and on_cpu[2] == on_gpu[2]
        for i, [entry] in on_gpu[1].items():
            [expected] = on_cpu[1][i]
            assert (entry.token_id, entry.rank) == (expected.token_id, expected.rank)
            assert entry.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-5)
