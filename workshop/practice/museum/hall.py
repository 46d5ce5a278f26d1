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

The order is that of the chapters. `stories.zh.txt` says the same in Chinese: a row is the English
title, `title`, `seen`, `lesson`, `look` (or why there is nothing to watch) and `en`, the digest of
the English words from which it was translated.

How such a table is read: `text_rows.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from workshop.book.text_rows import TextRow, is_chinese, read_rows
from workshop.practice.museum.exhibit import Exhibit, Guest, Workload
from workshop.practice.museum.props import blocks

STORIES = Path(__file__).with_name("stories.txt")
_CHINESE = STORIES.with_suffix(".zh.txt")
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


@dataclass(frozen=True, slots=True)
class Words:
    """The story of an exhibit in one language."""

    title: str
    seen: str
    lesson: str
    look: str

    @property
    def digest(self) -> str:
        said = self.title, self.seen, self.lesson, self.look
        return sha256(repr(said).encode()).hexdigest()[:12]


def english_of(exhibit: Exhibit) -> Words:
    watch = exhibit.watch
    look = watch if isinstance(watch, str) else watch.look
    return Words(exhibit.title, exhibit.seen, exhibit.lesson, look)


def read_chinese(text: str) -> Iterator[tuple[str, tuple[str, Words]]]:
    """By the English title: the digest of the English words, and the Chinese ones."""
    for row in read_rows(text, "en title seen lesson look"):
        words = Words(*map(row.text, ("title", "seen", "lesson", "look")))
        yield row.head, (row.text("en"), words)


CHINESE = dict(read_chinese(_CHINESE.read_text(encoding="utf-8")))


def words_of(exhibit: Exhibit) -> Words:
    """As the terminal speaks."""
    return CHINESE[exhibit.title][1] if is_chinese() else english_of(exhibit)


TITLES = {  # of the folders that the bugs are put into
    "01_batching": "1. Batching",
    "02_paged_kv": "2. Paged KV",
    "03_prefix_cache": "3. Prefix cache",
    "04_scheduler": "4. Scheduler",
    "05_spec_decode": "5. Speculative decoding",
    "06_chunked_prefill": "6. Chunked prefill",
    "common": "The engine around them",
}
CHINESE_TITLES = {
    "01_batching": "1. 批处理",
    "02_paged_kv": "2. 分页 KV",
    "03_prefix_cache": "3. 前缀缓存",
    "04_scheduler": "4. 调度器",
    "05_spec_decode": "5. 投机解码",
    "06_chunked_prefill": "6. 分块预填充（chunked prefill）",
    "common": "章节之外：引擎本身",
}
