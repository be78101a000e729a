"""Quire beside llama.cpp on one GGUF file: `python -m benchmarks.llamacpp` (needs `pip install llama-cpp-python`).

Both run the same token ids greedily on the same number of threads, each in a process of its own, and take turns: a
machine that is slower for a while is so for both. llama.cpp has 16 slots over its batch API, decodes first and then as
much prompt as fits. Where a file's weights are quantized, both round activations to 8 bits.

llama.cpp's threads spin while they wait, so a run on several threads needs a quiet machine. On a busy one, `--threads 1
--cpu-time` counts the processor's seconds instead of the wall's; decode1, decode16 and prompt256 are short workloads
for that.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from quire.bench.workloads import Workload, make_workload

NUM_SLOTS = 16
SLOT_TOKENS = 512  # the longest prompt with its output
BATCH_TOKENS = 512
WARM_SEED = 100_000  # other prompts of the same lengths
# Short workloads beside those of quire bench: prompts, their tokens, and tokens out.
BRIEF = {"decode1": (1, 1, 17), "decode16": (16, 1, 9), "prompt256": (1, 256, 1)}


class Entry(NamedTuple):
    """One token of a batch."""

    token: int
    position: int
    slot: int
    wants_logits: bool


class Slot:
    """A request while it runs."""

    def __init__(self, index: int, prompt: list[int], num_out: int) -> None:
        self.index, self.prompt, self.num_out = index, prompt, num_out
        self.num_done = 0  # of the prompt
        self.out: list[int] = []


def run_in_slots(
    workload: Workload, decode: Callable[[list[Entry]], list[int]], forget: Callable[[int], None]
) -> list[list[int]]:
    """Every request's tokens. `decode` gives one for each entry that wants logits; `forget` empties a slot."""
    waiting = [Slot(i, prompt, num_out) for i, (prompt, num_out) in enumerate(workload)][::-1]
    slots: list[Slot | None] = [None] * NUM_SLOTS
    outputs: list[list[int]] = [[] for _ in workload]
    while waiting or any(slots):
        slots = [slot or (waiting.pop() if waiting else None) for slot in slots]
        running = [(number, slot) for number, slot in enumerate(slots) if slot is not None]
        batch, sampling = [], []
        for number, slot in running:
            if slot.out:
                batch.append(Entry(slot.out[-1], len(slot.prompt) + len(slot.out) - 1, number, True))
                sampling.append((number, slot))
        for number, slot in running:
            if slot.out:
                continue
            first, slot.num_done = slot.num_done, min(len(slot.prompt), slot.num_done + BATCH_TOKENS - len(batch))
            last = len(slot.prompt) - 1
            batch += [Entry(slot.prompt[at], at, number, at == last) for at in range(first, slot.num_done)]
            if slot.num_done > max(first, last):
                sampling.append((number, slot))
        for (number, slot), token in zip(sampling, decode(batch), strict=True):
            slot.out.append(token)
            if len(slot.out) == slot.num_out:
                outputs[slot.index] = slot.out
                forget(number)
                slots[number] = None
    return outputs


class LlamaCpp:
    def __init__(self, path: str, num_threads: int) -> None:
        import numpy

        llama_cpp: Any = importlib.import_module("llama_cpp")
        self.lib = llama_cpp
        self.numpy = numpy
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = NUM_SLOTS * SLOT_TOKENS, NUM_SLOTS
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = num_threads
        self.context = llama_cpp.llama_init_from_model(model, params)
        self.batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def run(self, workload: Workload) -> list[list[int]]:
        memory = self.lib.llama_get_memory(self.context)
        self.lib.llama_memory_clear(memory, True)
        return run_in_slots(
            workload, self._decode, lambda slot: self.lib.llama_memory_seq_rm(memory, slot, -1, -1) and None
        )

    def _decode(self, entries: list[Entry]) -> list[int]:
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, entry in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = entry.token, entry.position, entry.wants_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, entry.slot
        status = self.lib.llama_decode(self.context, batch)
        assert status == 0, f"llama_decode returned {status}"
        return [self._best(i) for i, entry in enumerate(entries) if entry.wants_logits]

    def _best(self, row: int) -> int:
        logits = self.lib.llama_get_logits_ith(self.context, row)
        return int(self.numpy.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())


