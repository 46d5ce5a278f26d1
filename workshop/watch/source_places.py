"""The functions that decided a sentence of the page, for each engine that can have run.

A sentence is named by what happened ("admitted"), with a case ("finished:length"), or by a reason
to wait ("reason:budget"). Every sentence and every reason has a rule for every scheduler that
can produce it, which a test checks. The rules are in one table, `source_places.txt`:

    computed overlaps=yes FILE::FUNCTION    the sentence, when this rule fits: see `Rule`
    FILE::FUNCTION                          the same sentence; always

`#` begins a remark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workshop.watch.source_lines import Rule, SourcePlace

TABLE = Path(__file__).with_name("source_places.txt")
_WORDS = {"yes": True, "no": False}
_LINE = re.compile(r"^(?:([\w:]+) )?(?:(\w+)=(\S+) )?(\S+\.py)::(\S+)$")


def read_rules(text: str) -> Iterator[Rule]:
    """Yield the rules. Raises `ValueError` for a line that is none."""
    sentence = ""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            if (match := _LINE.match(line)) is None:
                raise ValueError(f"{line!r} is no rule")
            name, word, value, file, function = match.groups()
            sentence = name or sentence
            when: dict[str, Any] = {word: _WORDS.get(value, value)} if word else {}
            yield Rule(sentence, SourcePlace(file, function), **when)


RULES = list(read_rules(TABLE.read_text(encoding="utf-8")))
