"""The texts point at what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.tests.house import House

ROOT = Path(__file__).resolve().parents[2]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]+)[^)\s]*\)")
FILE = re.compile(r"`([\w/]+\.(?:py|md))(?:::\w+)?`")
# Where a reader looks for a file by its name.
WAYS_IN = ["README.md", "GLOSSARY.md", "CONTRIBUTING.md", "common/README.md"]


def broken_links(text: Path) -> list[str]:
    found = LINK.findall(FENCED.sub("", text.read_text(encoding="utf-8")))
    paths = [link for link in found if "://" not in link]
    return [path for path in paths if not (text.parent / path).exists()]


def unknown_files(text: Path, known: list[str]) -> list[str]:
    """Names in backticks that end no path of the repository: `runner/model_runner.py` ends one."""
    names = set(FILE.findall(FENCED.sub("", text.read_text(encoding="utf-8"))))
    return sorted(n for n in names if not any(f"/{path}".endswith(f"/{n}") for path in known))


def test_every_link_leads_to_a_file() -> None:
    house = House(ROOT)
    texts = [path for path in house.files if path.suffix == ".md"]
    broken = {house.name(text): broken_links(text) for text in texts}
    assert not {name: links for name, links in broken.items() if links}
    assert len(texts) > 10


@pytest.mark.parametrize("name", WAYS_IN)
def test_every_file_that_is_named_exists(name: str) -> None:
    house = House(ROOT)
    assert not unknown_files(ROOT / name, [house.name(path) for path in house.files])


def test_what_leads_nowhere_is_found(tmp_path: Path) -> None:
    text = tmp_path / "a.md"
    text.write_text(
        "[x](b.md#part) [y](a.md#top) [z](https://a.com) `gone.py` `here.py` `far/here.py`\n"
        "```\n[w](c.md) `lost.py`\n```\n"
    )
    assert broken_links(text) == ["b.md"]
    assert unknown_files(text, ["room/here.py"]) == ["far/here.py", "gone.py"]
