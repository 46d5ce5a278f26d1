"""All exhibits, from one table, `stories.txt`; a visitor names one by its place, from 1.

    bugs_batching a_long_queue      a module of this folder, and its function that demonstrates
    title, trap, origin             see `Exhibit`, as for all that is not explained here
    seen, lesson
    wrong, right                    may stand more than once: a line of text each
    room                            another chapter than the one that the bug is put into
    nothing                         a sentence: why there is nothing to watch. Or:
    look, parts
    guest {"name": "a", ...}        the prompt by its words, or by the letters of its `blocks`
    config {"num_blocks": 6, ...}   of the engine
    scheduler chapter 2             in place of the one that `config` names, "fcfs"

The order is that of the chapters. How such a table is read: `text_rows.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from workshop.book.text_rows import TextRow, read_rows
from workshop.practice.museum.exhibit import Exhibit, Guest, Workload
from workshop.practice.museum.props import blocks

STORIES = Path(__file__).with_name("stories.txt")
_WORDS = "title trap origin seen lesson wrong right room nothing look parts guest config scheduler"


def read_exhibits(text: str) -> Iterator[Exhibit]:
    for row in read_rows(text, _WORDS):
        module, _, function = row.head.partition(" ")
        yield Exhibit(
            trap=int(row.text("trap")),
            origin=row.text("origin"),
            title=row.text("title"),
            seen=row.text("seen"),
            lesson=row.text("lesson"),
            demonstrate=getattr(import_module(f"{__package__}.{module}"), function),
            wrong=row.text("wrong"),
            right=row.text("right"),
            watch=row.text("nothing") or _workload(row),
            room=row.text("room"),
        )


def _workload(row: TextRow) -> Workload:
    guests = tuple(_guest(**json.loads(guest)) for guest in row.said["guest"])
    config: dict[str, Any] = json.loads(row.text("config") or "{}")
    return Workload(
        row.text("look"), row.text("parts"), guests, config, row.text("scheduler") == "chapter 2"
    )


def _guest(name: str, **said: Any) -> Guest:
    letters, behind = said.pop("blocks", ""), said.pop("behind", "")
    return Guest(name, said.pop("prompt", "") or blocks(letters, behind), **said)


EXHIBITS = tuple(read_exhibits(STORIES.read_text(encoding="utf-8")))

TITLES = {  # of the folders that the bugs are put into
    "01_batching": "1. Batching",
    "02_paged_kv": "2. Paged KV",
    "03_prefix_cache": "3. Prefix cache",
    "04_scheduler": "4. Scheduler",
    "05_spec_decode": "5. Speculative decoding",
    "06_chunked_prefill": "6. Chunked prefill",
    "common": "The engine around them",
}
