"""What KV that several engines share goes by, besides tokens: the model that computed it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import torch
from torch import nn

_DIGEST_BYTES = 16 << 20  # hashed at a time by a thread, copied from a GPU at a time


def weights_digest(model: nn.Module) -> str:
    """A name for everything the model computes with: names, dtypes, shapes and every byte of its
    parameters and buffers. Equal in every process that loads the same checkpoint.

    Every byte, because KV goes by this name between engines: of two checkpoints that differ in one
    number, each would be served the other's (Trap 59). Threads help: hashing lets go of the GIL.
    """
    tensors = sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0])
    layout = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors]
    pieces = [
        piece
        for _, tensor in tensors
        for piece in tensor.detach().reshape(-1).view(torch.uint8).split(_DIGEST_BYTES)
    ]
    with ThreadPoolExecutor() as threads:
        digests = threads.map(lambda piece: blake2b(piece.cpu().numpy()).digest(), pieces)
        whole = "\n".join(layout).encode() + b"".join(digests)
    return blake2b(whole, digest_size=16).hexdigest()
