"""Each sentence of the page has its lines of source, and they are the right ones."""

from __future__ import annotations

import ast
from itertools import product
from pathlib import Path

from common.engine_config import SCHEDULERS
from common.events.frames import REASONS
from sglang_policies import POLICIES
from workshop.watch.source_lines import ROOT, Rule, SourcePlace, find, source_lines
from workshop.watch.source_places import RULES

# Sentences that an engine cannot produce: chapter 1's scheduler neither preempts nor sorts; decodes
# have their own turn where a batch is a prefill or a decode.
NEVER = {
    "fcfs": {"preempted", "queue"}
    | {f"reason:{reason}" for reason in ("preempting", "turn", "enough", "constraint")},
    "two_phase": {"reason:turn"},
    "prefill_first": set(),
}
SENTENCES = (
    *("run", "snapshot", "arrived", "queue", "admitted", "preempted", "planned", "computed"),
    *("finished:stop", "finished:length", "finished:abort", "finished:error", "cut", "failed"),
    *("taken", "shared", "freed", "table", "matched", "published", "split", "evicted"),
    *("load_begun", "loaded", "load_ended", "chunk", "drafts", "discarded"),
)


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


def test_every_kind_and_every_reason_has_a_place_in_every_engine() -> None:
    """A sentence of the page without one is seen in the browser."""
    expected = {*SENTENCES, *(f"reason:{reason}" for reason in REASONS)}
    for scheduler, cache, policy in product(SCHEDULERS, ("hash", "radix"), POLICIES):
        ran = {"scheduler": scheduler, "prefix_cache": cache, "policy": policy}
        ran |= {"setting": None, "overlaps": False, "windows": False}
        found = {
            rule.sentence
            for rule in RULES
            if all(getattr(rule, name) in (None, value) for name, value in ran.items())
        }
        missing = expected - found - ({"split"} if cache == "hash" else set())
        assert missing <= NEVER[scheduler], (ran, missing)


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
