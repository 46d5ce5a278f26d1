"""List the supported models: `python -m common.models`.

The rows come from the tables that decide: the families of `model_config.py`, and the architectures
that it refuses by name. So a new family gets a row automatically. `MODELS.md` also names a random
checkpoint to try, and the tests that show that a family is computed correctly.

See common/README.md#which-models"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from common.models.model_config import FAMILIES, REFUSAL_REASONS

_WINDOWS = {
    "never": "none",
    "optional": "in the layers that `layer_types` says, if `use_sliding_window`",
    "always": "in every layer, unless `sliding_window` is null",
    "pattern": "in five layers of six, or as `layer_types` says",
    "pattern of 4": "in three layers of four, or as `layer_types` says",
}
# Fields that the other columns show, or that only spell a default.
_OMITTED = {"model_type", "sliding_window", "experts", "head_dim"}
_OMITTED |= {"extras", "defaults", "overrides"}
_PHRASES = {
    "has_attention_bias": "biases of q, k, v and o if `attention_bias`",
    "has_mlp_bias": "biases of the MLP if `mlp_bias`",
    "has_qkv_bias": "biases of q, k and v",
    "has_qk_norm": "queries and keys are normed",
    "activation": "GELU, approximated by tanh",
    "window_theta": "rotary angles of their own in layers with a window",
    "scales_embeddings": "embeddings are scaled",
    "norm_offset": "norms are kept less 1",
    "blocks": "no norm before a block; queries are normed as a whole, keys too",
    "has_post_norms": "what a block adds is normed, too",
}


def families() -> list[list[str]]:
    """The row of each family: architecture, special settings, windows, experts."""
    return [
        [
            architecture,
            "; ".join(special_settings(family)) or "nothing",
            windows_of(family),
            "yes" if family.experts else "none",
        ]
        for architecture, family in FAMILIES.items()
    ]


def windows_of(family: Any) -> str:
    kind = family.sliding_window
    if kind == "pattern" and (every := family.overrides.get("sliding_window_pattern")):
        kind = f"pattern of {every}"
    if kind == "always" and family.defaults.get("sliding_window") is None:
        return "in every layer, if `sliding_window` says so"
    return _WINDOWS.get(kind, f"`{kind}`")


def special_settings(family: Any) -> list[str]:
    """The family's special settings as phrases. A field without a phrase is shown unchanged."""
    found = []
    for field in fields(family):
        value = getattr(family, field.name)
        if value != field.default and field.name not in _OMITTED:
            found.append(_PHRASES.get(field.name, f"`{field.name}` is {value!r}"))
    return found


def main() -> None:
    for name, settings, windows, experts in families():
        settings, windows = settings.replace("`", ""), windows.replace("`", "")
        print(f"{name}\n  settings  {settings}\n  windows   {windows}\n  experts   {experts}\n")
    print("Refused by name, before a weight is read:")
    for pattern, reason in REFUSAL_REASONS.items():
        print(f"  {pattern:25} {reason}")
    print("\nAll other architectures are refused, too. What a config may say, and")
    print("what shows that it is right: common/models/MODELS.md")


if __name__ == "__main__":
    main()
