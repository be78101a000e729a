"""Random load on the ranks of a split model: does every request end with all of its tokens, and is all given back?

    QUIRE_RANKS_PER_GPU=2 python -m benchmarks.rank_load MODEL -tp 2 --device cuda --minutes 10

Requests of random lengths, greedy and seeded, alone and several of one prompt, come at random moments, and some are
aborted. The same few prompts come again and again, so that prefixes are shared, and the answer of one that was asked
for before with the same parameters is compared with the first. In 16 bits, and on a GPU, answers may differ where two
tokens are nearly as likely; the line at the end says how many did. Two ranks on one GPU take turns at it: this proves
that they do not wait for each other forever, and says nothing about speed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from quire import LLMEngine, SamplingParams
from quire.config import EngineConfig

_NUM_KINDS = 200
_MAX_PROMPT, _MAX_OUT, _AT_ONCE = 300, 120, 48
_STUCK_S = 60.0


def kind_of(number: int, vocab_size: int) -> tuple[list[int], SamplingParams]:
    """A prompt and its parameters, always the same for a number."""
    rng = random.Random(number)
    shared = random.Random(number % 7)
    prompt = [shared.randrange(3, vocab_size) for _ in range(shared.randrange(0, 120))]
    prompt += [rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, _MAX_PROMPT))]
    params = SamplingParams(max_tokens=rng.randrange(1, _MAX_OUT), ignore_eos=True, temperature=0.0)
    if number % 3 == 1:
        params = params.clone(temperature=0.9, top_p=0.9, seed=number)
    if number % 5 == 2:
        params = params.clone(n=3, temperature=0.8, seed=number)
    if number % 4 == 3:
        params = params.clone(logprobs=2)
    return prompt, params


def run(engine: LLMEngine, minutes: float, seed: int, vocab_size: int) -> Counter[str]:
    """Counts of what happened. Raises where a request lacks tokens, a block is lost, or nothing moves on."""
    rng, tally = random.Random(seed), Counter[str]()
    first: dict[int, list[list[int]]] = {}
    under_way: dict[str, int] = {}
    until_s = time.monotonic() + 60 * minutes
    moved_s = time.monotonic()
    while time.monotonic() < until_s or engine.has_unfinished_requests():
        while time.monotonic() < until_s and len(under_way) < rng.randrange(1, _AT_ONCE):
            number, name = rng.randrange(_NUM_KINDS), str(tally["added"])
            engine.add_request(name, *kind_of(number, vocab_size))
            under_way[name] = number
            tally["added"] += 1
        if under_way and rng.random() < 0.01:
            name = rng.choice(list(under_way))
            engine.abort_request(name)
            del under_way[name]
            tally["aborted"] += 1
        outputs = engine.step()
        tally["steps"] += 1
        if outputs:
            moved_s = time.monotonic()
        assert time.monotonic() - moved_s < _STUCK_S, f"nothing has moved on for {_STUCK_S:g} s"
        for output in outputs:
            if not output.finished or output.request_id not in under_way:
                continue
            number = under_way.pop(output.request_id)
            answers = [list(one.token_ids) for one in output.outputs]
            _, params = kind_of(number, vocab_size)
            assert [len(answer) for answer in answers] == [params.max_tokens] * params.n, f"kind {number}: too short"
            tally["finished"] += 1
            tally["tokens"] += sum(map(len, answers))
            tally["asked for before"] += number in first
            tally["answered otherwise"] += first.setdefault(number, answers) != answers
        if tally["steps"] % 500 == 0:
            engine.core.kv.check()
    engine.core.kv.check()
    assert engine.core.kv.num_used_blocks == 0, f"{engine.core.kv.num_used_blocks} blocks were not given back"
    return tally


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_load", description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("-tp", "--tensor-parallel-size", type=int, default=2)
    parser.add_argument("-pp", "--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=400, help="few, so that sequences are preempted (default 400)")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    config = EngineConfig(
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        load_format=args.load_format,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        num_gpu_blocks_override=args.blocks,
        max_model_len=1024,
        max_num_seqs=_AT_ONCE,
        swap_space_gb=0.1,
    )
    engine = LLMEngine.from_config(config)
    try:
        tally = run(engine, args.minutes, args.seed, engine.spec.vocab_size)
        tally["preempted"] = engine.core.scheduler.stats.num_preemptions
    finally:
        engine.close()
    print(", ".join(f"{count} {what}" for what, count in tally.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
