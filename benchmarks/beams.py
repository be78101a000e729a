"""Beam search beside others that search the same beams:

    python -m benchmarks.beams --against transformers   the same texts and scores as generate(num_beams=...)
    python -m benchmarks.beams --against loop           the same search as a loop of one-token generations over LLM

The loop is how beams are searched over an API that only generates: every step asks for one token of every beam, with
the logprobs of the best, and makes the next prompts out of them. Both run on the same engine, turn by turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from quire import LLM, BeamSearchParams, SamplingParams

SUBJECTS = (
    *("The capital of France", "A good way to learn a language", "The history of the printing press"),
    *("Once upon a time, a fox", "In mathematics, a prime number", "The best soup for a cold day"),
    *("def fibonacci(n):", "Dear Sir or Madam", "Water boils at a lower temperature when", "The three branches of"),
)
OPENINGS = ("", "Please explain: ", "Write about this. ", "Question: what comes after this? ", "Here is a fact. ")


def prompts(count: int) -> list[str]:
    found = [opening + subject for opening in OPENINGS for subject in SUBJECTS]
    return found[:count]


def search(llm: LLM, batch: list[str], width: int, max_tokens: int) -> list[list[tuple[list[int], float]]]:
    """The generated tokens, end token included, and the score of each beam."""
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, include_stop_str_in_output=True)
    tokenizer = llm.get_tokenizer()
    lengths = [len(tokenizer.encode(prompt)) for prompt in batch]
    return [
        [(sequence.tokens[length:], sequence.score) for sequence in output.sequences]
        for length, output in zip(lengths, llm.beam_search(batch, params), strict=True)
    ]


def with_transformers(model: Any, llm: LLM, prompt: str, width: int, max_tokens: int) -> list[tuple[list[int], float]]:
    import torch

    ids = torch.tensor([llm.get_tokenizer().encode(prompt)])
    ends = sorted(llm.llm_engine.built.inputs.eos_token_ids)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=ends[0],
            output_scores=True,
            return_dict_in_generate=True,
        )
    found = []
    for line, score in zip(out.sequences[:, ids.shape[1] :].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(line) if token in ends), len(line))
        found.append((line[:end], score))
    return found


def in_a_loop(llm: LLM, batch: list[str], width: int, max_tokens: int) -> list[list[int]]:
    """vLLM's own search over its public API, in outline: one generate() a token, all beams of all prompts together."""
    ends = llm.llm_engine.built.inputs.eos_token_ids
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2 * width, detokenize=False)
    tokenizer = llm.get_tokenizer()
    beams: list[list[tuple[list[int], float]]] = [[(tokenizer.encode(prompt), 0.0)] for prompt in batch]
    lengths = [len(own[0][0]) for own in beams]
    ended: list[list[tuple[list[int], float]]] = [[] for _ in batch]
    for _ in range(max_tokens):
        lines = [{"prompt_token_ids": tokens} for own in beams for tokens, _ in own]
        outputs = iter(llm.generate(lines, params, use_tqdm=False))
        for i, own in enumerate(beams):
            candidates = []
            for tokens, score in own:
                for token, entry in next(outputs).outputs[0].logprobs[0].items():  # type: ignore[index]
                    candidates.append(([*tokens, token], score + entry.logprob))
            candidates.sort(key=lambda one: -one[1])
            ended[i] += [one for one in candidates[:width] if one[0][-1] in ends]
            beams[i] = [one for one in candidates if one[0][-1] not in ends][:width]
    return [
        max(own + done, key=lambda one: one[1] / (len(one[0]) - length))[0][length:]
        for own, done, length in zip(beams, ended, lengths, strict=True)
    ]


def against_transformers(args: argparse.Namespace) -> dict[str, Any]:
    from quire.bench.hf import HFBaseline
    from quire.config import EngineConfig

    llm = LLM(args.model, dtype="float32", max_model_len=512)
    model = HFBaseline(EngineConfig(model=args.model, dtype="float32")).model
    batch = prompts(args.prompts)
    found: dict[str, Any] = {}
    for width in args.widths:
        ours = search(llm, batch, width, args.max_tokens)
        num_same = num_same_beams = 0
        furthest = 0.0
        for prompt, own in zip(batch, ours, strict=True):
            theirs = with_transformers(model, llm, prompt, width, args.max_tokens)
            num_same += own[0][0] == theirs[0][0]
            is_same = [line for line, _ in own] == [line for line, _ in theirs]
            num_same_beams += is_same
            if is_same:
                furthest = max(furthest, *(abs(a[1] - b[1]) for a, b in zip(own, theirs, strict=True)))
            else:
                print(f"{width} beams of {prompt!r}:\n  ours   {own}\n  theirs {theirs}", file=sys.stderr)
        found[f"width {width}"] = {
            "prompts": len(batch),
            "best beam the same": num_same,
            "all beams the same, in order": num_same_beams,
            "largest difference of a score": furthest,
        }
        print(width, found[f"width {width}"], file=sys.stderr, flush=True)
    return found


def against_loop(args: argparse.Namespace) -> dict[str, Any]:
    llm = LLM(args.model, max_model_len=1024)
    batch = prompts(args.prompts)
    found: dict[str, Any] = {}
    for width in args.widths:
        ratios, same = [], 0
        in_a_loop(llm, batch[:1], width, 2)
        for _ in range(args.repeats):
            started = time.perf_counter()
            best = [own[0][0] for own in search(llm, batch, width, args.max_tokens)]
            middle = time.perf_counter()
            lines = in_a_loop(llm, batch, width, args.max_tokens)
            ratios.append((time.perf_counter() - middle) / (middle - started))
            same = sum(a == b for a, b in zip(best, lines, strict=True))
        found[f"width {width}"] = {
            "loop's time / beam search's, median": round(statistics.median(ratios), 2),
            "each": [round(ratio, 2) for ratio in ratios],
            "the same best text": f"{same} of {len(batch)}",
        }
        print(width, found[f"width {width}"], file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", choices=["transformers", "loop"], required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps(against_transformers(args) if args.against == "transformers" else against_loop(args), indent=1))


if __name__ == "__main__":
    main()
