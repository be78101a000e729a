"""Kernels for NVIDIA GPUs in Triton. Importing this costs nothing: kernels load with the TritonOps that needs them."""

from quire.kernels.triton.ops import TritonOps, unavailable_reason

__all__ = ["TritonOps", "unavailable_reason"]
