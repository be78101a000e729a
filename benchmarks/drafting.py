"""What looking up drafts costs the host, in CPU time: `python -m benchmarks.drafting`."""

from __future__ import annotations

import argparse
import inspect
import random
import statistics
import time

from quire.drafting import LookupDrafter
from quire.request import Request, Sequence, SequenceState
from quire.speculation import SpeculativeConfig
from quire.step_costs import StepCosts, StepKind

NUM_PROMPT_TOKENS, NUM_STEPS = 1000, 30


def words() -> list[int]:
    """A text as numbers: this library's longest module, word by word."""
    text = inspect.getsource(argparse).split(" ")
    numbers = {word: number for number, word in enumerate(dict.fromkeys(text))}
    return [numbers[word] for word in text]


def measure(method: str, num_seqs: int, *, copies: bool, pays: bool) -> tuple[float, float]:
    """Seconds of the first step, which enters the prompts, and of a later one."""
    costs = StepCosts(prefill_tokens_per_s=1e9 if pays else 1e2)
    costs.observe_step(StepKind(num_seqs, 0), device_s=1e-2, total_s=1e-2)
    drafter = LookupDrafter(SpeculativeConfig.read({"method": method}), costs)
    rng, text = random.Random(1), words()
    seqs, coming = [], []
    for i in range(num_seqs):
        start = rng.randrange(len(text) - 2 * NUM_PROMPT_TOKENS)
        prompt = text[start : start + NUM_PROMPT_TOKENS]
        request = Request(request_id=str(i), prompt_token_ids=prompt, max_tokens=999, end_token_ids=frozenset())
        seqs.append(Sequence(request, 0, list(prompt), state=SequenceState.RUNNING))
        coming.append(prompt if copies else text[start + NUM_PROMPT_TOKENS :])
    times_s = []
    for step in range(NUM_STEPS + 1):
        for seq, tokens in zip(seqs, coming, strict=True):
            seq.token_ids.append(tokens[step])
            seq.num_computed_tokens = len(seq.token_ids) - 1
        started = time.process_time()
        drafter.begin_step(seqs, 8192)
        for seq in seqs:
            drafter.propose(seq, 64)
        times_s.append(time.process_time() - started)
    return times_s[0], statistics.median(times_s[1:])


def main() -> None:
    for method in ("ngram", "suffix"):
        for num_seqs in (16, 256):
            for name, copies, pays in (
                ("text", False, True),
                ("copies", True, True),
                ("drafts cannot pay", False, False),
            ):
                first_s, step_s = measure(method, num_seqs, copies=copies, pays=pays)
                print(
                    f"{method:6} {num_seqs:3} sequences, {name:17}: first step {1e6 * first_s / num_seqs:6.1f} us "
                    f"a sequence, then {1e3 * step_s:6.3f} ms a step, {1e6 * step_s / num_seqs:5.1f} us a sequence"
                )


if __name__ == "__main__":
    main()
