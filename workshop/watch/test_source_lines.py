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
from workshop.watch.source_lines import (
    MAX_LINES,
    MIN_LINES,
    ROOT,
    SourcePlace,
    find,
    source_lines,
)
from workshop.watch.source_places import RULES

PLACES = sorted({rule.place for rule in RULES}, key=lambda p: (p.file, p.function, p.statement))

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


@pytest.mark.parametrize("place", PLACES, ids=lambda p: f"{p.function}: {p.statement}")
def test_each_place_is_there_once_and_its_excerpt_is_the_file(place: SourcePlace) -> None:
    excerpt = find(place)
    assert MIN_LINES <= len(excerpt.lines) <= MAX_LINES
    source = (ROOT / place.file).read_text(encoding="utf-8").splitlines()
    shown = source[excerpt.first - 1 : excerpt.first - 1 + len(excerpt.lines)]
    assert [line.strip() for line in shown] == [line.strip() for line in excerpt.lines]
    assert excerpt.first <= excerpt.line <= excerpt.end < excerpt.first + len(excerpt.lines)
    statement = "\n".join(source[excerpt.line - 1 : excerpt.end])
    # Quotes and line breaks are `ast.unparse`'s own.
    assert re.sub(r"\W", "", statement).startswith(re.sub(r"\W", "", place.statement))


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


def test_the_page_gets_each_place_once_and_in_range() -> None:
    data = source_lines(RULES)
    assert len(data["rules"]) == len(RULES)
    assert {rule["place"] for rule in data["rules"]} == set(range(len(data["places"])))
    for place in data["places"]:
        assert not place["file"].startswith("/"), "a path of this machine"
        ast.parse((ROOT / place["file"]).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            ("m.py", "f", "return 3"),
            "f of m.py must have one statement that begins with 'return 3', got 0",
        ),
        (("m.py", "f", "x = "), "f of m.py must have one statement"),
        (("m.py", "g", "return"), "m.py must have one g, got 0"),
        (("m.py", "C.h", "pass"), "m.py must have one C.h, got 2"),
    ],
)
def test_a_missing_or_ambiguous_place_is_refused(
    place: tuple[str, str, str], message: str, tmp_path: Path
) -> None:
    text = "def f():\n    x = 1\n    x = 2\n    return x\n"
    text += "class C:\n    def h(self): pass\n    def h(self): pass\n"
    (tmp_path / "m.py").write_text(text)
    with pytest.raises(LookupError, match=re.escape(message)):
        find(SourcePlace(*place), tmp_path)


def test_a_place_is_found_wherever_its_function_has_moved(tmp_path: Path) -> None:
    text = "class C:\n    def f(self, a):\n        if a:\n            return 1\n        return 2\n"
    for shift in (0, 7):
        (tmp_path / f"m{shift}.py").write_text("# a line\n" * shift + text)
        excerpt = find(SourcePlace(f"m{shift}.py", "C.f", "if a"), tmp_path)
        assert (excerpt.line, excerpt.end) == (3 + shift, 4 + shift)
        assert "if a:" in excerpt.lines[excerpt.line - excerpt.first]


def test_places_are_found_in_a_wheel_where_modules_lie_side_by_side(tmp_path: Path) -> None:
    for place in PLACES:
        in_common = place.file.startswith("common/")
        path = tmp_path / (place.file if in_common else Path(place.file).name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((ROOT / place.file).read_text(encoding="utf-8"), encoding="utf-8")
    assert source_lines(RULES, tmp_path) == source_lines(RULES)
