"""Checkpoints with a tensor for each expert, and with one for all; whatever is over or short."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.models.loader import load_model
from common.models.ranks import Ranks
from common.models.test_loader import edit_weights
from common.parallel.sharded_model import ShardedModel
from common.parallel.test_sharded_model import Silent
from common.tests.model_cases import save_case

WEIGHTS = "model.safetensors"


def state(path: Path, ranks: Ranks | None = None) -> dict[str, torch.Tensor]:
    make = {} if ranks is None else {"make": partial(ShardedModel, collectives=Silent(ranks))}
    return dict(load_model(path, torch.float64, **make).model.named_parameters())


def fused(name: str, path: Path) -> Path:
    """The same weights, as `transformers` computes with them."""
    model = AutoModelForCausalLM.from_pretrained(save_case(name, path), dtype=torch.float64)
    model.save_pretrained(path / "fused", save_original_format=False)
    names = load_file(path / "fused" / WEIGHTS)
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    return path / "fused"


@pytest.mark.parametrize("ranks", [None, Ranks(2, 1, 0), Ranks(2, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_fused_is_the_same_model(name, ranks, tmp_path):
    found = state(fused(name, tmp_path), ranks)
    expected = state(tmp_path, ranks)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


FUSED = "model.layers.2.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({FUSED: t[FUSED][:4].clone()}), r"lacks .*experts\.4\.gate_proj"),
        (lambda t: t.update({FUSED: t[FUSED].repeat(2, 1, 1)}), r"lacks: .*experts\.5\.gate_proj"),
        (lambda t: t.update({FUSED: t[FUSED][:, :-2].clone()}), r"gate_proj.* \(23, 32\) in the"),
        (lambda t: t.update({FUSED: t[FUSED][:, :-1].clone()}), "twice the rows"),
        (lambda t: t.update({FUSED: t[FUSED][0].clone()}), "must have shape"),
        (
            lambda t: t.update({f"{FUSED[:-12]}0.up_proj.weight": t[FUSED][0, 24:].clone()}),
            "experts.0.up_proj.weight twice",
        ),
    ],
)
def test_an_invalid_fused_tensor_is_a_clear_error(change, message, tmp_path):
    path = fused("qwen3-moe", tmp_path)
    edit_weights(path, change)
    with pytest.raises(ValueError, match=message):
        load_model(path)
