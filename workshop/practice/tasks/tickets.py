"""The incident tickets of `INCIDENTS.md`, two an evening, as `make task` lists them."""

from __future__ import annotations

import re
from pathlib import Path

from workshop.book.text_rows import is_chinese

PAGE = Path(__file__).parents[3] / "INCIDENTS.md"
PAGES = (PAGE, PAGE.with_suffix(".zh.md"))
_HEADING = re.compile(r"^### (?:Ticket |工单 )(\d+)(?:\. |：)(.+)$", re.MULTILINE)


def read_tickets(page: Path) -> dict[int, str]:
    """Return the title of each ticket of a page, by number."""
    found = _HEADING.findall(page.read_text(encoding="utf-8"))
    return {int(number): title for number, title in found}


def tickets_of_evening(evening: int) -> list[tuple[int, str]]:
    """Return number and title of an evening's two tickets, in the language of the terminal."""
    titles = read_tickets(PAGES[is_chinese()])
    return [(number, titles[number]) for number in (2 * evening - 1, 2 * evening)]
