"""Check and time the sampling kernels on a GPU, and the sampler around them.

    python -m benchmarks.gpu_sampling [--sweep]

Every row's draw is first compared with the one that a sort in float64 gives: the drawn token must be kept, and within
a hair of the race's winner. Times are medians over replays of a CUDA graph; `host` is what one Sampler.sample costs the
host, `step` the time of one with the device's part. One table to stdout; JSON to $OUT/gpu_sampling.json if OUT is set.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_measure import COLD_BYTES, time_us
from quire.kernels.triton import unavailable_reason
from quire.params import SamplingSpec
from quire.sampling import Sampler
from quire.sampling.noise import mix, sequence_words, step_keys

VOCAB_SIZE = 128256
ROWS = (1, 16, 256, 1024)
POSITION = 100


@dataclass(slots=True)
class Case:
    name: str
    fields: dict[str, Any]
    make_logits: Callable[[int], Tensor]


def peaked(rows: int) -> Tensor:
    """Like a language model's: a wide low bulk, and a few dozen tokens far above it."""
    logits = torch.randn(rows, VOCAB_SIZE, device="cuda") * 2.5
    places = torch.randint(0, VOCAB_SIZE, (rows, 40), device="cuda")
    return logits.scatter_add_(1, places, 10 + 6 * torch.rand(rows, 40, device="cuda"))


def normal(rows: int) -> Tensor:
    """Logits such as random weights give: the nucleus has tens of thousands of tokens."""
    return torch.randn(rows, VOCAB_SIZE, device="cuda") * 1.3


def equal(rows: int) -> Tensor:
    return torch.zeros(rows, VOCAB_SIZE, device="cuda")


CASES = (
    Case("greedy", {"temperature": 0.0}, peaked),
    Case("temperature", {"temperature": 0.8}, peaked),
    Case("min_p .05", {"temperature": 0.8, "min_p": 0.05}, peaked),
    Case("top_p .95", {"temperature": 0.8, "top_p": 0.95}, peaked),
    Case("top_k 50", {"temperature": 0.8, "top_k": 50}, peaked),
    Case("top_k 50, top_p .95", {"temperature": 0.8, "top_k": 50, "top_p": 0.95}, peaked),
    Case("flat: top_p .95", {"temperature": 0.8, "top_p": 0.95}, normal),
    Case("flat: top_p .5", {"temperature": 0.8, "top_p": 0.5}, normal),
    Case("flat: top_k 50", {"temperature": 0.8, "top_k": 50}, normal),
    Case("flat: top_k 5000, top_p .9", {"temperature": 0.8, "top_k": 5000, "top_p": 0.9}, normal),
    Case("equal: top_p .95", {"temperature": 0.8, "top_p": 0.95}, equal),
    Case("equal: top_k 50", {"temperature": 0.8, "top_k": 50}, equal),
)


def specs_of(case: Case, rows: int) -> list[SamplingSpec]:
    return [SamplingSpec(seed=7919 * row + 1, index=row % 4, **case.fields) for row in range(rows)]


def keys_of(specs: list[SamplingSpec]) -> Tensor:
    words = np.stack([sequence_words(spec.seed, spec.index) for spec in specs])
    return torch.from_numpy(step_keys(words, np.full(len(specs), POSITION))).cuda()


def params_of(specs: list[SamplingSpec]) -> Tensor:
    rows = [(s.temperature, s.min_p, s.top_p if s.top_p < 1 else 2.0, s.top_k or VOCAB_SIZE) for s in specs]
    return torch.tensor(rows, dtype=torch.float64, device="cuda")


def count_wrong(drawn: Tensor, logits: Tensor, spec: SamplingSpec, keys: Tensor, words: Tensor) -> int:
    """Rows whose token a sort does not confirm. Rounding may move the boundary by a little, and turn near ties."""
    if spec.temperature == 0:
        return int((drawn != logits.argmax(1)).sum())
    values, token_ids = logits.double().sort(dim=1, descending=True, stable=True)
    z = (values - values[:, :1]) / spec.temperature
    weights = z.exp()
    weights *= weights >= spec.min_p * (1 - 1e-5)
    if spec.top_k:
        weights[:, spec.top_k :] = 0
    before = weights.cumsum(1) - weights
    target = weights.sum(1, keepdim=True) * spec.top_p
    surely, maybe = (before < target * (1 + sign * 1e-5) for sign in (-1, 1))
    surely &= weights > 0
    maybe &= weights > 0
    x = (words[token_ids] ^ keys[:, :1]) * -2048144789 + keys[:, 1:]  # 0x85EBCA6B as a signed word; see noise.py
    x = (x ^ (x >> 15)) * -1028477387
    bits = (x ^ (x >> 16)) & 0x7FFFFFFF
    noise = -torch.log1p(-(bits.double() * ((1 - 2.0**-24) * 2.0**-31) + 2.0**-32))
    scores = z - noise.log()
    best = scores.where(surely, -torch.inf).amax(1)
    is_drawn = token_ids == drawn[:, None]
    score = scores.where(is_drawn & maybe, -torch.inf).amax(1)
    return int((score < best - 1e-4).sum())


