"""Patches, the table of all bugs, the page that is made of it, and the command."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workshop.practice import patches
from workshop.practice.module_swap import name_of
from workshop.practice.museum.exhibits import TITLES
from workshop.practice.patch_table import Bug, all_bugs, broken_lines, log_row, read_bugs
from workshop.practice.patches import main, problem_of
from workshop.practice.source_patch import Patch, PatchError, file_of, names_in
from workshop.practice.tasks.course import task_numbered
from workshop.practice.trial import broken_copy, try_all, try_tests

LINES = broken_lines()
NOTICED = next(bug for bug in LINES if bug.module == "block_pool")


# -- the table


@pytest.mark.parametrize("bug", all_bugs(), ids=lambda bug: f"{bug.module} {bug.symbol}")
def test_each_bug_can_be_planted_and_its_tests_are_there(bug: Bug) -> None:
    assert not problem_of(bug)
    assert bug.diff()
    assert bug.line or bug.exhibit or (bug.message and task_numbered(bug.task))


def test_thirty_lines_and_some_of_all_chapters_and_the_engine() -> None:
    assert 30 <= len(LINES) <= 40, "a page that is read"
    assert list(dict.fromkeys(bug.chapter for bug in LINES)) == list(TITLES)
    assert all(len(bug.tests) >= 1 for bug in LINES)


def test_a_row_of_a_step_log_must_be_there() -> None:
    title = "the budget is used up"
    row = replace(NOTICED, named_tests=(f"test_plans::test_plans[{title}]",))
    assert not problem_of(row)
    assert log_row(row.tests[0]) == ("04_scheduler/plans.txt", title)
    gone = replace(NOTICED, named_tests=("test_plans::test_plans[the budget is not used]",))
    assert "no log has the row" in problem_of(gone)


def test_unnoticed_bugs_are_listed_in_their_order() -> None:
    """Two at the same time: parsing in two threads is a SystemError in CPython 3.11."""
    harmless = replace(NOTICED, new=NOTICED.old)
    other = "02_paged_kv/test_block_pool.py::test_a_refused_allocation_changes_nothing"
    tries = [(harmless, harmless.tests, False), (NOTICED, NOTICED.tests, False)]
    tries += [(NOTICED, (*NOTICED.tests, other), first_only) for first_only in (False, True)]
    not_noticed = f"{harmless.name}: not noticed by {', '.join(harmless.tests)}"
    one_is_not = f"{NOTICED.name}: not noticed by {other}"
    assert [text for _, text, _ in try_all(tries, jobs=2)] == [
        not_noticed,
        "",
        one_is_not,
        "",
    ]


def test_a_report_names_no_temporary_folder() -> None:
    with broken_copy(replace(NOTICED, new="raise OSError")) as swap:
        report = try_tests(NOTICED.tests, swap).report
    assert "OSError" in report and str(swap.file.parent) not in report


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


def test_an_expression_is_replaced_in_its_symbol_only(place) -> None:
    patch = place("Pool.free", "block.ref_cnt == 0", "True")
    assert patch.apply() == SOURCE.replace("block.ref_cnt == 0", "True", 1)
    assert patch.diff() == "- if block.ref_cnt == 0:\n+ if True:"


def test_neither_line_breaks_nor_margins_nor_comments_count(place) -> None:
    old = 'self.give( block,\n    limit = LIMIT )\nelse: # or\n  keep(block, "a # b")'
    applied = place("Pool.free", old, "self.give(block)\nelse:\n    keep(1)").apply()
    margin = " " * 16
    assert f"{margin}self.give(block)\n{margin}else:\n{margin}    keep(1)\n" in applied


def test_lines_keep_their_distance_from_the_old_ones_and_an_empty_one_takes_the_line(place) -> None:
    old, new = '        keep(block, "a # b")\nreturn None', "return 1"
    assert "else:\n        return 1\n" in place("Pool.free", old, new).apply()
    without = place("Pool.touch", "take(block)", "").apply()
    assert without == SOURCE.replace("                take(block)\n", "")


def test_a_comment_that_is_said_goes_too(place) -> None:
    text = place("Pool.free", "self.give(block, limit=LIMIT)  # to", "pass").apply()
    unsaid = place("Pool.free", "self.give(block, limit=LIMIT)", "pass").apply()
    assert "pass\n" in text and "pass  # to the caller\n" in unsaid


def test_a_name_of_the_top_level_is_a_symbol(place) -> None:
    assert place("LIMIT", "2", "3").apply() == SOURCE.replace("2", "3")


@pytest.mark.parametrize(
    ("symbol", "old", "words"),
    [
        (
            "Pool.fre",
            "return None",
            ["no Pool.fre any more; there is Pool.free", "in Pool.free now"],
        ),
        ("Pool.free", "take(block)", ["0 times", "stands in Pool.touch now"]),
        ("Pool.free", "if block.ref_count == 0:", ["nearest there:\n", "if block.ref_cnt == 0:"]),
        ("Pool.free", "block", ["times", "Say more of it"]),
    ],
)
def test_a_patch_that_does_not_apply_names_its_search_text_and_the_nearest_lines(
    symbol: str, old: str, words: list[str], place
) -> None:
    with pytest.raises(PatchError) as caught:
        place(symbol, old, "").apply()
    text = str(caught.value)
    assert all(word in text for word in [f"block_pool {symbol}", old, *words]), text


def test_a_module_is_found_by_its_last_name_wherever_it_lies() -> None:
    for module, file, imported in (
        ("block_pool", "02_paged_kv/block_pool.py", "block_pool"),
        ("kv_budget", "02_paged_kv/beyond/kv_budget.py", "kv_budget"),
        ("sampler", "common/sampling/sampler.py", "common.sampling.sampler"),
    ):
        assert Patch(module, "", "", "").file == file and name_of(file_of(module)) == imported
    with pytest.raises(LookupError, match="no module block_pol; there is block_pool"):
        file_of("block_pol")


def test_names_are_those_of_the_top_level() -> None:
    assert names_in(file_of("block_pool")) == {"Block", "BlockPool"}


# -- the command


def test_the_command_lists_patches_that_do_not_apply_and_applies_the_others(
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
    monkeypatch.setattr(patches, "all_bugs", lambda: [good])
    assert main(["--check", "--jobs", "1"]) == 0
    assert capsys.readouterr().out.endswith(f"{good.name}\n0 of 1 are not noticed\n")


def test_a_line_is_named_by_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "0"])
    assert f"must be in [1, {len(LINES)}]" in capsys.readouterr().err
