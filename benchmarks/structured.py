"""What structured output costs beside free text of the same length: `python -m benchmarks.structured [MODEL]`.

The kinds run in turn on one thread, and the processor's time is taken, so that other programs on the machine count
little. Where masks are filled beside the forward pass, a free core makes them cheaper than this says.
"""

from __future__ import annotations

import statistics
import sys
import time

from quire import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 40, "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {
            "type": "array",
            "items": {"enum": ["red", "blue", "green"]},
            "minItems": 4,
            "maxItems": 5,
        },
        "occupation": {"type": "string", "minLength": 10, "maxLength": 30},
    },
    "required": ["name", "age", "colours", "occupation"],
    "additionalProperties": False,
}
PROMPT = "Write a JSON object about a person:\n"
NUM_TURNS = 9


def main(model: str) -> None:
    llm = LLM(model=model, max_model_len=512, max_num_seqs=8, enable_prefix_caching=False, num_threads=1)
    scheduler = llm.llm_engine.core.scheduler
    forced = scheduler.forced_tokens
    wanted = StructuredOutputsParams(json=SCHEMA)

    def run(max_tokens: int, *, is_free: bool = False, jumps: bool = True) -> tuple[float, int]:
        scheduler.forced_tokens = forced if jumps else None
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=max_tokens)
        params = params.clone(ignore_eos=True) if is_free else params.clone(structured_outputs=wanted)
        started = time.process_time()
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        return time.process_time() - started, len(output.outputs[0].token_ids)

    _, num_tokens = run(200)
    ratios: dict[str, list[float]] = {"constrained": [], "constrained, forced tokens without steps": []}
    first_ms: list[float] = []
    for _ in range(NUM_TURNS):
        free_s, _ = run(num_tokens, is_free=True)
        ratios["constrained"].append(run(200, jumps=False)[0] / free_s)
        ratios["constrained, forced tokens without steps"].append(run(200)[0] / free_s)
        first_ms.append(1e3 * (run(1)[0] - run(1, is_free=True)[0]))
    print(f"{num_tokens} tokens; processor time as a share of free text's, median of {NUM_TURNS} turns (quartiles):")
    for name, values in ratios.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"  {name}: {middle:.3f} ({low:.3f} to {high:.3f})")
    low, middle, high = statistics.quantiles(first_ms, n=4)
    print(f"  first token, compiled schema: {middle:+.2f} ms ({low:+.2f} to {high:+.2f})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
