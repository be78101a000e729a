"""The specification of every kernel in plain torch: oracle of the fast backends, fallback where none of them runs."""

from quire.kernels.reference.linear import DenseLinear, ReferenceLinear
from quire.kernels.reference.ops import ReferenceOps

__all__ = ["DenseLinear", "ReferenceLinear", "ReferenceOps"]
