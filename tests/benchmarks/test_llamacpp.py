"""The slots that llama.cpp is given its work in, with a model that counts."""

from __future__ import annotations

import pytest

from benchmarks.llamacpp import BATCH_TOKENS, NUM_SLOTS, Entry, run_in_slots


class Counting:
    """Each token is the sum of all before it in its slot, modulo 1000; a batch may hold them in any order."""

    def __init__(self) -> None:
        self.slots: dict[int, list[int]] = {}

    def decode(self, batch: list[Entry]) -> list[int]:
        assert 0 < len(batch) <= BATCH_TOKENS
        found = []
        for entry in batch:
            tokens = self.slots.setdefault(entry.slot, [])
            assert entry.position == len(tokens) and entry.slot < NUM_SLOTS
            tokens.append(entry.token)
            if entry.wants_logits:
                found.append(sum(tokens) % 1000)
        return found

    def forget(self, slot: int) -> None:
        del self.slots[slot]


@pytest.mark.parametrize("lengths", [[(8, 5)], [(8, 5)] * 16, [(1 + 37 * i % 300, 1 + 7 * i % 40) for i in range(50)]])
def test_every_request_gets_its_own_tokens(lengths: list[tuple[int, int]]) -> None:
    workload = [([i + 3 * j for j in range(num_in)], num_out) for i, (num_in, num_out) in enumerate(lengths)]
    model = Counting()
    outputs = run_in_slots(workload, model.decode, model.forget)
    assert model.slots == {}
    for (prompt, num_out), output in zip(workload, outputs, strict=True):
        tokens = list(prompt)
        for _ in range(num_out):
            tokens.append(sum(tokens) % 1000)
        assert output == tokens[len(prompt) :]
