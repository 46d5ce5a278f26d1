"""The private words that are left are those of `words_left.tsv`: none has more or fewer."""

from __future__ import annotations

import io
import subprocess
import tokenize
from pathlib import Path

import pytest

from common.tests.house import House
from workshop.book import words
from workshop.book.private_words import KINDS, Row, comments, hits_of, vocabulary
from workshop.book.words import complaints, count, lowered, read_numbers, search, write_numbers

HOUSE = House(words.ROOT)  # git is asked here: a test that starts a process is left out of `check`
FILE_OF = {"words": "a.md", "docstrings": "a.py", "names": "a.py"}
ROWS = [(kind, row) for kind in KINDS for row in vocabulary(kind)]


def found_in(name: str, source: str) -> list[tuple[str, int, str]]:
    return [(hit.kind, hit.line, hit.found) for hit in hits_of(name, source)[0]]


def test_every_file_has_as_many_as_the_table_says() -> None:
    table = read_numbers(words.LEFT.read_text(encoding="utf-8"))
    broken = list(complaints(table, search(HOUSE)))
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(("kind", "row"), ROWS, ids=[row.example for _, row in ROWS])
def test_each_expression_finds_its_example(kind: str, row: Row) -> None:
    source = f'"""{row.example}"""\n' if kind == "docstrings" else f"{row.example}\n"
    assert (kind, row.instead) in {(h.kind, h.instead) for h in hits_of(FILE_OF[kind], source)[0]}


def test_docstrings_comments_and_bound_names_are_searched() -> None:
    source = '''"""Nobody waits here for

that which lasts for
ever."""

x = 1  # under way

# It waits at the rear. Everything
# is computed anew: `seats`, my_guess and x.guess are code.
def judged(seat, *, _cargo=judge):
    """What it is."""
    own, self.where = "anew", seat


def test_nobody_waits(): ...
'''
    assert found_in("a.py", source) == [
        ("words", 1, "Nobody"),
        ("docstrings", 1, "Nobody ..."),
        ("words", 3, "for ever"),
        ("words", 6, "under way"),
        ("words", 9, "anew"),
        ("names", 10, "def judged"),
        ("names", 10, "arg seat"),
        ("names", 10, "arg _cargo"),
        ("words", 11, "What it"),
        ("docstrings", 11, "What ..."),
        ("names", 12, "name own"),
        ("names", 12, "name where"),
    ]


def test_comments_are_those_of_tokenize() -> None:
    """Beside every kind of string, and in none."""
    source = (
        'a = "#\\"#" + \'"#\' # b\n\nc = """x\n# y \\""" \'#"""  # d\ne = r"\\\\" + f"#{a}"# f\n'
    )
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    expected = [(*t.start, t.string) for t in found if t.type == tokenize.COMMENT]
    assert list(comments(source)) == expected
    assert [text for *_, text in expected] == ["# b", "# d", "# f"]


def test_pages_and_tables_are_searched_without_their_code() -> None:
    page = "# A seat\n\n```\nguess\n```\n* [a](anew.md) `rung`\n* it can\n  not\n"
    assert found_in("a.md", page) == [("words", 1, "seat"), ("words", 7, "can not")]
    table = "plugin Plugin.judged\n- if guess:\n+     guess\nseen What is\n    anew\n| guess\n"
    assert found_in("a.txt", table) == [("words", 4, "What is"), ("words", 5, "anew")]


def test_an_allowed_context_is_no_hit() -> None:
    page = "There is no token. A server behind a proxy. Those users who wait. A piece of text."
    assert not found_in("a.md", page)
    assert found_in("a.md", "It is no token. The block behind a chunk.")


