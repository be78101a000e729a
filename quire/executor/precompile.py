"""A helper process that has the GPU kernels compiled by the time they are launched.

It starts before torch is imported and the weights are loaded, and works while they are: the first start on a machine
takes little longer than the next. What it compiles is in Triton's cache on disk; without it, or where it misses a
kernel, the first launch compiles. It tells when the kernels of a stage are there, so that one stage's run while the
next one's compile. This module needs neither torch nor Triton, and the helper does without torch: see meta_torch.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

from quire.config import EngineConfig
from quire.executor import meta_torch
from quire.executor.sizing import activation_dtype, batch_limits, kv_dtype, weight_quantization
from quire.models.spec import ModelSpec

_WITH_TORCH = "--with-torch"
_CUDA_DEVICE = re.compile(r"cuda(:\d+)?")
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
PROMPTS, START = "prompts", "start"  # stages: the largest step, and everything else that a start-up launches
# Whose code decides which kernels are launched, and how.
_SOURCES = ("kernels", "kernels/triton", "executor", "models", "sampling")


class Precompile:
    """The helper, seen from the process that will launch the kernels."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._is_ready = {PROMPTS: threading.Event(), START: threading.Event()}
        self._is_done = threading.Event()
        threading.Thread(target=self._attend, args=(process,), name="quire-precompile", daemon=True).start()

    @classmethod
    def start(cls, config: EngineConfig, spec: ModelSpec) -> Precompile | None:
        """None where there is no NVIDIA GPU to compile for."""
        wants_gpu = config.device == "auto" or _CUDA_DEVICE.fullmatch(config.device)
        if not wants_gpu or not any(os.path.exists(path) for path in _GPU_DEVICES):
            return None
        threading.Thread(target=_wake_gpu, args=(_device_index(config),), name="quire-wake-gpu", daemon=True).start()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quire.executor.precompile"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for the engine
            )
            assert process.stdin is not None
            with process.stdin as pipe:
                pickle.dump((config, spec), pipe)
        except OSError:
            return None  # no more processes, or a closed pipe: the kernels compile when launched
        return cls(process)

    def wait(self, stage: str = START) -> None:
        """Wait until a stage's kernels are compiled, or the helper gave up. It goes on with what requests may need."""
        self._is_ready[stage].wait()

    def is_done(self) -> bool:
        """Whether it has nothing left to compile."""
        return self._is_done.is_set()

    def _attend(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as pipe:
            for line in pipe:
                if event := self._is_ready.get(line.decode(errors="replace").strip()):  # a library may print, too
                    event.set()
        for event in self._is_ready.values():
            event.set()  # whatever happened: nothing more will come
        self._is_done.set()
        process.wait()


def main() -> None:
    given = sys.stdin.buffer.read()
    config, spec = pickle.loads(given)
    capability = _compute_capability(_device_index(config))
    if capability is None:
        return
    marker = _cache_dir() / f"quire-{_key(config, spec, capability)}"
    if not marker.exists():
        try:
            if _WITH_TORCH not in sys.argv and "torch" not in sys.modules:
                meta_torch.install()
            from triton.backends.compiler import GPUTarget

            from quire.executor.dry_run import needed_kernels
            from quire.kernels.triton.precompile import compile_jobs, compile_stages

            target = GPUTarget("cuda", capability, 32)
            needed = needed_kernels(config, spec, target)
        except Exception:
            if _WITH_TORCH in sys.argv:
                raise
            # The few parts of torch that meta_torch has were not enough.
            again = [sys.executable, "-P", "-m", "quire.executor.precompile", _WITH_TORCH]
            subprocess.run(again, input=given, check=False)
            return
        compile_stages({PROMPTS: needed.prompts, START: needed.start}, target, when_done=_say)
        os.nice(10)  # from here on the engine goes first
        compile_jobs(needed.later, target)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    else:
        for stage in (PROMPTS, START):
            _say(stage)


def _say(stage: str) -> None:
    print(stage, flush=True)


def _device_index(config: EngineConfig) -> int:
    return int(config.device.partition(":")[2] or 0)


def _open_driver(index: int) -> tuple[ctypes.CDLL, ctypes.c_int] | None:
    """The driver's library and a device, asked of the driver itself: torch would take seconds to import."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), index):
        return None
    return cuda, device


def _wake_gpu(index: int) -> None:
    """Make the context that torch will use, while it is imported: the driver takes a good part of a second for it."""
    if opened := _open_driver(index):
        cuda, device = opened
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), device)  # if it fails, torch will say why


def _compute_capability(index: int) -> int | None:
    """90 for 9.0."""
    opened = _open_driver(index)
    if opened is None:
        return None
    cuda, device = opened
    major, minor = ctypes.c_int(), ctypes.c_int()
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return major.value * 10 + minor.value


def _cache_dir() -> Path:
    """Where Triton keeps what it compiled: the marker goes when the cache does."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def _key(config: EngineConfig, spec: ModelSpec, capability: int) -> str:
    """A digest of everything that decides which kernels there are."""
    dtype = activation_dtype(config, spec, "cuda")
    settings = (
        dtype,
        kv_dtype(config, dtype),
        weight_quantization(config, spec, "cuda"),
        config.block_size,
        config.max_model_len,
        batch_limits(config, spec, "cuda"),
        (config.enable_lora, config.max_loras, config.max_lora_rank),
    )
    digest = hashlib.sha256(repr((settings, spec, capability, importlib.metadata.version("triton"))).encode())
    root = Path(__file__).parent.parent
    for folder in _SOURCES:
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


if __name__ == "__main__":
    main()
