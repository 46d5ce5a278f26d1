"""The tables of `common/models/MODELS.md`: `python -m workshop.models_page` updates them.

The rows come from the tables that decide: `FAMILIES` and `REFUSAL_REASONS` of `families.py`, and
the fields of `transformers`' configuration classes. So a new family gets a row automatically. Each
row also names the cases in which a test compares its logits with those of `transformers`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from common.models.families import FAMILIES, REFUSAL_REASONS, Family
from common.tests.model_cases import CASES
from workshop.measure.bench.bench_record import markdown_table, replace_between_markers

PAGE = Path(__file__).parents[2] / "common" / "models" / "MODELS.md"
_PHRASES = {
    "has_qkv_bias": "biases of q, k and v",
    "has_qk_norm": "queries and keys are normed",
    "scales_embeddings": "embeddings are scaled",
    "norm_offset": "norms are kept less 1",
    "has_whole_qk_norm": "queries are normed as a whole, keys too",
    "has_input_norms": "no norm before a block",
    "has_post_norms": "what a block adds is normed, too",
}


def rows() -> list[list[str]]:
    """A row for each family: architecture, special settings, windows, experts, cases."""
    found = []
    for architecture, family in FAMILIES.items():
        defaults = AutoConfig.for_model(family.model_type)
        cases = [name for name, (kind, _) in CASES.items() if kind.model_type == family.model_type]
        settings = "; ".join(special_settings(family, defaults)) or "nothing"
        experts = "yes" if family.experts else "none"
        shown = ", ".join(f"`{name}`" for name in cases)
        found.append([f"`{architecture}`", settings, windows_of(defaults), experts, shown])
    return found


def special_settings(family: Family, defaults: Any) -> list[str]:
    """The family's special settings as phrases."""
    found = []
    if hasattr(defaults, "attention_bias"):
        found.append("biases of q, k, v and o if `attention_bias`")
    if hasattr(defaults, "mlp_bias"):
        found.append("biases of the MLP if `mlp_bias`")
    for field in fields(family):
        if field.name in _PHRASES and getattr(family, field.name) != field.default:
            found.append(_PHRASES[field.name])
    if getattr(defaults, "hidden_activation", "") == "gelu_pytorch_tanh":
        found.append("GELU, approximated by tanh")
    if "full_attention" in defaults.rope_parameters:
        found.append("rotary angles of their own in layers with a window")
    return found


def windows_of(defaults: Any) -> str:
    if not hasattr(defaults, "sliding_window"):
        return "none"
    if hasattr(defaults, "use_sliding_window"):
        return "in the layers that `layer_types` says, if `use_sliding_window`"
    if not hasattr(defaults, "layer_types"):
        return "in every layer, unless `sliding_window` is null"
    every = 1 + defaults.layer_types.index("full_attention")
    return f"in {every - 1} of {every} layers, or as `layer_types` says"


def render() -> str:
    """Return the page with its current tables."""
    head = ["architecture", "its own", "windows", "experts", "cases"]
    refused = [[f"`{pattern}`", reason] for pattern, reason in REFUSAL_REASONS.items()]
    tables = {
        "families": markdown_table(head, rows(), "---"),
        "refused": markdown_table(["architecture", "why"], refused, "---"),
    }
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = replace_between_markers(text, name, table)
    return text


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
