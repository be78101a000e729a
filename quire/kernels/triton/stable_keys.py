"""Keys of compiled kernels that do not depend on which kernel a process launches first.

Triton 3.6 computes a function's key when it is first needed, and takes into it the constants that the functions it
calls use, as far as their own keys are known by then. So two processes that launch in different orders look for the
same kernel under different names. Asking for all keys in one fixed order, callees first, makes them the same.
"""

from __future__ import annotations

import importlib

from triton.runtime.jit import JITFunction

from quire.kernels.triton.common import HAS_GLUON

# Callees before callers; within a module that is the order of the text.
_MODULES = (
    "common",
    "one_adapter",
    "norm",
    "rope",
    "activation",
    "epilogue",
    "quantize",
    "prefill",
    "prefill_hopper",
    "invariant_product",
    "invariant_hopper",
    "gated_hopper",
    "invariant_attention",
    "prefix",
    "widening",
    "decode",
    "skinny",
    "adapters",
    "routing",
    "grouped",
    "sampling",
    "sampling_filter",
)


def settle_keys() -> None:
    for name in _MODULES:
        if name.endswith("_hopper") and not HAS_GLUON:
            continue
        module = importlib.import_module(f"quire.kernels.triton.{name}")
        for value in list(vars(module).values()):
            if isinstance(value, JITFunction):
                _ = value.cache_key  # computed once, kept by the function
