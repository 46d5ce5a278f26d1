"""Ask Linux for huge pages. On other systems, or if Linux refuses, nothing happens.

Weights in pages of 2 MiB instead of 4 KiB cause fewer TLB misses. Most systems use such pages only
for memory for which a program requests them (`madvise` in
`/sys/kernel/mm/transparent_hugepage/enabled`). NumPy requests them for the KV memory before it is
written. oneDNN allocates packed weights and writes them in the same call, so these are in small
pages and are moved to large ones afterwards. That takes 0.5 to 5 ms a page, so the start moves as
many as fit in `MAX_SECONDS`; the kernel moves the rest while the engine runs, some MB a second.

See common/README.md"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Iterable
from pathlib import Path

HUGE_PAGE = 2 << 20
MAX_SECONDS = 1.0
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MADV_COLLAPSE = 25  # Linux 6.1; Python does not name it


def advise(address: int, num_bytes: int, advice: int, page: int = mmap.PAGESIZE) -> None:
    """Advise the system about all pages of `page` bytes that lie wholly in this memory."""
    start, stop = -(-address // page) * page, (address + num_bytes) // page * page
    if sys.platform == "linux" and stop > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)


def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Request huge pages for memory that has not been written."""
    if sys.platform == "linux":
        advise(address, num_bytes, mmap.MADV_HUGEPAGE, HUGE_PAGE)


def move_to_huge_pages(memory: Iterable[tuple[int, int]]) -> None:
    """Move written memory, given as (address, number of bytes), to huge pages, if the system has
    any."""
    if sys.platform != "linux" or not ENABLED.exists() or "[never]" in ENABLED.read_text():
        return
    start = time.monotonic()
    for address, num_bytes in memory:
        advise(address, num_bytes, mmap.MADV_HUGEPAGE, HUGE_PAGE)
        if time.monotonic() - start < MAX_SECONDS:
            advise(address, num_bytes, MADV_COLLAPSE, HUGE_PAGE)
