"""Patches, the table of all bugs, the page that is made of it, and the command."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from workshop.practice.patch_table import Bug, all_bugs, broken_lines, read_bugs
from workshop.practice.patches import problem_of
from workshop.practice.renames import renamed
from workshop.practice.source_patch import (
    Patch,
    PatchError,
    definitions,
    regions,
)
from workshop.practice.tasks.course import task_numbered

LINES = broken_lines()
NOTICED = next(bug for bug in LINES if bug.module == "block_pool")


@pytest.mark.parametrize("bug", all_bugs(), ids=lambda bug: f"{bug.module} {bug.symbol}")
def test_each_bug_can_be_planted_and_its_tests_are_there(bug: Bug) -> None:
    assert not problem_of(bug)
    assert bug.diff()
    assert bug.line or bug.exhibit or (bug.message and task_numbered(bug.task))


def test_a_row_of_a_step_log_must_be_there() -> None:
    title = "the budget is used up"
    row = replace(NOTICED, named_tests=(f"test_plans::test_plans[{title}]",))
    assert not problem_of(row)
    gone = replace(NOTICED, named_tests=("test_plans::test_plans[the budget is not used]",))
    assert "no log has the row" in problem_of(gone)


def test_a_row_that_says_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'tset t::u' of 'm C\.f'"):
        list(read_bugs("m C.f\n- a\ntset t::u\n"))


# -- names that change


def locals_of(text: str, symbol: str) -> dict[str, str]:
    """A new name for each parameter and variable of a function."""
    functions = [node for name, node in definitions(ast.parse(text)) if name == symbol]
    nodes = [node for f in functions if isinstance(f, ast.FunctionDef) for node in ast.walk(f)]
    names = {node.arg for node in nodes if isinstance(node, ast.arg)}
    names |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return {name: f"new_{name}" for name in names - {"self"}}


def with_names_in(text: str, symbol: str, names: dict[str, str]) -> str:
    for first, last in reversed(regions(text, symbol)):
        text = text[:first] + renamed(text[first:last], names) + text[last:]
    return text


UNKNOWN = {"admitted", "lens", "time"}  # in new code, and in no old code or parameters


@pytest.mark.parametrize("place", sorted({(b.module, b.symbol) for b in all_bugs()}), ids=" ".join)
def test_a_bug_can_be_planted_where_every_name_has_changed(
    place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bugs = [bug for bug in all_bugs() if (bug.module, bug.symbol) == place]
    text, symbol = bugs[0].text(), bugs[0].symbol
    names = {old: new for old, new in locals_of(text, symbol).items() if old not in UNKNOWN}
    expected = [with_names_in(bug.apply(), symbol, names) for bug in bugs]
    monkeypatch.setattr(Patch, "text", lambda patch: with_names_in(text, symbol, names))
    assert [bug.apply() for bug in bugs] == expected


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


LAYOUTS = [  # symbol, old, new, and what stands there then
    (
        "Pool.free",
        'self.give( block,\n    limit = LIMIT )\nelse: # or\n  keep(block, "a # b")',
        "self.give(block)\nelse:\n    keep(1)",
        "                self.give(block)\n                else:\n                    keep(1)\n",
    ),
    (
        "Pool.free",
        '        keep(block, "a # b")\nreturn None',
        "return 1",
        "else:\n        return 1\n",
    ),
]
NOWHERE = [  # symbol, old, and what is said
    ("Pool.fre", "return None", "0 times"),
    ("Pool.free", "take(block)", "0 times"),
    ("Pool.free", "block", "times"),
]


def test_a_patch_is_of_code_and_one_that_does_not_apply_names_its_search_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Patch, "text", lambda patch: SOURCE)
    for symbol, old, new, found in LAYOUTS:
        assert found in Patch("block_pool", symbol, old, new).apply()
    for symbol, old, words in NOWHERE:
        with pytest.raises(PatchError) as caught:
            Patch("block_pool", symbol, old, "").apply()
        assert all(word in str(caught.value) for word in (f"block_pool {symbol}", old, words))
