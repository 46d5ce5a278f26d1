"""One list says what to read, and in which order: the tables of `COURSE.md`."""

from __future__ import annotations

import pytest

from common.workshop.tasks.reading import (
    ROOT,
    derived,
    files_of_evenings,
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
    files = ", ".join(f"`{name}`" for name in files_of_evenings()[2])
    other = "| [common](common/README.md) | all | 9 | `llm.py` | bench |\n"
    assert with_map(row + other) == row.replace("`lost.py`", files) + other
    assert with_map(row) != row
