"""Each sentence of the page has its lines of source, and they are the right ones."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from common.engine_config import SCHEDULERS
from common.events.event_page import PAGE
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


def test_each_function_is_there_and_its_lines_are_those_of_the_file() -> None:
    for place in {rule.place for rule in RULES}:
        shown = find(place)
        assert shown is not None, f"{place.file} has no {place.function}: write its row again"
        source = (ROOT / place.file).read_text(encoding="utf-8").splitlines()
        first = shown["line"] - 1
        lines = source[first : first + len(shown["lines"])]
        assert [line.strip() for line in lines] == [line.strip() for line in shown["lines"]]
        assert place.function.split(".")[-1] in shown["lines"][0]
        ast.parse("\n".join(shown["lines"]))  # the whole function, and no more


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_kind_and_every_reason_has_a_place(
    scheduler: str, prefix_cache: str, policy: str
) -> None:
    ran = {"scheduler": scheduler, "prefix_cache": prefix_cache, "policy": policy}
    ran |= {"setting": None, "overlaps": False, "windows": False}
    expected = [*SENTENCES, *(f"reason:{reason}" for reason in REASONS)]
    if prefix_cache == "hash":
        expected.remove("split")
    has_place = {
        rule.sentence
        for rule in RULES
        if all(getattr(rule, name) in (None, value) for name, value in ran.items())
    }
    missing = set(expected) - has_place
    assert missing <= NEVER[scheduler], f"no lines for {sorted(missing - NEVER[scheduler])}"


def test_the_page_uses_every_sentence() -> None:
    """That each sentence of it has lines is seen in the browser (`test_browser_words.py`)."""
    script = (PAGE / "words_sentences.js").read_text(encoding="utf-8")
    for sentence in SENTENCES:
        assert re.search(rf'["`]{sentence.partition(":")[0]}["`:.$]', script), sentence


def test_the_policy_that_ran_decides_which_lines_are_shown() -> None:
    by_policy = {rule.policy: rule.place.function for rule in RULES if rule.sentence == "queue"}
    assert by_policy["priority"] == "PriorityPolicy.key"
    assert by_policy["lpm"] == by_policy.pop("lpm-first") == "LongestPrefixMatch.arrange"
    assert len(set(by_policy.values())) == len(by_policy)


def test_a_function_that_is_gone_has_no_link_and_the_others_are_found_where_they_moved(
    tmp_path: Path,
) -> None:
    text = "class C:\n    def f(self, a):\n        return a\n"
    rules = [Rule("x", SourcePlace("m.py", name)) for name in ("C.f", "C.gone", "C.f")]
    rules.append(Rule("x", SourcePlace("gone.py", "C.f")))
    (tmp_path / "m.py").write_text("# a line\n" * 7 + text)
    data = source_lines(rules, tmp_path)
    lines = ["def f(self, a):", "    return a"]
    assert data["places"] == [
        {"file": "m.py", "function": "C.f", "line": 9, "lines": lines},
        None,
        None,
    ]
    assert [rule["place"] for rule in data["rules"]] == [0, 1, 0, 2]


def test_functions_are_found_in_a_wheel_where_modules_lie_side_by_side(tmp_path: Path) -> None:
    for place in {rule.place for rule in RULES}:
        in_common = place.file.startswith("common/")
        path = tmp_path / (place.file if in_common else Path(place.file).name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((ROOT / place.file).read_text(encoding="utf-8"), encoding="utf-8")
    assert source_lines(RULES, tmp_path) == source_lines(RULES)
