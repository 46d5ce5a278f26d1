"""A model's name changes with every byte of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import weights_digest as module
from weights_digest import weights_digest
from workshop.measure.bench.random_weights import QWEN3_0_6B, random_model

TINY = dataclasses.replace(
    QWEN3_0_6B, vocab_size=89, hidden_size=32, num_hidden_layers=2, intermediate_size=40
)


@pytest.mark.sample(dtype=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("chunk_bytes", [2048, module._DIGEST_BYTES])
def test_every_element_of_every_weight_is_in_the_digest(chunk_bytes, dtype, monkeypatch):
    """Trap 59: one changed number anywhere, the ends of the pieces that threads hash among them,
    and the rotary table, which no checkpoint holds."""
    monkeypatch.setattr(module, "_DIGEST_BYTES", chunk_bytes)
    small = dataclasses.replace(
        TINY, num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=7
    )
    model = random_model(small, dtype=dtype).model
    digest = weights_digest(model.named_weights())
    assert weights_digest(random_model(small, dtype=dtype).model.named_weights()) == digest
    per_chunk = chunk_bytes // dtype.itemsize
    for tensor in (*model.parameters(), *model.buffers()):
        flat = tensor.detach().view(-1)
        places = {0, 1, len(flat) // 2 + 1, len(flat) - 1, per_chunk - 1, per_chunk}
        for place in sorted(place for place in places if place < len(flat)):
            before = flat[place].item()
            flat[place] = before + 0.5
            assert weights_digest(model.named_weights()) != digest, (tuple(tensor.shape), place)
            flat[place] = before
    assert weights_digest(model.named_weights()) == digest


def test_the_digest_covers_names_shapes_and_dtypes():
    """Equal bytes in another dtype, shape or place are another model."""

    def digest_of(**tensors: torch.Tensor) -> str:
        return weights_digest(tensors.items())

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
    assert digest_of(b=zeros, a=strided) == digest_of(a=zeros, b=zeros), "the order is nobody's"


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_has_the_name_of_the_plain_one(tied):
    """Packing gives the plain weights up (`common/models/linear.py`); the model is the same."""
    config = dataclasses.replace(TINY, tie_word_embeddings=tied)
    model = random_model(config).model
    plain = {name: tensor.clone() for name, tensor in model.named_weights()}
    assert model.pack_weights() is None, "this test needs an x86 processor"
    packed = dict(model.named_weights())
    assert packed.keys() == plain.keys()
    assert all(torch.equal(packed[name], plain[name]) for name in plain)
    assert weights_digest(packed.items()) == weights_digest(plain.items())
    assert sum(tensor.numel() for tensor in packed.values()) == model.num_parameters + len(
        model.rotary_table.flatten()
    )
