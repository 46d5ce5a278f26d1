"""A model's name changes with every byte of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import weights_digest as module
from common.bench.random_weights import QWEN3_0_6B, random_model
from weights_digest import weights_digest

TINY = dataclasses.replace(
    QWEN3_0_6B, vocab_size=89, hidden_size=32, num_hidden_layers=2, intermediate_size=40
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("piece", [2048, module._DIGEST_BYTES])
def test_every_element_of_every_weight_is_in_the_digest(piece, dtype, monkeypatch):
    """Trap 59: one changed number anywhere, the ends of the pieces that threads hash among them,
    and the rotary table, which no checkpoint holds."""
    monkeypatch.setattr(module, "_DIGEST_BYTES", piece)
    small = dataclasses.replace(
        TINY, num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=7
    )
    model = random_model(small, dtype=dtype).model
    digest = weights_digest(model)
    assert weights_digest(random_model(small, dtype=dtype).model) == digest
    per_piece = piece // dtype.itemsize
    for tensor in (*model.parameters(), *model.buffers()):
        flat = tensor.detach().view(-1)
        places = {0, 1, len(flat) // 2 + 1, len(flat) - 1, per_piece - 1, per_piece}
        for place in sorted(place for place in places if place < len(flat)):
            before = flat[place].item()
            flat[place] = before + 0.5
            assert weights_digest(model) != digest, (tuple(tensor.shape), place)
            flat[place] = before
    assert weights_digest(model) == digest


def test_the_digest_names_what_the_bytes_belong_to():
    """Equal bytes in another dtype, shape or place are another model."""

    def digest_of(**tensors: torch.Tensor) -> str:
        module = torch.nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        return weights_digest(module)

    zeros = torch.zeros(2, 6)
    modules = [
        {"a": zeros},
        {"b": zeros},
        {"a": zeros.view(3, 4)},
        {"a": zeros.int()},
        {"a": zeros[0], "b": zeros[1]},
        {"a": zeros, "b": zeros[:0]},
    ]
    assert len({digest_of(**tensors) for tensors in modules}) == len(modules)
    strided = torch.zeros(6, 4)[:, ::2].t()
    assert digest_of(a=strided) == digest_of(a=zeros)
