"""A digest of a model's weights, which identifies KV that several engines share, besides the
tokens.

See 03_prefix_cache/beyond/README.md"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import torch

_DIGEST_BYTES = 2 << 20  # hashed at a time by a thread, copied from a GPU at a time


def weights_digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of everything a model computes with: names, dtypes, shapes and every byte of its
    parameters and buffers.

    Equal in every process that loads the same checkpoint, in any order. It covers every byte,
    because KV is shared under this digest: if two checkpoints differed in one number that is not
    covered, each would be served the other's KV (Trap 59). Threads help, because hashing releases
    the GIL.
    """
    parts = []
    with ThreadPoolExecutor() as threads:
        for name, tensor in weights:  # one at a time: it may be a copy, made for this
            chunks = tensor.detach().reshape(-1).view(torch.uint8).split(_DIGEST_BYTES)
            digests = threads.map(lambda chunk: blake2b(chunk.cpu().numpy()).digest(), chunks)
            layout = f"{name} {tensor.dtype} {tuple(tensor.shape)}\n"
            parts.append(layout.encode() + b"".join(digests))
    return blake2b(b"".join(sorted(parts)), digest_size=16).hexdigest()