class Quire:
    def __init__(self, path: str, num_threads: int) -> None:
        from quire import LLM

        self.llm = LLM(path, device="cpu", num_threads=num_threads)
        self.vocab_size = self.llm.llm_engine.built.spec.vocab_size

    def run(self, workload: Workload) -> list[list[int]]:
        from quire import SamplingParams

        self.llm.reset_prefix_cache()
        prompts: Any = [{"prompt_token_ids": prompt} for prompt, _ in workload]
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n, detokenize=False) for _, n in workload]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


ENGINES: dict[str, type[Quire] | type[LlamaCpp]] = {"Quire": Quire, "llama.cpp": LlamaCpp}


def get_workload(name: str, vocab_size: int, parameters: dict[str, int]) -> Workload:
    if name not in BRIEF:
        return make_workload(name, vocab_size, **parameters)
    num, num_in, num_out = BRIEF[name]
    return make_workload("fixed", vocab_size, num=num, num_in=num_in, num_out=num_out, **parameters)


def count_tokens(workload: Workload) -> int:
    """Tokens out; of prompts that bring a token each, their own."""
    if all(num_out == 1 for _, num_out in workload):
        return sum(len(prompt) for prompt, _ in workload)
    return sum(num_out for _, num_out in workload)


def serve(name: str, path: str, num_threads: int, connection: Connection) -> None:
    """One engine in its process: workloads' names and seeds in, seconds and tokens out."""
    engine = ENGINES[name](path, num_threads)
    connection.send("ready")
    while order := connection.recv():
        workload_name, parameters, by_cpu_time = order
        clock = time.process_time if by_cpu_time else time.perf_counter
        workload = get_workload(workload_name, engine.vocab_size, parameters)
        started = clock()
        outputs = engine.run(workload)
        seconds = clock() - started
        assert [len(out) for out in outputs] == [num_out for _, num_out in workload], "an output has the wrong length"
        connection.send((count_tokens(workload) / seconds, outputs))


def hear(name: str, connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError:
        raise SystemExit(
            f"{name} died. One that was built on a machine with AMX does so where a virtual machine may not use it: "
            'build it with CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON"'
        ) from None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("workloads", nargs="*", default=["single64", "lab16", "mixed64"], help="see quire bench")
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or what quire finds one under")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the processor: with --threads 1")
    args = parser.parse_args()
    if importlib.util.find_spec("llama_cpp") is None:
        raise SystemExit("llama.cpp is missing here: pip install llama-cpp-python")
    from quire.weights import resolve_model

    path = resolve_model(args.model)
    if path.suffix != ".gguf":
        raise SystemExit(f"{path} is no GGUF file, which both engines could read: give one with --model")
    print(
        f"{path.name}, {args.threads} threads; tokens/s of {args.repeats} turns each"
        f"{', by CPU time' if args.cpu_time else ''}"
    )
    context = multiprocessing.get_context("spawn")
    engines: dict[str, Connection] = {}
    for name in ENGINES:
        engines[name], theirs = context.Pipe()
        context.Process(target=serve, args=(name, str(path), args.threads, theirs), daemon=True).start()
        theirs.close()  # so that an engine that dies is noticed
        hear(name, engines[name])
    for workload in args.workloads:
        compare(engines, workload, args.repeats, args.cpu_time)
    for connection in engines.values():
        connection.send(None)


def compare(engines: dict[str, Connection], workload: str, repeats: int, by_cpu_time: bool) -> None:
    rates: dict[str, list[float]] = {name: [] for name in engines}
    outputs: dict[str, list[list[int]]] = {}
    for parameters in [{"seed": WARM_SEED}, *[{}] * repeats]:
        for name, connection in engines.items():
            connection.send((workload, parameters, by_cpu_time))
            rate, outputs[name] = hear(name, connection)
            if not parameters:
                rates[name].append(rate)
    for name, found in rates.items():
        print(f"  {workload:10} {name:10}", *(f"{rate:8.1f}" for rate in found), flush=True)
    mine, theirs = (statistics.median(found) for found in rates.values())
    print(f"  {workload:10} ratio of the medians {mine / theirs:.2f}", flush=True)
    first, second = outputs.values()
    same = sum(a == b for a, b in zip(first, second, strict=True))
    print(f"  {workload:10} the same tokens in {same} of {len(first)} outputs", flush=True)


if __name__ == "__main__":
    main()
