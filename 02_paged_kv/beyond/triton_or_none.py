"""Triton, if it is installed. Without it, modules with kernels can still be imported; callers of a
kernel check `HAS_TRITON` first and report what is missing.

See 02_paged_kv/beyond/README.md"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """`triton.jit`, or the function unchanged."""
    return triton.jit(kernel) if HAS_TRITON else kernel


def jit_for_any(*integers: str, unaligned: Sequence[str] = ()) -> Callable[[Any], Any]:
    """`jit` for a kernel that compiles to the same machine code for any value of these integers:
    lengths and counts, which differ from step to step. Triton would otherwise compile it again for
    1 and for multiples of 16. The tensors in `unaligned` need not be aligned."""
    if not HAS_TRITON:
        return lambda kernel: kernel
    return triton.jit(
        do_not_specialize=list(integers), do_not_specialize_on_alignment=list(unaligned)
    )
