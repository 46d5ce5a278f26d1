"""A block of experts against `transformers`' own, in both ways of multiplying; whole models are in
`common/models/test_model.py`, whose cases have experts too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.models.experts.experts_block import ExpertsBlock
from common.models.linear import linear_layers, reason_not_packed
from common.models.loader import load_model
from common.models.regions.regions import Regions
from common.tests.model_cases import by_transformers, save_case

CASES = "qwen3-moe", "qwen3-moe-every-second", "mixtral"
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def blocks_of(name: str, path: Path, dtype: torch.dtype) -> tuple[ExpertsBlock, torch.nn.Module]:
    """Ours and theirs, of the first layer that has one."""
    save_case(name, path)
    model = load_model(path, dtype).model
    theirs = by_transformers(path, dtype)
    layer = next(i for i, x in enumerate(model.layers) if isinstance(x.mlp, ExpertsBlock))
    own = model.layers[layer].mlp
    assert isinstance(own, ExpertsBlock)
    return own, theirs.model.layers[layer].mlp


def rows(number: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, 32, generator=generator, dtype=torch.float64).to(dtype)


@torch.inference_mode()
def ours(block: ExpertsBlock, x: torch.Tensor) -> torch.Tensor:
    return block.add_to(torch.zeros_like(x), x, Regions())


@torch.inference_mode()
def theirs_of(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x[None])[0]


@pytest.mark.net
@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_block_is_that_of_transformers(name, is_captured, tmp_path):
    """In float64, in bfloat16, and packed where this processor packs."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        bound = {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, 0.02)
        block, theirs = blocks_of(name, tmp_path, dtype)
        for is_packed in (False, True):
            if is_packed:
                if reason_not_packed(dtype, CPU) is not None:
                    continue
                for matrix in linear_layers(block):
                    matrix.pack()
                assert block.gate_up[0].packed and block.gate_up[0].weight is None
            block.prepare(is_captured)
            for number in (1, 2, 7, 40):
                x = rows(number, dtype, number)
                expected = theirs_of(theirs, x)
                error = (ours(block, x) - expected).abs().max() / expected.abs().max()
                assert expected.std() > 0.05 and error < bound
            assert ours(block, rows(0, dtype)).shape == (0, 32)
