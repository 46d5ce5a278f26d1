"""Read the experts' configuration from a `config.json`: Qwen3-MoE and Mixtral.

    family       which layers have experts               renormalised    weights of a token in
    Qwen3-MoE    every `decoder_sparse_step`th, but      norm_topk_prob  the model's dtype
                 not those in `mlp_only_layers`
    Mixtral      all                                     always          float32

Experts that every token reads ("shared"), groups of experts, and scores other than softmax
are refused by name.

See common/models/experts/README.md#what-depends-on-it-here"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from request import check_integers


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    num_experts: int
    num_active: int  # that a token is multiplied with
    intermediate_size: int  # of each
    is_renormalised: bool  # do the weights of a token add up to 1
    is_rounded: bool  # are they rounded to the model's dtype
    layers: tuple[int, ...]  # that have experts; the others have an MLP
    block: str  # the name of the block in a checkpoint, relative to a layer
    matrices: tuple[str, str, str]  # of each expert there: gate, up, down

    def part(self, layers: range, num_ranks: int) -> ExpertsConfig:
        """The configuration for these layers, with one rank's part of each matrix."""
        expert_layers = tuple(i - layers.start for i in self.layers if i in layers)
        size = self.intermediate_size // num_ranks
        return replace(self, layers=expert_layers, intermediate_size=size)


def qwen3_moe(hf: Any) -> ExpertsConfig | None:
    """Read `transformers`' Qwen3-MoE configuration. None: no layer has experts."""
    every = hf.decoder_sparse_step
    check_integers(1, decoder_sparse_step=every, moe_intermediate_size=hf.moe_intermediate_size)
    layers = [i for i in range(hf.num_hidden_layers) if (i + 1) % every == 0]
    layers = [i for i in layers if i not in hf.mlp_only_layers]
    if not layers:
        return None
    _check_numbers(hf)
    return ExpertsConfig(
        num_experts=hf.num_experts,
        num_active=hf.num_experts_per_tok,
        intermediate_size=hf.moe_intermediate_size,
        is_renormalised=hf.norm_topk_prob,
        is_rounded=True,
        layers=tuple(layers),
        block="mlp",
        matrices=("gate_proj", "up_proj", "down_proj"),
    )


def mixtral(hf: Any) -> ExpertsConfig:
    """Read `transformers`' Mixtral configuration."""
    _check_numbers(hf)
    return ExpertsConfig(
        num_experts=hf.num_experts,
        num_active=hf.num_experts_per_tok,
        intermediate_size=hf.intermediate_size,
        is_renormalised=True,
        is_rounded=False,
        layers=tuple(range(hf.num_hidden_layers)),
        block="block_sparse_moe",
        matrices=("w1", "w3", "w2"),
    )


def _check_numbers(hf: Any) -> None:
    num_active = hf.num_experts_per_tok
    check_integers(1, num_experts=hf.num_experts, num_experts_per_tok=num_active)
    if num_active > hf.num_experts:
        limit = f"<= the {hf.num_experts} experts"
        raise ValueError(f"num_experts_per_tok must be {limit}, got {num_active}")
