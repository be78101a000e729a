"""Compiling many kernels at once: what starting on a fresh machine would otherwise do one after the other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton
from triton.runtime.jit import JITFunction


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, launches compile and do not run; on leaving, all are compiled, in as many threads as there are cores.

    So a step can be rehearsed on tensors whose contents do not matter, and its kernels are there when it runs.
    """
    launch = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads, triton.AsyncCompileMode(threads):
        JITFunction.run = only_compile
        try:
            yield
        finally:
            JITFunction.run = launch
