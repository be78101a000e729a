"""What looking up drafts costs the host, in CPU time: `python -m benchmarks.drafting`.

`--python` times the same in plain Python, as it runs where the native library is not built.
"""

from __future__ import annotations

import argparse
import inspect
import random
import statistics
import time
from unittest import mock

from quire.drafting import LookupDrafter, lookup
from quire.request import Request, Sequence, SequenceState
from quire.speculation import SpeculativeConfig
from quire.step_costs import StepCosts, StepKind

NUM_PROMPT_TOKENS, NUM_STEPS = 1000, 60


def words() -> list[int]:
    """A text as numbers: this library's longest module, word by word."""
    text = inspect.getsource(argparse).split(" ")
    numbers = {word: number for number, word in enumerate(dict.fromkeys(text))}
    return [numbers[word] for word in text]


def measure(method: str, num_seqs: int, *, copies: bool, pays: bool) -> tuple[float, float, int]:
    """Seconds in which the prompts are entered, seconds of a later step, and how many drafts that one has."""
    costs = StepCosts(prefill_tokens_per_s=1e9 if pays else 1e2)
    costs.observe_step(StepKind(num_seqs, 0), device_s=1e-2, total_s=1e-2)
    # By a clock that stands still looking costs nothing, so that every step looks.
    drafter = LookupDrafter(SpeculativeConfig.read({"method": method}), costs, clock=lambda: 0.0)
    rng, text = random.Random(1), words()
    seqs, coming = [], []
    for i in range(num_seqs):
        start = rng.randrange(len(text) - 2 * NUM_PROMPT_TOKENS)
        prompt = text[start : start + NUM_PROMPT_TOKENS]
        request = Request(request_id=str(i), prompt_token_ids=prompt, max_tokens=999, end_token_ids=frozenset())
        seqs.append(Sequence(request, 0, list(prompt), state=SequenceState.RUNNING))
        coming.append(prompt if copies else text[start + NUM_PROMPT_TOKENS :])
    for seq in seqs[: num_seqs // 2]:  # answers that later ones find
        drafter.ended(seq)
    times_s, num_drafts = [], []
    for step in range(NUM_STEPS):
        for seq, tokens in zip(seqs, coming, strict=True):
            seq.token_ids.append(tokens[step])
            seq.num_computed_tokens = len(seq.token_ids) - 1
        started = time.process_time()
        drafts = drafter.draft(seqs, 8192)
        times_s.append(time.process_time() - started)
        num_drafts.append(sum(map(len, drafts.values())))
    num_entering = num_seqs * NUM_PROMPT_TOKENS // lookup._MAX_ENTERED + 1
    later_s = statistics.median(times_s[num_entering:])
    return sum(times_s[:num_entering]) - num_entering * later_s, later_s, num_drafts[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description="What looking up drafts costs the host.", allow_abbrev=False)
    parser.add_argument("--python", action="store_true", help="as where the native library is not built")
    args = parser.parse_args()
    for method in ("ngram", "suffix"):
        for num_seqs in (16, 256):
            for name, copies, pays in (
                ("text", False, True),
                ("copies", True, True),
                ("drafts cannot pay", False, False),
            ):
                with mock.patch.object(lookup, "is_built", lambda: False) if args.python else mock.MagicMock():
                    entered_s, step_s, num_drafts = measure(method, num_seqs, copies=copies, pays=pays)
                entered = f"a prompt is entered in {1e6 * entered_s / num_seqs:5.1f} us, " if pays else ""
                print(
                    f"{method:6} {num_seqs:3} sequences, {name:17}: {entered}a step takes {1e3 * step_s:6.3f} ms, "
                    f"{1e6 * step_s / num_seqs:5.2f} us a sequence, {num_drafts} drafts"
                )


if __name__ == "__main__":
    main()
