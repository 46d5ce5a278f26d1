"""The statements that decided a sentence of the page, for each engine that can have run.

A sentence is named by what happened ("admitted"), with a case ("finished:length"), or by a reason
to wait ("reason:budget"). Every sentence and every reason has a rule for every scheduler that
can produce it, which a test checks. The rules are in one table, `source_places.txt`:

    admitted                            the sentence
    scheduler two_phase FILE FUNCTION STATEMENT     where, and when this rule fits: see `Rule`
    overlaps yes FILE FUNCTION STATEMENT
    always FILE FUNCTION STATEMENT

`workshop/book/text_rows.py` reads such tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workshop.book.text_rows import read_rows
from workshop.watch.source_lines import Rule, SourcePlace

TABLE = Path(__file__).with_name("source_places.txt")


def read_rules(text: str) -> Iterator[Rule]:
    for row in read_rows(text, "scheduler prefix_cache policy setting overlaps windows always"):
        for word, lines in row.said.items():
            for line in lines:
                when: dict[str, Any] = {}
                if word != "always":
                    value, _, line = line.partition(" ")
                    is_switch = word in ("overlaps", "windows")
                    when = {word: value == "yes" if is_switch else value}
                yield Rule(row.head, SourcePlace(*line.split(" ", 2)), **when)


RULES = list(read_rules(TABLE.read_text(encoding="utf-8")))
