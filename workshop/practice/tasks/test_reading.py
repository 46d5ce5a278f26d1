"""One list says what to read, and in which order: the tables of `COURSE.md`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from workshop.book.path import chapter_roots, count_lines, measure_default
from workshop.practice.tasks.reading import (
    ROOT,
    derived,
    files_of_evenings,
    paths_of_evenings,
    sums,
    with_head,
    with_map,
)

HEAD = """# A

First:

1. `a.py`: one
2. `b.py`: two

The rest:

* `c.py`: three
* `d.py`: four

## 1. Why

* `c.py`: is not touched
"""


def test_every_evening_begins_with_the_small_file_and_names_each_file_once() -> None:
    files = files_of_evenings()
    assert list(files) == [1, 2, 3, 4, 5, 6]
    for number, names in files.items():
        (chapter,) = ROOT.glob(f"0{number}_*")
        assert len(names) == len(set(names)) >= 4
        assert (chapter / names[0]).is_file() and names[0].startswith("small_")


def test_pages_follow_it() -> None:
    pages = {page: text for page, text in derived() if page.read_text(encoding="utf-8") != text}
    assert not pages, "run: make sync"
    assert len(list(derived())) == 2 + 2 * (1 + 6)


def test_a_head_follows_its_evening() -> None:
    assert with_head(HEAD, ["a.py", "b.py"]) == HEAD
    moved = with_head(HEAD, ["d.py", "other.py", "a.py"])
    assert (
        "1. `d.py`: four\n2. `a.py`: one\n\nThe rest:\n\n* `b.py`: two\n* `c.py`: three\n" in moved
    )
    assert moved.partition("## 1.")[2] == HEAD.partition("## 1.")[2]
    with pytest.raises(AssertionError, match="1 lists"):
        with_head(HEAD.replace("* `c.py`: three\n* `d.py`: four\n", ""), ["a.py"])


def test_the_map_follows_its_evening() -> None:
    row = "| 2 [paged KV](02_paged_kv/README.md) | blocks | 2.5 | `lost.py` | forks |\n"
    paths = paths_of_evenings()[2]
    assert [Path(path).name for path in paths] == files_of_evenings()[2]
    files = ", ".join(f"[`{Path(path).name}`]({path})" for path in paths)
    other = "| [common](common/README.md) | all | 9 | `llm.py` | bench |\n"
    assert with_map(row + other) == row.replace("`lost.py`", files) + other
    assert with_map(row) != row


def minutes(text: str, num_lines: int) -> float:
    """At 200 words and 10 lines a minute."""
    return len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split()) / 200 + num_lines / 10


def test_hours_and_minutes_are_counted_by_one_rule() -> None:
    """In half hours, a chapter's text and root, or what `LLM()` loads of the engine; and the 65
    minutes of an evening are its sections 1 to 4 and its table."""
    lines = {name: size.num_lines for name, size in chapter_roots().items()}
    engine = (name for name in measure_default().loaded if name.startswith("common/"))
    lines["common"] = sum(count_lines(ROOT / name) for name in engine)
    rows = re.findall(
        r"^\| (?:\d )?\[.*\]\((\w+)/README.md\) \|[^|]+\| ([\d.]+) \|", read("README.md"), re.M
    )
    assert [name for name, _ in rows] == sorted(lines)
    for name, hours in rows:
        assert float(hours) == round(minutes(read(f"{name}/README.md"), lines[name]) / 30) / 2, name
    course = read("COURSE.md")
    parts = [read(f"{name}/README.md").partition("\n## 1.")[2] for name in sorted(chapter_roots())]
    evenings = [
        minutes(part.partition("\n## 5.")[0], num)
        for part, num in zip(parts, sums(course), strict=True)
    ]
    (max_lines,) = map(int, re.findall(r"^\| 3 \| read \| (\d+) \|", course, re.M))
    assert max_lines - 5 < max(evenings) <= max_lines


def read(name: str) -> str:
    """Without comments, which a reader does not see."""
    return re.sub(r"<!--.*?-->", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)
