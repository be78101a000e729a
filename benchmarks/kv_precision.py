"""What an 8-bit KV cache costs in precision, with real weights, and what offsets of keys are worth:
`python -m benchmarks.kv_precision [MODEL ...]`.

Texts are read in float32 on a CPU, by the plain torch operations, with caches of each kind. Perplexity needs a long
text to tell formats apart: the divergence is what it would rise by on text that the model itself wrote, and is far less
noisy.
"""

from __future__ import annotations

import argparse
import difflib
import heapq
import inspect
import json.decoder
import math
import textwrap
from collections.abc import Iterator

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.executor.device import Backend
from quire.executor.kv_scales import KVScales, fit_cache
from quire.executor.profile import prompts_step
from quire.grammar.compiler import open_tokenizer
from quire.kernels.reference import ReferenceOps
from quire.lab.context import PASSAGE
from quire.models.architectures import spec_from_config
from quire.models.decoder import Decoder
from quire.weights import DEFAULT_MODEL, open_checkpoint, resolve_model

BLOCK_SIZE = 16
FP8 = torch.float8_e4m3fn
# Of each: the cache's dtype, and whether keys lose an offset.
KINDS = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "fp8, scales alone": (FP8, False),
    "fp8": (FP8, True),
}


def texts() -> list[str]:
    """Prose of this project's own, and modules of Python's library."""
    return [PASSAGE, *(inspect.getsource(module) for module in (textwrap, heapq, difflib, json.decoder))]


class Reader:
    def __init__(self, model: str, window: int) -> None:
        checkpoint = open_checkpoint(path := resolve_model(model))
        self.spec = spec_from_config(checkpoint.config, source=str(path))
        ops = ReferenceOps("cpu", torch.float32)
        self.decoder = Decoder(self.spec, ops, device="cpu", dtype=torch.float32, max_position=max(1024, window))
        checkpoint.load_into(self.decoder.weight_slots(), self.decoder.is_ignored_weight, seed=0)
        self.decoder.finish_loading()
        tokenizer = open_tokenizer(EngineConfig(model=model), checkpoint, self.spec)
        assert tokenizer is not None
        self.windows = [tokenizer.encode(text)[:window] for text in texts()]
        self.device = torch.device("cpu")
        backend = Backend(self.device, ops, torch.float32, FP8, "float32", "plain torch kernels")
        self.fitted: dict[str, tuple[KVScales, Tensor | None]] = {}
        for kind, (dtype, has_offsets) in KINDS.items():
            self.fitted[kind] = ([(1.0, 1.0)] * self.spec.num_layers, None)
            if dtype == FP8:
                fit_cache(self.decoder, backend, block_size=BLOCK_SIZE, with_offsets=has_offsets)
                self.fitted[kind] = (self.decoder.kv_scales, self.decoder.kv_offsets)

    def logprobs(self, token_ids: Tensor, kind: str) -> Tensor:
        """[tokens - 1, vocab], of every token after the first."""
        scales, offsets = self.fitted[kind]
        self.decoder.set_kv_scales(scales)
        self.decoder.set_kv_offsets(offsets)
        inputs, num_blocks = prompts_step(self.decoder, self.device, BLOCK_SIZE, len(token_ids), len(token_ids))
        shape = (self.spec.num_layers, num_blocks, 2, self.spec.num_kv_heads, BLOCK_SIZE, self.spec.head_dim)
        hidden = self.decoder.forward(token_ids, inputs.attention, list(torch.zeros(shape).to(KINDS[kind][0])))
        return self.decoder.logits(hidden[:-1], None).log_softmax(-1)

    def compare(self) -> Iterator[tuple[int, dict[str, tuple[float, float, float, float]]]]:
        """After each text, how many tokens there were so far, and of each kind: perplexity, its change and that one's
        standard error, and the divergence, all but the first in percent."""
        found: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        divergences: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        for window in self.windows:
            token_ids = torch.tensor(window)
            reference = self.logprobs(token_ids, "float32")
            for kind in KINDS:
                logprobs = reference if kind == "float32" else self.logprobs(token_ids, kind)
                found[kind].append(logprobs.gather(1, token_ids[1:, None])[:, 0])
                divergences[kind].append((reference.exp() * (reference - logprobs)).sum(-1))
            expected, rows = torch.cat(found["float32"]), {}
            for kind in KINDS:
                moves = torch.cat(found[kind]) - expected
                rows[kind] = (
                    math.exp(-float(torch.cat(found[kind]).mean())),
                    100 * math.expm1(-float(moves.mean())),
                    100 * float(moves.std()) / math.sqrt(len(moves)),
                    100 * float(torch.cat(divergences[kind]).mean()),
                )
            yield len(expected), rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[DEFAULT_MODEL], help="names or GGUF files")
    parser.add_argument("--window", type=int, default=1024, help="tokens that are read of each text")
    options = parser.parse_args()
    with torch.inference_mode():
        for model in options.models:
            for num_tokens, rows in Reader(model, options.window).compare():
                print(
                    f"\n{model}, {num_tokens:,} tokens\n| cache | perplexity | change | divergence |\n|---|---|---|---|"
                )
                for kind, (perplexity, change, error, divergence) in rows.items():
                    print(
                        f"| {kind} | {perplexity:.4f} | {change:+.2f} ± {error:.2f} % | {divergence:.3f} % |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
