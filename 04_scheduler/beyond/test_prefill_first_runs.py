"""Statements of `beyond/PREFILL_FIRST.md` about runs hold for the runs."""

from __future__ import annotations

import re
from pathlib import Path

from prefill_first_runs import parts, six_iterations, worked_budget

PAGE = Path(__file__).with_name("PREFILL_FIRST.md")


def test_the_page_agrees_with_the_runs() -> None:
    """If it does not, copy what the run says into the page."""
    page = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"<!-- run:(\w+) -->\n(.*?)\n<!-- /run:\1 -->", page, re.S)
    assert dict(found) == parts()


def test_mixing_spares_the_decode_its_pause() -> None:
    """Section 7: five iterations instead of seven."""
    for mixing, last in ((False, 7), (True, 5)):
        runs = six_iterations(mixing, 7)
        assert [n for n, now in enumerate(runs, 1) if "a" in now.ended] == [last]


def test_the_largest_share_by_hand() -> None:
    """Question 2."""
    assert worked_budget(0.28)[1].count("CONTINUE") == 2
    assert worked_budget(0.29)[1].count("CONTINUE") == 1
