"""All exhibits, from one table, `stories.txt`; an exhibit's number is its position, from 1.

    bugs_batching a_long_queue      a module of this folder, and its demonstrating function
    title, trap, origin             see `Exhibit`, as for all words not explained here
    symptom, cause, lesson
    wrong, right                    can be repeated: a line of text each
    room                            the chapter, if it is not that of the patched module
    nothing                         a sentence: why there is nothing to watch. Or:
    watch, parts                    the sentence that says what to look at; see `Workload`
    guest {"name": "a", ...}        the prompt: text, SONG or CODE of `props.py`, or the letters of
                                    `blocks` and the text `then`
    config {"num_blocks": 6, ...}   of the engine
    scheduler chapter 2             instead of the "fcfs" of `config`

The order is that of the chapters. `stories.zh.txt` has the same in Chinese. A row is the English
title, `title`, `symptom`, `cause`, `lesson`, `watch` (or why there is nothing to watch) and `en`,
the digest of the English text from which it was translated.

`text_rows.py` reads such tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from workshop.book.text_rows import TextRow, is_chinese, read_rows
from workshop.practice.museum.exhibit import Exhibit, Guest, Workload
from workshop.practice.museum.props import CODE, SONG, blocks

STORIES = Path(__file__).with_name("stories.txt")
_CHINESE = STORIES.with_suffix(".zh.txt")
_WORDS = """title trap origin symptom cause lesson wrong right room nothing watch parts guest config
scheduler"""
_PROMPTS = {"SONG": SONG, "CODE": CODE}


def read_exhibits(text: str) -> Iterator[Exhibit]:
    for row in read_rows(text, _WORDS):
        module, _, function = row.head.partition(" ")
        yield Exhibit(
            trap=int(row.text("trap")),
            origin=row.text("origin"),
            title=row.text("title"),
            symptom=row.text("symptom"),
            cause=row.text("cause"),
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
        row.text("watch"), row.text("parts"), guests, config, row.text("scheduler") == "chapter 2"
    )


def _guest(name: str, **said: Any) -> Guest:
    letters, then, prompt = said.pop("blocks", ""), said.pop("then", ""), said.pop("prompt", "")
    return Guest(name, _PROMPTS.get(prompt, prompt) or blocks(letters, then), **said)


EXHIBITS = tuple(read_exhibits(STORIES.read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True)
class Words:
    """The story of an exhibit in one language."""

    title: str
    symptom: str
    cause: str
    lesson: str
    watch: str

    @property
    def digest(self) -> str:
        return sha256(repr(astuple(self)).encode()).hexdigest()[:12]


def english_of(exhibit: Exhibit) -> Words:
    watch = exhibit.watch if isinstance(exhibit.watch, str) else exhibit.watch.look
    return Words(exhibit.title, exhibit.symptom, exhibit.cause, exhibit.lesson, watch)


def read_chinese(text: str) -> Iterator[tuple[str, tuple[str, Words]]]:
    """Yield by English title: the digest of the English words, and the Chinese ones."""
    parts = "title", "symptom", "cause", "lesson", "watch"
    for row in read_rows(text, f"en {' '.join(parts)}"):
        words = Words(*map(row.text, parts))
        yield row.head, (row.text("en"), words)


CHINESE = dict(read_chinese(_CHINESE.read_text(encoding="utf-8")))


def words_of(exhibit: Exhibit) -> Words:
    """The story in the terminal's language."""
    return CHINESE[exhibit.title][1] if is_chinese() else english_of(exhibit)


LABELS = {  # of the four parts of a story
    "symptom": ("Symptom.", "症状："),
    "cause": ("Cause.", "原因："),
    "lesson": ("Lesson.", "教训："),
    "watch": ("Watch.", "观察："),
}
TITLES = {  # of the folders of the patched modules
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
