"""The tables of `common/models/MODELS.md`: `python -m workshop.models_page` updates them.

`common/models/__main__.py` prints the columns that the engine decides. This module adds
the cases in which a test compares a family's logits with those of `transformers`."""

from __future__ import annotations

from pathlib import Path

from common.models.__main__ import families
from common.models.model_config import FAMILIES, REFUSAL_REASONS
from common.tests.model_cases import CASES
from workshop.measure.bench.bench_record import markdown_table, replace_between_markers

PAGE = Path(__file__).parents[2] / "common" / "models" / "MODELS.md"


def rows() -> list[list[str]]:
    """A row for each family: architecture, special settings, windows, experts, cases."""
    found = []
    for architecture, *features in families():
        model_type = FAMILIES[architecture].model_type
        cases = [f"`{name}`" for name, (kind, _) in CASES.items() if kind.model_type == model_type]
        found.append([f"`{architecture}`", *features, ", ".join(cases)])
    return found


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
