"""Derived text is as `make sync` leaves it, and code and numbers are carried over."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from workshop.book import sync
from workshop.book.sync import changed_since, commands_for, in_step
from workshop.book.translation import sections


def test_there_is_nothing_to_renew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that can be renewed without running code: quotations, the museum, rooms, the course.
    Tables, notebooks and Chinese pages have their own tests."""
    stale: list[Path] = []

    def compare(page: Path, text: str) -> None:
        if page.read_text(encoding="utf-8") != text:
            stale.append(page)

    monkeypatch.setattr(sync, "_write", compare)
    assert list(sync.renew_pages()) == []
    assert stale == [], "run: make sync"


ENGLISH = """# A page

Words.

```python file=a.py symbol=f
x = {code}
```

| name | tok/s |
|---|---:|
| one | {n} of 20 |
| two | {m}, **8** |

<!-- table:made -->
By `{command}`, 8 of {m} s.
<!-- /table:made -->
"""
CHINESE = """# 一页
<!-- en: {digest} -->

文字。

```python file=a.py symbol=f
x = 1
```

| 名字 | tok/s |
|---|---:|
| 一 | 20 里的 5 |
| 二 | 7，**8** |

由 `make a` 生成，7 秒里的 8 秒。
"""
BEFORE = ENGLISH.format(code=1, n=5, m=7, command="make a")


def chinese(english: str) -> str:
    return CHINESE.format(digest=sections(english)[0].digest)


def test_code_and_numbers_are_carried_over_and_the_section_stays_in_step() -> None:
    after = ENGLISH.format(code=2, n=6, m="7.5", command="make b")
    found = in_step(BEFORE, after, chinese(BEFORE))
    expected = chinese(after)
    for old, new in (("x = 1", "x = 2"), ("的 5", "的 6"), ("7，", "7.5，")):
        expected = expected.replace(old, new)
    assert found == expected.replace("make a", "make b").replace("7 秒", "7.5 秒")
    assert in_step(after, after, found) == found


@pytest.mark.parametrize("has_it", [True, False])
def test_a_name_in_backticks_is_carried_over_if_both_languages_have_it(has_it: bool) -> None:
    before, after = (BEFORE.replace("Words.", f"Words of `{name}`.") for name in ("old", "new"))
    page = chinese(before).replace("文字", "`old` 的文字" if has_it else "文字")
    found = in_step(before, after, page)
    assert (found == page) != has_it
    if has_it:
        assert found == chinese(after).replace("文字", "`new` 的文字")


def test_what_wants_a_reader_is_left_to_one() -> None:
    page = chinese(BEFORE)
    words = BEFORE.replace("Words.", "Other words.").replace("x = 1", "x = 2")
    assert in_step(BEFORE, words, page) == page.replace("x = 1", "x = 2")  # the digest is as it was
    assert in_step(BEFORE, f"{BEFORE}\n## More\n", page) == page
    block = "\n```\nmake x  # {}\n```\n"  # with Chinese words
    english, theirs = BEFORE + block.format("words"), page + block.format("话")
    assert in_step(english, english.replace("make x", "make y"), theirs).endswith(
        block.format("话")
    )
    stale = CHINESE.format(digest="0" * 12)
    assert "0" * 12 in in_step(BEFORE, BEFORE.replace("x = 1", "x = 2"), stale)


def test_tables_are_made_where_a_record_or_its_script_changed() -> None:
    plot = ["-m", "workshop.plot_batching", "--tables"]
    changes = {
        "README.md": [],
        "plot_batching.py": [plot],
        "records/batching.json": [plot],
        "bench/records/a.json": commands_for(["workshop/measure/bench/records/b.json"], False),
    }
    assert {n: commands_for([f"workshop/measure/{n}"], False) for n in changes} == changes
    assert changes["bench/records/a.json"][0] == ["-m", "workshop.bench", "--write-readme"]
    every = commands_for([], True)
    assert every[-1] == ["-m", "workshop.watch", "--stills"] and len(every) > 10
    assert all(find_spec(name) for _, name, *_ in every)


def test_changes_are_files_that_git_has_otherwise_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "ROOT", tmp_path)
    assert changed_since("HEAD") == []
    (tmp_path / "kept").touch()
    (tmp_path / "other").touch()
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "other").write_text("x")
    (tmp_path / "new").touch()
    assert changed_since("HEAD") == ["other", "new"]
