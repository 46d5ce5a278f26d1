"""Which models are served: `python -m common.models [--write]`.

The rows come from where they are decided: the families of `model_config.py`, the architectures that
it refuses by name, the random checkpoints that each family has, and the cases in which a test
compares its logits with those of `transformers`. So a new family has a row by itself.
`--write` renews the tables of `MODELS.md`."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from common import model_config
from common.model_config import WHY_REFUSED
from common.tests.model_cases import CASES
from workshop.measure.bench.bench_record import markdown_table, replace_between_markers
from workshop.measure.bench.random_weights import FAMILIES

PAGE = Path(__file__).with_name("MODELS.md")
ORACLE = "test_whole_prompts_in_one_step_give_the_logits_of_transformers"  # of test_model.py
_WINDOWS = {
    "never": "none",
    "optional": "in the layers that `layer_types` says, if `use_sliding_window`",
    "always": "in every layer, unless `sliding_window` is null",
    "pattern": "in five layers of six, or as `layer_types` says",
    "pattern of 4": "in three layers of four, or as `layer_types` says",
}
# What the other columns say, or what only spells a default.
_ELSEWHERE = {"model_type", "sliding_window", "experts", "head_dim", "own", "absent", "unread"}
_OWN = {
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
    """Of each: architecture, what is its own, windows, experts, command, cases of the oracle."""
    rows = []
    for architecture, family in model_config._FAMILIES.items():
        random = [n for n, own in FAMILIES.items() if own["architectures"] == [architecture]]
        cases = [n for n, (kind, _) in CASES.items() if kind.model_type == family.model_type]
        rows.append(
            [
                f"`{architecture}`",
                "; ".join(what_is_own(family)) or "nothing",
                windows_of(family),
                "yes" if family.experts else "none",
                ", ".join(f"`{name}`" for name in random),
                ", ".join(f"`{name}`" for name in cases),
            ]
        )
    return rows


def windows_of(family: Any) -> str:
    kind = family.sliding_window
    if kind == "pattern" and (every := family.unread.get("sliding_window_pattern")):
        kind = f"pattern of {every}"
    if kind == "always" and family.absent.get("sliding_window") is None:
        return "in every layer, if `sliding_window` says so"
    return _WINDOWS.get(kind, f"`{kind}`")


def what_is_own(family: Any) -> list[str]:
    """A field that has no sentence here is shown as it is."""
    found = []
    for field in fields(family):
        value = getattr(family, field.name)
        if value != field.default and field.name not in _ELSEWHERE:
            found.append(_OWN.get(field.name, f"`{field.name}` is {value!r}"))
    return found


def families_table() -> str:
    head = ["architecture", "its own", "windows", "experts", "random checkpoint", "cases"]
    return markdown_table(head, families(), "---")


def refused_table() -> str:
    rows = [[f"`{pattern}`", why] for pattern, why in WHY_REFUSED.items()]
    return markdown_table(["architecture", "why"], rows, "---")


def render() -> str:
    """`MODELS.md` with the tables of today."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in (("families", families_table()), ("refused", refused_table())):
        text = replace_between_markers(text, name, table)
    return text


def main(arguments: list[str] | None = None) -> None:
    if (sys.argv[1:] if arguments is None else arguments) == ["--write"]:
        PAGE.write_text(render(), encoding="utf-8")
        return
    for row in families():
        architecture, own, windows, experts, random, cases = (cell.replace("`", "") for cell in row)
        print(f"{architecture}\n  its own   {own}\n  windows   {windows}\n  experts   {experts}")
        print(f"  to try    python -m workshop.bench.random_weights {random} DIRECTORY")
        print(f"  shown by  common/test_model.py::{ORACLE}\n            cases {cases}\n")
    print("Refused by name, before a weight is read:")
    for pattern, why in WHY_REFUSED.items():
        print(f"  {pattern:25} {why}")
    print("\nAll other architectures are refused, too. What a config may say: common/MODELS.md")


if __name__ == "__main__":
    main()
