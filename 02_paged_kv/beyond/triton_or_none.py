"""Triton where it is installed. Where it is not, modules that hold kernels can be imported anyway;
whoever asks for a kernel checks `HAS_TRITON` first and says what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import triton
    import triton.language as tl

    HAS_TRITON: bool
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None
    HAS_TRITON = triton is not None


def jit(kernel: Any) -> Any:
    """`triton.jit`, or the function as it is."""
    return triton.jit(kernel) if HAS_TRITON else kernel
