"""Rotary angles for texts longer than those that a model was first trained on, by `rope_type`.

    linear    all angles grow `factor` times more slowly
    llama3    slow ones do, fast ones stay, and between two wavelengths they are blended
    yarn      the same by turns in the first training's length; and cosines and sines are
              multiplied by `attention_factor`, so that scores grow

`READS` lists the `rope_scaling` fields that a kind reads, and the function with the kind's name
computes the angles. They equal those of `transformers`, which a test compares. Not supported:
"dynamic", whose angles change when a text grows, so that keys in the KV cache would have to be
rotated again; "longrope", which has two lists of factors and switches in the middle of a text.

Sources: YaRN, arXiv 2309.00071; "llama3": the Llama 3.1 model card.

See common/README.md#which-models"""

from __future__ import annotations

import math
from typing import Any

import torch

from common.models.config_fields import positive_float, positive_int, refuse_unknown, refused
from common.models.rotary import RopeParameters

_ORIGINAL = "original_max_position_embeddings"
_BOUNDS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
# The required and the optional fields of each kind. All are numbers > 0.
READS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    ),
}


def read_scaling(
    source: str, rope_type: str, rope: dict[str, Any], fields: dict[str, Any], max_positions: int
) -> dict[str, Any]:
    """Read fields of `RopeParameters`. Raises `ValueError` for an unknown kind or missing field."""
    if not isinstance(rope_type, str) or rope_type not in READS:
        known = ", ".join(["default", *READS])
        raise refused(f"{source}: rope_type", rope_type, f"be {known}")
    needed, optional = READS[rope_type]
    refuse_unknown(source, rope, {*needed, *optional})
    values: dict[str, Any] = {name: positive_float(rope, name) for name in needed}
    values |= {k: positive_float(rope, k) for k in optional if rope.get(k) is not None}
    if rope_type != "linear":
        holder = fields if fields.get(_ORIGINAL) is not None else rope
        values[_ORIGINAL] = positive_int(holder, _ORIGINAL, max_positions)
        low, high = _BOUNDS[rope_type]
        lower, upper = values.get(low, 1.0), values.get(high, 32.0)  # yarn's, if they are absent
        if upper <= lower:
            raise refused(f"{source}: {high}", upper, f"exceed {low} ({lower})")
    if rope_type == "yarn":
        if rope.get("rope_theta", fields.get("rope_theta")) == 1:
            raise refused("rope_theta", 1, "be another number with yarn")
        factor = _attention_factor(
            values["factor"], values.pop("mscale", None), values.pop("mscale_all_dim", None)
        )
        values.setdefault("attention_factor", factor)
    return values


def _attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def yarn_mscale(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return yarn_mscale(mscale) / yarn_mscale(mscale_all_dim)
    return yarn_mscale(1.0)


def linear(inv_freq: torch.Tensor, rope: RopeParameters) -> torch.Tensor:
    return inv_freq / rope.factor


def llama3(inv_freq: torch.Tensor, rope: RopeParameters) -> torch.Tensor:
    """High frequencies stay, low ones are divided by `factor`, those between are blended:

    wavelength    short |  original / high_freq_factor  ...  original / low_freq_factor  | long
                  as is |                          blended                               | / factor
    """
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    is_long = wavelength > original / rope.low_freq_factor
    is_short = wavelength < original / rope.high_freq_factor
    share_kept = original / wavelength - rope.low_freq_factor
    share_kept = share_kept / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - share_kept) * inv_freq / rope.factor + share_kept * inv_freq
    return torch.where(is_long, inv_freq / rope.factor, torch.where(is_short, inv_freq, blended))


def yarn(inv_freq: torch.Tensor, rope: RopeParameters) -> torch.Tensor:
    """Channel pairs that turn more than `beta_fast` times in the first training's length stay,
    those that turn less than `beta_slow` times are divided by `factor`, and pairs between these two
    are blended linearly."""
    num_pairs = len(inv_freq)

    def pair_that_turns(times: float) -> float:
        per_turn = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return num_pairs * math.log(per_turn) / math.log(rope.theta)

    first = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(rope.beta_slow)), 2 * num_pairs - 1)
    pairs = torch.arange(num_pairs, dtype=torch.float32)
    share_kept = 1 - ((pairs - first) / ((last - first) or 1)).clamp(0, 1)
    exponents = torch.arange(0, 2 * num_pairs, 2, dtype=torch.float32) / (2 * num_pairs)
    slow = 1.0 / (rope.factor * rope.theta**exponents)  # `inv_freq / factor` would round otherwise
    return slow * (1 - share_kept) + inv_freq * share_kept
