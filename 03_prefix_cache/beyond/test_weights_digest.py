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
SMALL = {"num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 7}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_element_of_every_weight_is_in_the_digest(dtype, monkeypatch):
    """Trap 59: one changed number anywhere, the ends of the pieces that threads hash among them,
    and the rotary table, which no checkpoint holds."""
    monkeypatch.setattr(module, "_DIGEST_BYTES", 2048)
    model = random_model(dataclasses.replace(TINY, **SMALL), dtype=dtype).model
    digest = weights_digest(model.named_weights())
    per_chunk = 2048 // dtype.itemsize
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
    zeros = torch.zeros(2, 6)
    modules = [{"a": zeros}, {"b": zeros}, {"a": zeros.view(3, 4)}, {"a": zeros.int()}]
    modules += [{"a": zeros[0], "b": zeros[1]}, {"a": zeros, "b": zeros[:0]}]
    assert len({weights_digest(tensors.items()) for tensors in modules}) == len(modules)
    strided = {"b": zeros, "a": torch.zeros(6, 4)[:, ::2].t()}
    expected = weights_digest({"a": zeros, "b": zeros}.items())
    assert weights_digest(strided.items()) == expected, "neither the order nor the strides count"


def test_a_packed_model_has_the_name_of_the_plain_one():
    """Packing gives the plain weights up (`common/models/linear.py`); the model is the same."""
    for tied in (True, False):
        model = random_model(dataclasses.replace(TINY, tie_word_embeddings=tied)).model
        digest = weights_digest(model.named_weights())
        model.pack_weights()
        assert weights_digest(model.named_weights()) == digest
