"""Each sentence of the page has its lines of source, and they are the right ones."""

from __future__ import annotations

import ast
from pathlib import Path

from workshop.watch.source_lines import ROOT, RULES, Rule, SourcePlace, find, source_lines


def test_each_function_is_there_and_its_lines_are_those_of_the_file(tmp_path: Path) -> None:
    """Also in a wheel, where modules lie side by side."""
    for place in {rule.place for rule in RULES}:
        shown = find(place)
        assert shown is not None, f"{place.file} has no {place.function}: write its row again"
        text = (ROOT / place.file).read_text(encoding="utf-8")
        lines = text.splitlines()[shown["line"] - 1 :]
        assert all(a.strip() == b.strip() for a, b in zip(shown["lines"], lines))
        assert place.function.split(".")[-1] in shown["lines"][0]
        ast.parse("\n".join(shown["lines"]))  # the whole function, and no more
        is_flat = not place.file.startswith("common/")
        path = tmp_path / (Path(place.file).name if is_flat else place.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert source_lines(RULES, tmp_path) == source_lines(RULES)


def test_a_function_that_is_gone_has_no_link_and_the_others_are_found_where_they_moved(
    tmp_path: Path,
) -> None:
    text = "class C:\n    def f(self, a):\n        return a\n"
    rules = [Rule("x", SourcePlace("m.py", name)) for name in ("C.f", "C.gone", "C.f")]
    rules.append(Rule("x", SourcePlace("gone.py", "C.f")))
    (tmp_path / "m.py").write_text("# a line\n" * 7 + text)
    data = source_lines(rules, tmp_path)
    lines = ["def f(self, a):", "    return a"]
    place = {"file": "m.py", "function": "C.f", "line": 9, "lines": lines}
    assert data["places"] == [place, None, None]
    assert [rule["place"] for rule in data["rules"]] == [0, 1, 0, 2]
