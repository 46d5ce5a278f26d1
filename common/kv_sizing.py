"""How many KV blocks fit: the arithmetic behind `num_blocks=None`, and what it says in the log.

After the weights are loaded and one warm-up step has shown what a step needs, a share of the memory
that is still free becomes KV blocks, but never more than `max_num_seqs` requests of `max_model_len`
could fill."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

# On a GPU the process owns the memory and the warm-up has run the largest step. On a CPU the rest
# of the computer lives in the same memory, and a step's activations come out of the other half.
_SHARE_OF_FREE = {"cuda": 0.9, "cpu": 0.5}
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class KVBudget:
    """The outcome. One block more than is usable: block 0 is the null block."""

    num_blocks: int
    explanation: str


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that an allocation on `device` could still take."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def size_kv_cache(
    kv_bytes_per_block: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    device: torch.device,
    free_bytes: int | None = None,
) -> KVBudget:
    """Blocks that fit in the free memory (`free_bytes`, measured if None).

    Raises `ValueError` if not even one request of `max_model_len` fits.
    """
    free = free_memory_bytes(device) if free_bytes is None else free_bytes
    share = _SHARE_OF_FREE[device.type]
    blocks_per_request = -(-max_model_len // block_size)
    num_affordable = int(free * share) // kv_bytes_per_block
    num_useful = max_num_seqs * blocks_per_request + 1
    num_blocks = min(num_affordable, num_useful)
    if num_blocks < blocks_per_request + 1:
        raise ValueError(
            f"max_model_len is {max_model_len}: one such request needs {blocks_per_request} KV "
            f"blocks of {kv_bytes_per_block:,} bytes, and {free / _GIB:.2f} GiB of free memory on "
            f"{device} give {max(num_affordable - 1, 0)}; lower max_model_len"
        )
    explanation = (
        f"KV cache: {free / _GIB:.2f} GiB free x {share:.0%} / {kv_bytes_per_block / 1024:.1f} KiB "
        f"a block of {block_size} tokens = {num_affordable:,} blocks; {max_num_seqs} requests of "
        f"{max_model_len} tokens can use {num_useful:,}; taking {num_blocks:,} "
        f"({num_blocks * kv_bytes_per_block / _GIB:.2f} GiB, "
        f"{(num_blocks - 1) * block_size:,} tokens)"
    )
    return KVBudget(num_blocks, explanation)
