"""Every exhibit, looked at: the symptom is there with the bug, and the named tests fail."""

from __future__ import annotations

import pytest

from workshop.practice.museum.exhibit import Exhibit
from workshop.practice.museum.hall import EXHIBITS
from workshop.practice.trial import NEVER_ENDS, broken_copy, try_tests

MAX_CPU_S = 10  # for the tests of an exhibit


@pytest.mark.sample(every=15, first=7)
@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda e: e.title)
def test_an_exhibit_shows_its_symptom_and_is_caught(exhibit: Exhibit) -> None:
    assert exhibit.show() == exhibit.right
    with broken_copy(exhibit.patch) as swap:
        assert exhibit.show(swap) == exhibit.wrong
        run = try_tests(exhibit.tests, swap, limit_s=exhibit.limit_s(swap))
    assert [test for test in exhibit.tests if test not in run.failed] == [], run.report
    assert run.cpu_s < MAX_CPU_S


def test_the_named_tests_pass_without_the_bug() -> None:
    """Of one exhibit; those of all are tests of this repository, and run as such."""
    run = try_tests(EXHIBITS[0].tests)
    assert run.failed == () and "1 passed" in run.report


def test_one_does_not_end_and_is_stopped() -> None:
    assert [exhibit.title for exhibit in EXHIBITS if exhibit.wrong == NEVER_ENDS]
