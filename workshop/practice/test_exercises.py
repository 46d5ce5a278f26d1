"""All exhibits and tasks: their texts in two languages, and their bugs, blanks and examples."""

from __future__ import annotations

import re

import pytest

from workshop.book.translation import CHINESE
from workshop.practice.exercise import TEXTS, Exercise
from workshop.practice.museum.exhibits import EXHIBITS
from workshop.practice.patch_table import Bug, all_bugs
from workshop.practice.patches import trials
from workshop.practice.tasks.course import TASKS, Task, blank_of
from workshop.practice.trial import broken_copy, swapped, try_tests

MAX_CPU_S = 10  # for the tests that notice a bug
EACH = pytest.mark.parametrize("one", (*EXHIBITS, *TASKS), ids=lambda one: one.english.head)


@EACH
def test_every_text_has_its_chinese(one: Exercise) -> None:
    english, chinese = one.english, one.chinese
    for word in TEXTS:
        text, translated = english.text(word), chinese.text(word)
        assert codes(text) == codes(translated), translated
        assert text == translated or CHINESE.search(translated), translated
        assert word == "write" or len(english.said[word]) == len(chinese.said[word])


def codes(text: str) -> set[str]:
    return set(re.findall("`[^`]+`", " ".join(text.split())))


@pytest.mark.sample(every=15)
@pytest.mark.parametrize("bug", all_bugs(), ids=lambda bug: bug.name)
def test_a_bug_is_noticed(bug: Bug) -> None:
    for _, tests, first_only in trials([bug]):
        with broken_copy(bug) as swap:
            run = try_tests(tests, swap, first_only=first_only, limit_s=limits.get(bug.exhibit, 60))
        assert run.failed if first_only else set(tests) <= set(run.failed), run.report
        assert run.cpu_s < MAX_CPU_S


limits = {exhibit.title: exhibit.limit_s for exhibit in EXHIBITS}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.number)
def test_the_blank_fails(task: Task) -> None:
    blank = blank_of(task).text
    with swapped(task.path, blank) as swap:
        assert try_tests(task.test_ids, swap, first_only=True).first is not None
