"""Patches, the table of all bugs, the page that is made of it, and the command."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workshop.practice import patches
from workshop.practice.patch_table import Bug, all_bugs, broken_lines, log_row, read_bugs
from workshop.practice.patches import main, problem_of
from workshop.practice.source_patch import (
    Patch,
    PatchError,
)
from workshop.practice.tasks.course import task_numbered

LINES = broken_lines()
NOTICED = next(bug for bug in LINES if bug.module == "block_pool")


# -- the table


@pytest.mark.parametrize("bug", all_bugs(), ids=lambda bug: f"{bug.module} {bug.symbol}")
def test_each_bug_can_be_planted_and_its_tests_are_there(bug: Bug) -> None:
    assert not problem_of(bug)
    assert bug.diff()
    assert bug.line or bug.exhibit or (bug.message and task_numbered(bug.task))


def test_a_row_of_a_step_log_must_be_there() -> None:
    title = "the budget is used up"
    row = replace(NOTICED, named_tests=(f"test_plans::test_plans[{title}]",))
    assert not problem_of(row)
    assert log_row(row.tests[0]) == ("04_scheduler/plans.txt", title)
    gone = replace(NOTICED, named_tests=("test_plans::test_plans[the budget is not used]",))
    assert "no log has the row" in problem_of(gone)


def test_a_row_is_read_with_its_continuation_lines() -> None:
    code, tests = "m C.f\n- a\n-     b\n+ c\n", "test t::u\ntest t::v\n"
    words = "line So\n    long.\ntask 1.2 Not\n    so.\n"
    bug, same_place = read_bugs(f"# 1\n\n{code}{tests}{words}\n- d\n")
    assert (same_place.name, same_place.old) == ("m C.f", "d")
    assert (bug.module, bug.symbol, bug.old, bug.new) == ("m", "C.f", "a\n    b", "c")
    assert (bug.named_tests, bug.line) == (("t::u", "t::v"), "So long.")
    assert (bug.task, bug.message, bug.exhibit) == ("1.2", "Not so.", "")
    with pytest.raises(ValueError, match=r"'tset t::u' of 'm C\.f'"):
        list(read_bugs("m C.f\n- a\ntset t::u\n"))


# -- a patch: a module of its own

SOURCE = '''\
LIMIT = 2


class Pool:
    def free(self, blocks):
        """Free them."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.give(block, limit=LIMIT)  # to the caller
            else:
                keep(
                    block,
                    "a # b",
                )
        return None

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0:
                take(block)
'''


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Writes a module `pool`, and makes a patch of it."""
    path = patches.ROOT / "02_paged_kv" / "block_pool.py"

    def make(symbol: str, old: str, new: str, source: str = SOURCE) -> Patch:
        monkeypatch.setattr(Patch, "text", lambda patch: source)
        return Patch(path.stem, symbol, old, new)

    return make


@pytest.mark.parametrize(
    ("symbol", "old", "new", "found"),
    [
        ("Pool.free", 'self.give( block,\n    limit = LIMIT )\nelse: # or\n  keep(block, "a # b")',
         "self.give(block)\nelse:\n    keep(1)",
         "                self.give(block)\n                else:\n                    keep(1)\n"),
        ("Pool.free", '        keep(block, "a # b")\nreturn None', "return 1",
         "else:\n        return 1\n"),
    ],
    ids=["line breaks, margins, comments", "distance"],
)  # fmt: skip
def test_a_patch_is_of_code_and_not_of_its_layout(
    symbol: str, old: str, new: str, found: str, place
) -> None:
    assert found in place(symbol, old, new).apply()


@pytest.mark.parametrize(
    ("symbol", "old", "words"),
    [
        ("Pool.fre", "return None", ["0 times"]),
        ("Pool.free", "take(block)", ["0 times"]),
        ("Pool.free", "block", ["times"]),
    ],
)
def test_a_patch_that_does_not_apply_names_its_search_text(
    symbol: str, old: str, words: list[str], place
) -> None:
    with pytest.raises(PatchError) as caught:
        place(symbol, old, "").apply()
    text = str(caught.value)
    assert all(word in text for word in [f"block_pool {symbol}", old, *words]), text


# -- the command


def test_the_command_lists_patches_that_do_not_apply(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = replace(NOTICED, task="")
    bugs = [good, replace(good, old="nothing of ours"), replace(good, named_tests=("test_x::y",))]
    bugs += [replace(good, named_tests=("test_block_pool::test_y",)), replace(good, new="(")]
    monkeypatch.setattr(patches, "all_bugs", lambda: bugs)
    assert main([]) == 1
    shown = capsys.readouterr().out
    assert "nothing of ours" in shown and "no module test_x" in shown and "is no Python" in shown
    assert "no test 02_paged_kv/test_block_pool.py::test_y" in shown
    assert shown.endswith("4 of 5 do not apply\n")
