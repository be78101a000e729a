"""Check and time every Triton kernel on one GPU, beside FlashAttention-3, cuBLAS and the memory's own speed.

    python -m benchmarks.gpu_kernels [--only check,decode,prefix,...] [--no-precompile]

Each configuration is first compared with plain torch in a wider type on fresh random inputs, its output poisoned; a
wrong or failing one is reported and left out. Times are medians over replays of a CUDA graph that walks through enough
input sets to leave the L2 cache cold. Numbers go to $OUT/gpu_kernels.json, or ./bench-results/.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks import gpu_attention, gpu_folded, gpu_products, gpu_step
from benchmarks.gpu_measure import Report
from quire.kernels.triton import unavailable_reason

SECTIONS: dict[str, tuple[Callable[[Report], None], str]] = {
    "check": (gpu_attention.run_check, "attention over block sizes, widths, groups, windows, caps and dtypes"),
    "decode": (gpu_attention.run_decode, "attention of one token a sequence"),
    "prefix": (gpu_attention.run_prefix, "the same where sequences share a prefix"),
    "prefill": (gpu_attention.run_prefill, "attention of prompts"),
    "skinny": (gpu_products.run_skinny, "products of few rows"),
    "pairs": (gpu_products.run_pairs, "products of few rows together with what follows them"),
    "fused": (gpu_products.run_fused, "the kernels between products"),
    "folded": (gpu_folded.run_folded, "norms folded into their neighbours, and the kernels that work out the factors"),
    "rows": (gpu_products.run_rows, "a layer's products at many numbers of rows: which are better padded"),
    "step": (gpu_step.run_step, "a whole decode step"),
}


def _run_task(task: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # reported when it is timed
        task()
        torch.cuda.synchronize()


def precompile(sections: Sequence[str]) -> None:
    tasks = gpu_attention.compile_tasks(sections) + gpu_products.compile_tasks(sections)
    if "folded" in sections:
        tasks += gpu_folded.compile_tasks()
    workers = min(12, (os.cpu_count() or 2) - 1, len(tasks))
    if workers < 2:
        return
    began = time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_run_task, tasks))
    print(f"compiled {len(tasks)} variants with {workers} processes in {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    listing = "\n".join(f"  {name:8} {what}" for name, (_, what) in SECTIONS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nsections:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections to run, separated by commas")
    parser.add_argument("--no-precompile", action="store_true", help="compile when a configuration is first timed")
    args = parser.parse_args()
    sections = args.only.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"unknown sections {sorted(unknown)}: choose from {', '.join(SECTIONS)}")
    if reason := unavailable_reason():
        parser.error(reason)
    torch.manual_seed(time.time_ns() % 2**31)  # fresh inputs every time
    if not args.no_precompile:
        precompile(sections)
    report = Report()
    for section in SECTIONS:
        if section in sections:
            began = time.perf_counter()
            try:
                with torch.inference_mode():
                    SECTIONS[section][0](report)
            except Exception as exc:
                report.fail(f"{section}: {type(exc).__name__}: {exc}")
            torch.cuda.empty_cache()
            print(f"-- {section} took {time.perf_counter() - began:.1f} s", flush=True)
    report.finish()


if __name__ == "__main__":
    main()