def test_more_and_fewer_are_both_reported(tmp_path: Path) -> None:
    for name, source in {"a.md": "Nobody\nwaits anew.\n", "b.md": "A seat.\n", "c.md": ""}.items():
        (tmp_path / name).write_text(source)
    found = search(House(tmp_path))
    assert not list(complaints(read_numbers(write_numbers(count(found))), found))
    table = read_numbers("# x\na.md\t1\t0\t0\nb.md\t2\t0\t0\ngone.py\t0\t0\t1\n")
    assert list(complaints(table, found)) == [
        "a.md: 2 private words, and 1 may be left. Write others:",
        "  a.md:1: 'Nobody' -> no request, unused, none",
        "  a.md:2: 'anew' -> again, from scratch",
        "b.md: 1 words and not 2: python -m workshop.words --write",
        "gone.py: 0 names and not 1: python -m workshop.words --write",
    ]


@pytest.mark.parametrize(
    ("old", "now", "known", "refused"),
    [
        ("a=3 b=1", "a=2 b=1", "a b", ""),
        ("a=3 b=1", "a=3 b=2", "a b", "b"),
        ("a=3 b=1", "a=2 b=2", "a b", "b"),  # what one lost, another one may not have
        ("a=3", "a=0 b=1", "a b", "b"),  # nor one that had none
        ("a=3", "b=3", "a", ""),  # moved
        ("a=3", "b=4", "a", "b"),
        ("a=3", "a=1 b=2", "a", ""),  # split
        ("a=3 b=1", "b=4", "a b", ""),  # merged
        ("a=3 b=1", "b=5", "a b", "b"),
        ("a=3 b=1", "b=2 c=3", "a b", "c"),  # more than there was
        ("a=3 b=1", "a=3 b=1 c=1", "a b", "c"),
    ],
)
def test_only_files_that_moved_take_numbers_over(
    old: str, now: str, known: str, refused: str
) -> None:
    before, after = ({k: int(v) for k, v in (x.split("=") for x in s.split())} for s in (old, now))
    written = lowered(before, after, known.split())
    assert written == {**after, **{file: before.get(file, 0) for file in refused.split()}}
    assert sum(written.values()) <= sum(before.values())


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(words, "ROOT", tmp_path)
    monkeypatch.setattr(words, "LEFT", tmp_path / "left.tsv")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def commit(folder: Path) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    subprocess.run(["git", *identity, "commit", "-q", "-m", "x"], cwd=folder, check=True)


def test_write_follows_a_move_and_refuses_a_rise(repository: Path) -> None:
    (repository / "a.md").write_text("Nobody waits anew.\n")
    (repository / "b.md").write_text("A seat.\n")
    commit(repository)
    assert words.main(["--write"]) == 0
    first = words.LEFT.read_text()
    assert first.endswith("a.md\t2\t0\t0\nb.md\t1\t0\t0\n")
    commit(repository)
    (repository / "a.md").rename(repository / "moved.md")
    commit(repository)  # the move is a commit of its own, and the table comes later
    (repository / "b.md").write_text("A seat is a seat.\n")
    assert words.main(["--write"]) == 1
    assert words.LEFT.read_text() == first.replace(
        "a.md\t2\t0\t0\nb.md\t1\t0\t0", "b.md\t1\t0\t0\nmoved.md\t2\t0\t0"
    )
    (repository / "b.md").write_text("A slot.\n")
    assert words.main(["--write"]) == 0
    assert "b.md" not in words.LEFT.read_text()


def test_facts_that_are_gone_are_listed(repository: Path) -> None:
    page = "Trap 7, and again Trap\n7; Trap 71 (arXiv 2309.06180).\n"
    (repository / "a.md").write_text(page)
    code = (
        'def f():\n    """Stop. Raises `ValueError` if it fails."""\n\n\ndef g():\n    """Go."""\n'
    )
    (repository / "a.py").write_text(code)
    commit(repository)
    (repository / "a.md").write_text("Trap 7; arXiv 2309.06181\n")
    (repository / "a.py").unlink()
    (repository / "b.py").write_text('def f():\n    """Stop."""\n')
    assert words.removed("HEAD") == [
        "Trap 7: 2 -> 1",
        "Trap 71: 1 -> 0",
        "arXiv 2309.06180: 1 -> 0",
        "docstrings: 2 -> 1",
        "f raises ValueError: 1 -> 0",
    ]