def check(case: Case, sample_rows: Callable[..., Tensor], words: Tensor) -> int:
    wrong = 0
    for rows in (1, 61):
        specs = specs_of(case, rows)
        keys, logits = keys_of(specs), case.make_logits(rows)
        filters = len(case.fields) > 1
        used = keys if specs[0].temperature > 0 else None
        tokens, codes = sample_rows(logits, params_of(specs), used, filters=filters)
        again = sample_rows(logits, params_of(specs), used, filters=filters)
        wrong += int((tokens != codes).sum()) + int((again[0] != tokens).sum())
        wrong += count_wrong(tokens, logits, specs[0], keys, words)
    return wrong


def time_sampler(case: Case, rows: int, logits: Tensor) -> tuple[float, float]:
    """Microseconds of the host, and of host and device together, for one Sampler.sample."""
    sampler = Sampler(num_rows=rows, vocab_size=VOCAB_SIZE, device=torch.device("cuda"), max_model_len=4096)
    for row, spec in enumerate(specs_of(case, rows)):
        sampler.admit(row, spec, [1, 2, 3], 3)
    held = list(range(rows))
    host, whole = [], []
    for step in range(25):
        positions = [POSITION + step] * rows
        torch.cuda.synchronize()
        begin = time.perf_counter()
        batch = sampler.sample(logits, held, positions)
        host.append(time.perf_counter() - begin)
        batch.to_lists()
        whole.append(time.perf_counter() - begin)
    return sorted(host)[12] * 1e6, sorted(whole)[12] * 1e6


def run_sweep(sample_rows: Callable[..., Tensor]) -> list[dict[str, Any]]:
    """256 rows with other chunks and warps; each pair is compiled first, which takes most of the time."""
    results = []
    for case in CASES:
        if case.name not in ("temperature", "top_p .95", "flat: top_p .95"):
            continue
        specs = specs_of(case, 256)
        params, keys, filters = params_of(specs), keys_of(specs), len(case.fields) > 1
        logits = [case.make_logits(256) for _ in range(2)]
        for chunk, num_warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8)):
            call = partial(sample_rows, params=params, keys=keys, filters=filters, chunk=chunk, num_warps=num_warps)
            us = time_us([partial(call, x) for x in logits], budget_ms=30)
            results.append({"case": case.name, "rows": 256, "chunk": chunk, "warps": num_warps, "us": round(us, 2)})
            print(f"256 rows, {case.name}, chunk {chunk}, {num_warps} warps: {us:.1f} us", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and time the sampling kernels.", allow_abbrev=False)
    parser.add_argument("--sweep", action="store_true", help="also time other chunk sizes and numbers of warps")
    sweep = parser.parse_args().sweep
    reason = unavailable_reason()
    if reason is not None:
        raise SystemExit(reason)
    from quire.kernels.triton.sampling_filter import sample_rows

    torch.manual_seed(0)
    words = torch.from_numpy(mix(np.arange(VOCAB_SIZE, dtype=np.uint32)).view(np.int32)).cuda()
    failures = {case.name: wrong for case in CASES if (wrong := check(case, sample_rows, words))}
    print("draws checked against a sort in float64:", failures or "all right", flush=True)

    results: list[dict[str, Any]] = []
    print(f"{'us':28}" + "".join(f"{rows:>8} rows" for rows in ROWS) + "   256 rows: host, step")
    for case in CASES:
        line = f"{case.name:28}"
        extra = ""
        for rows in ROWS:
            num_sets = max(1, min(8, COLD_BYTES // (rows * VOCAB_SIZE * 4)))
            specs = specs_of(case, rows)
            keys = keys_of(specs) if specs[0].temperature > 0 else None
            params, filters = params_of(specs), len(case.fields) > 1
            sets = [case.make_logits(rows) for _ in range(num_sets)]
            us = time_us([partial(sample_rows, x, params, keys, filters=filters) for x in sets], budget_ms=30)
            results.append({"case": case.name, "rows": rows, "us": round(us, 2)})
            line += f"{us:13.1f}"
            if rows == 256:
                host, whole = time_sampler(case, rows, sets[0])
                results[-1] |= {"host_us": round(host, 1), "step_us": round(whole, 1)}
                extra = f"   {host:8.0f} {whole:8.0f}"
            del sets
        print(line + extra, flush=True)
    if sweep:
        results += run_sweep(sample_rows)
    if os.environ.get("OUT"):
        data = {"device": torch.cuda.get_device_name(), "wrong": failures, "rows": results}
        (Path(os.environ["OUT"]) / "gpu_sampling.json").write_text(json.dumps(data, indent=1))
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
