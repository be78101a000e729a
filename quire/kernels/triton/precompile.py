"""Compiling kernels before they are needed, in as many processes as there are cores.

Triton compiles a kernel when it is first launched, and most of that runs under Python's lock: threads do not help.
So a dry run makes the launches on tensors that have shapes and no memory (torch's meta device), the kernels they would
need are noted down, and forked processes compile them into Triton's cache on disk, for whoever launches them later.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.runtime import driver
from triton.runtime.jit import JITFunction

KernelKey = tuple[str, str]  # a kernel's name, and the types and constants of a launch


@dataclass(slots=True, frozen=True)
class KernelJob:
    """One kernel with the types and constants that a launch gave it."""

    kernel: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: Any

    @property
    def source_length(self) -> int:
        return len(inspect.getsource(self.kernel.fn))


class _NoDevice:
    """Stands in for Triton's driver where kernels are compiled and never run."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def collecting(target: GPUTarget) -> Iterator[dict[KernelKey, KernelJob]]:
    """Inside, launches are noted down, each kernel once, and neither compile nor run."""
    jobs: dict[KernelKey, KernelJob] = {}
    launch, compile_kernel = JITFunction.run, JITFunction._do_compile

    def only_look(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    def note_down(
        self: Any, key: str, signature: Any, device: int, constants: Any, options: Any, attributes: Any, warmup: bool
    ) -> None:
        jobs.setdefault((self.__name__, key), KernelJob(self, signature, constants, attributes, options))

    driver.set_active(_NoDevice(target))
    JITFunction.run, JITFunction._do_compile = only_look, note_down
    try:
        yield jobs
    finally:
        JITFunction.run, JITFunction._do_compile = launch, compile_kernel


# What the forked processes take their work from: they inherit it, since kernels cannot be pickled.
_jobs: list[KernelJob] = []
_target: GPUTarget | None = None


def compile_jobs(jobs: Collection[KernelJob], target: GPUTarget) -> None:
    """Compile them all. For a process with a single thread and no CUDA context: it forks."""
    compile_stages({"all": jobs}, target, when_done=lambda stage: None)


def compile_stages(
    stages: Mapping[str, Collection[KernelJob]], target: GPUTarget, *, when_done: Callable[[str], None]
) -> None:
    """Likewise, in order; `when_done` hears of each stage once its kernels and those of the stages before are there."""
    global _jobs, _target
    _jobs, _target = [], target
    stage_of: list[str] = []
    for stage, jobs in stages.items():
        # The long ones first, so that none of them starts when the others are done.
        _jobs += sorted(jobs, key=lambda job: job.source_length, reverse=True)
        stage_of += [stage] * len(jobs)
    left, waiting = Counter(stage_of), list(stages)
    num_processes = min(len(_jobs), os.cpu_count() or 1)
    if not num_processes:
        for stage in waiting:
            when_done(stage)
        return
    # Not a Pool: that waits for ever for the work of a process that was killed.
    forked = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_processes, forked, initializer=_end_with, initargs=(os.getpid(),)) as pool:
        for done in as_completed([pool.submit(_compile, index) for index in range(len(_jobs))]):
            left[stage_of[done.result()]] -= 1
            while waiting and not left[waiting[0]]:
                when_done(waiting.pop(0))


def _end_with(parent: int) -> None:
    """Or a killed helper's processes would wait for work for ever, and the engine for them: they hold its pipe open."""
    with contextlib.suppress(OSError, AttributeError):  # where there is no such call
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # it was gone before we asked


def _compile(index: int) -> int:
    job = _jobs[index]
    # What fails here fails again at the launch, where somebody sees it. The piece of C that launches a kernel is
    # compiled too, and needs the driver's library: without it, at the launch.
    with contextlib.suppress(Exception):
        source = job.kernel.ASTSource(job.kernel, job.signature, job.constants, job.attributes)
        compiled = compile(source, target=_target, options=job.options.__dict__)
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(source, compiled.metadata)
    return index
