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
class ExpertNames:
    """The names of the experts' tensors in a checkpoint, relative to a layer."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    num_experts: int
    num_active: int  # that a token is multiplied with
    intermediate_size: int  # of each
    is_renormalised: bool  # do the weights of a token add up to 1
    is_rounded: bool  # are they rounded to the model's dtype
    layers: tuple[int, ...]  # that have experts; the others have an MLP
    names: ExpertNames

    def part(self, layers: range, num_ranks: int) -> ExpertsConfig:
        """The configuration for these layers, with one rank's part of each matrix."""
        expert_layers = tuple(i - layers.start for i in self.layers if i in layers)
        size = self.intermediate_size // num_ranks
        return replace(self, layers=expert_layers, intermediate_size=size)


def qwen3_moe(fields: dict[str, Any]) -> ExpertsConfig | None:
    """Read Qwen3-MoE's fields. None: no layer has experts. Raises `ValueError`."""
    # transformers 5 writes the second name; older checkpoints have the first.
    numbers = {
        name: fields[name] for name in ("num_experts", "num_local_experts") if name in fields
    }
    if len(set(map(repr, numbers.values()))) > 1:
        raise ValueError(f"num_experts and num_local_experts must be equal, got {numbers}")
    every = _integers(fields, decoder_sparse_step=1)[0]
    dense = fields.get("mlp_only_layers") or []
    num_layers = fields["num_hidden_layers"]
    if not isinstance(dense, list) or not all(i in range(num_layers) for i in dense):
        allowed = f"a list of layers in [0, {num_layers})"
        raise ValueError(f"mlp_only_layers must be {allowed}, got {dense!r}")
    layers = [i for i in range(num_layers) if (i + 1) % every == 0 and i not in dense]
    if not layers:
        return None
    name = next(iter(numbers), "num_experts")
    names = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
    num_experts, num_active, size = _integers(
        fields,
        **{name: None if numbers else 128},
        num_experts_per_tok=None,
        moe_intermediate_size=None,
    )
    return _checked(
        num_experts,
        num_active,
        size,
        is_renormalised=bool(fields.get("norm_topk_prob")),
        is_rounded=True,
        layers=tuple(layers),
        names=names,
    )


def mixtral(fields: dict[str, Any]) -> ExpertsConfig:
    """Read Mixtral's fields. Raises `ValueError`."""
    names = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
    num_experts, num_active, size = _integers(
        fields, num_local_experts=None, num_experts_per_tok=None, intermediate_size=None
    )
    return _checked(
        num_experts,
        num_active,
        size,
        is_renormalised=True,
        is_rounded=False,
        layers=tuple(range(fields["num_hidden_layers"])),
        names=names,
    )


def _integers(fields: dict[str, Any], **defaults: int | None) -> list[int]:
    values: dict[str, Any] = dict(defaults)
    values |= {name: fields[name] for name in defaults if fields.get(name) is not None}
    check_integers(1, **values)
    return list(values.values())


def _checked(num_experts: int, num_active: int, size: int, **options: Any) -> ExpertsConfig:
    if num_active > num_experts:
        limit = f"<= the {num_experts} experts"
        raise ValueError(f"num_experts_per_tok must be {limit}, got {num_active}")
    return ExpertsConfig(num_experts, num_active, size, **options)
