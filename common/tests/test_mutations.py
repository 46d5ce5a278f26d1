from __future__ import annotations

import ast

import pytest

from common.tests.mutations import (
    MUTATIONS,
    PAGE,
    ROOT,
    Mutation,
    copy_of_the_repository,
    is_caught,
    passes,
    render,
)
from common.tools.source_patch import names_in

_QUICK = ("/block_pool.py", "/radix_tree.py", "/chunk_policy.py")
SAMPLE = tuple(mutation for mutation in MUTATIONS if mutation.file.endswith(_QUICK))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.file)
def test_each_line_stands_in_its_file_once(mutation: Mutation) -> None:
    ast.parse(mutation.apply())  # if it raises, the code has moved: say it anew in mutations.py


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.file)
def test_each_named_test_is_there(mutation: Mutation) -> None:
    file, _, name = mutation.test.partition("::")
    assert name in names_in(file)


def test_the_page_is_made_from_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == render(), "run: python -m common.tests.mutations --write"


def test_thirty_lines_and_some_of_all_chapters_and_the_engine() -> None:
    assert 30 <= len(MUTATIONS) <= 40, "a page that is read"
    assert {m.file.partition("/")[0] for m in MUTATIONS} == {
        path.name for path in ROOT.glob("[0-9][0-9]_*")
    } | {"common"}


def test_three_lines_are_broken_and_noticed() -> None:
    with copy_of_the_repository() as copy:
        assert passes(copy, [mutation.test for mutation in SAMPLE]), "not broken"
        assert [m.file for m in SAMPLE if not is_caught(copy, m)] == []


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.file)
def test_every_line_is_broken_and_noticed(mutation: Mutation) -> None:
    with copy_of_the_repository() as copy:
        assert is_caught(copy, mutation)
