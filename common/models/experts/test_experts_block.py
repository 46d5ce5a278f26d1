"""A block of experts against `transformers`' own, in both ways of multiplying; whole models are in
`common/models/test_model.py`, whose cases have experts too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.models.experts.experts_block import ExpertsBlock
from common.models.linear import linear_layers, reason_not_packed
from common.models.loader import load_model
from common.models.model_config import ModelConfig
from common.models.regions.regions import Regions
from common.tests.model_cases import EXPERTS, by_transformers, save_case

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
                assert block.gate_up[0].is_packed and block.gate_up[0].weight is None
            block.prepare(is_captured)
            for number in (1, 2, 7, 40):
                x = rows(number, dtype, number)
                expected = theirs_of(theirs, x)
                error = (ours(block, x) - expected).abs().max() / expected.abs().max()
                assert expected.std() > 0.05 and error < bound
            assert ours(block, rows(0, dtype)).shape == (0, 32)


# -- configurations

QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 89,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **EXPERTS,
}


REFUSED = {
    "shared": ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size must"),
    "shared, by number": ({"n_shared_experts": 2}, "n_shared_experts must"),
    "groups": ({"n_group": 4}, "n_group must"),
    "scores": ({"scoring_func": "sigmoid"}, "scoring_func must"),
    "scale": ({"routed_scaling_factor": 2.5}, "routed_scaling_factor must"),
    "none": ({"num_experts": 0}, "num_experts must"),
    "absent": ({"num_experts": None}, "num_experts must"),
    "without a size": ({"moe_intermediate_size": None}, "moe_intermediate_size must"),
    "too many": ({"num_experts_per_tok": 6}, "num_experts_per_tok must"),
    "two numbers": ({"num_local_experts": 4}, "num_experts and num_local_experts must"),
    "step": ({"decoder_sparse_step": 0}, "decoder_sparse_step must"),
    "layers": ({"mlp_only_layers": [6]}, "mlp_only_layers must"),
    "layers' kind": ({"mlp_only_layers": "0"}, "mlp_only_layers must"),
    "the other family's": ({"router_jitter_noise": 0.1}, "router_jitter_noise must"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_settings_are_refused_by_name(case):
    change, message = REFUSED[case]
    ModelConfig.from_hf(QWEN)
    with pytest.raises(ValueError) as error:
        ModelConfig.from_hf({**QWEN, **change})
    assert message in str(error.value) and ", got " in str(error.value)
