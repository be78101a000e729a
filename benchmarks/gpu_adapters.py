"""What a mixture of adapters costs: mixed256 of Llama-3.1-8B's shape on a GPU, without and with 16 of rank 16.

    python -m benchmarks.gpu_adapters
    python -m benchmarks.gpu_adapters --num-adapters 4 --repeats 3

Adapters are random, on all seven matrices of every layer, and requests take them in turn.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from quire import LLMEngine
from quire.bench.engines import forced_length
from quire.bench.model_shapes import LLAMA_8B, write_llama_8b
from quire.bench.units import table
from quire.bench.workloads import Workload, mixed256, single
from quire.config import EngineConfig
from quire.engine.batch import run_batch, runs_beside_host
from quire.errors import QuireError
from quire.lora.request import LoRARequest
from quire.request import Request

_VOCAB = 128_000
_RANK = 16


def write_adapter(path: Path, seed: int) -> Path:
    """As PEFT saves one, small enough that answers stay those of the model's own kind."""
    import torch
    from safetensors.torch import save_file

    hidden, inner = LLAMA_8B["hidden_size"], LLAMA_8B["intermediate_size"]
    kv = hidden * LLAMA_8B["num_key_value_heads"] // LLAMA_8B["num_attention_heads"]
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
              "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
              "mlp.down_proj": (hidden, inner)}  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * 0.01).bfloat16().cpu()

    tensors = {}
    for layer in range(LLAMA_8B["num_hidden_layers"]):
        for module, (outputs, inputs) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = numbers(_RANK, inputs)
            tensors[f"{name}.lora_B.weight"] = numbers(outputs, _RANK)
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK}
    config |= {"target_modules": [module.partition(".")[2] for module in shapes]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def tokens_per_s(engine: LLMEngine, workload: Workload, adapters: Sequence[LoRARequest | None]) -> float:
    engine.reset_prefix_cache()

    def add(i: int) -> Request:
        prompt, wanted = workload[i]
        return engine.add_request(str(i), prompt, forced_length(wanted), lora_request=adapters[i % len(adapters)])

    started = time.perf_counter()
    num_out = 0
    for outputs in run_batch(engine, add, len(workload), in_slices=runs_beside_host(engine.core)):
        num_out += sum(len(output.outputs[0].token_ids) for output in outputs)
    seconds = time.perf_counter() - started
    assert num_out == sum(wanted for _, wanted in workload), "an output has the wrong length"
    return num_out / seconds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_adapters", description=__doc__.split("\n")[0])
    parser.add_argument("--num-adapters", type=int, default=16, metavar="N", help="of rank 16 (default 16)")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="timed runs of each kind, in turn (2)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        adapters = [
            LoRARequest(f"a{i}", i + 1, str(write_adapter(Path(folder, f"a{i}"), i))) for i in range(args.num_adapters)
        ]
        try:
            engine = LLMEngine.from_config(
                EngineConfig(model=str(write_llama_8b()), device="cuda", load_format="dummy", dtype="bfloat16",
                             max_model_len=4096, enable_lora=True, max_loras=args.num_adapters, max_lora_rank=_RANK)
            )  # fmt: skip
        except QuireError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        kinds: dict[str, list[LoRARequest | None]] = {"none": [None], "one": [adapters[0]], "all in turn": [*adapters]}
        rows = []
        for name, make, which in (("single", single, ("none", "one")), ("mixed256", mixed256, ("none", "all in turn"))):
            for kind in which:
                tokens_per_s(engine, make(_VOCAB, seed=100_000), kinds[kind])  # reads adapters, captures graphs
            rates: dict[str, list[float]] = {kind: [] for kind in which}
            for _ in range(args.repeats):
                for kind in which:
                    rates[kind].append(tokens_per_s(engine, make(_VOCAB), kinds[kind]))
            for kind in which:
                shown = ", ".join(f"{rate:.1f}" for rate in rates[kind])
                of_none = sum(rates[kind]) / sum(rates["none"])
                rows.append([name, kind, shown, f"{of_none:.3f}"])
        print(table(["", "adapters", "tokens/s", "of none"], rows))
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
