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
    IS_INTERPRETED: bool
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None
    HAS_TRITON = triton is not None
    # A constant that kernels can read.
    IS_INTERPRETED = HAS_TRITON and tl.constexpr(triton.knobs.runtime.interpret)


def jit_for_any(*integers: str, unaligned: Sequence[str] = ()) -> Callable[[Any], Any]:
    """`triton.jit` for a kernel that compiles to the same machine code for any value of these
    integers: lengths and counts, which differ from step to step. Triton would otherwise compile it
    again for 1 and for multiples of 16. The tensors in `unaligned` need not be aligned."""
    if not HAS_TRITON:
        return lambda kernel: kernel
    return triton.jit(
        do_not_specialize=list(integers), do_not_specialize_on_alignment=list(unaligned)
    )
