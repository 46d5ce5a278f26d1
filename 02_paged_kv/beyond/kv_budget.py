"""How many KV blocks fit: the arithmetic, and the readings of memory that it starts from.

On a GPU the process owns its share of the memory, and its need besides KV is measured: one of the
largest possible steps is run, its sampler included, and the peak is read.

    total x utilization | weights | activations | not PyTorch's | KV blocks |
                          before    peak - before  free on the device is neither

On a CPU, where such a step could take half a minute and other programs share the memory, half of
the free memory becomes KV blocks. Never more than `max_num_seqs` requests of `max_model_len` could
fill. vLLM measures in the same way (`determine_available_memory`).

See 02_paged_kv/beyond/README.md"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import psutil
import torch

logger = logging.getLogger(__name__)

_SHARE_OF_FREE = 0.5  # on a CPU
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """A reading of a GPU, in bytes. `reserved` is PyTorch's, including blocks that it only keeps
    for later; `free` is unused."""

    total: int
    free: int
    reserved: int
    peak_reserved: int  # since the last `reset`


@dataclass(frozen=True, slots=True)
class BytesForKV:
    num_bytes: int
    explanation: str  # of the source of the numbers


def remaining_bytes(
    before: MemoryReading, after: MemoryReading, warm_up_kv_bytes: int, utilization: float
) -> BytesForKV:
    """Bytes that a GPU has for KV, from readings before and after the warm-up. The warm-up's own KV
    cache, of `warm_up_kv_bytes`, was there in both, and is freed later. Memory that is neither free
    nor PyTorch's belongs to the CUDA context, its libraries and other processes."""
    weights = before.reserved - warm_up_kv_bytes
    activations = after.peak_reserved - before.reserved
    others = after.total - after.free - after.reserved
    num_bytes = int(after.total * utilization) - weights - activations - others
    explanation = (
        f"{after.total / _GIB:.2f} GiB x {utilization:.0%} - {weights / _GIB:.2f} weights - "
        f"{activations / _GIB:.2f} activations - {others / _GIB:.2f} not PyTorch's"
    )
    return BytesForKV(max(0, num_bytes), explanation)


def share_of_free(free_bytes: int) -> BytesForKV:
    """Bytes that a CPU has for KV."""
    explanation = f"{free_bytes / _GIB:.2f} GiB free x {_SHARE_OF_FREE:.0%}"
    return BytesForKV(int(free_bytes * _SHARE_OF_FREE), explanation)


def size_kv_cache(
    kv_bytes_per_block: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    available: BytesForKV,
    blocks_per_request: int | None = None,
) -> int:
    """The number of blocks that fit, the null block included; logs the arithmetic.
    `blocks_per_request`: how many one request of `max_model_len` holds at a time; None: one for
    each `block_size` tokens. Raises `ValueError` if not even one such request fits."""
    blocks_per_request = blocks_per_request or -(-max_model_len // block_size)
    num_affordable = available.num_bytes // kv_bytes_per_block
    num_useful = max_num_seqs * blocks_per_request + 1
    num_blocks = min(num_affordable, num_useful)
    if num_blocks < blocks_per_request + 1:
        raise ValueError(
            f"max_model_len={max_model_len} needs {blocks_per_request} KV blocks of "
            f"{kv_bytes_per_block:,} bytes for one request, but only {max(num_affordable - 1, 0)} "
            f"fit ({available.explanation}); lower max_model_len"
        )
    logger.info(
        f"KV cache: {available.explanation} / {kv_bytes_per_block / 1024:.1f} KiB "
        f"a block of {block_size} tokens = {num_affordable:,} blocks; {max_num_seqs} requests of "
        f"{max_model_len} tokens can use {num_useful - 1:,}; taking {num_blocks - 1:,} "
        f"({num_blocks * kv_bytes_per_block / _GIB:.2f} GiB, "
        f"{(num_blocks - 1) * block_size:,} tokens)"
    )
    return num_blocks


class CudaMemory:
    """The readings of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        """Release memory that PyTorch keeps unused, and restart the peak."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> MemoryReading:
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        return MemoryReading(total, free, reserved, torch.cuda.max_memory_reserved(self.device))


def free_memory_bytes() -> int:
    """Bytes that an allocation on the CPU could still take."""
    return psutil.virtual_memory().available
