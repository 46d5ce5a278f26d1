"""The museum: bugs that real engines shipped, put back into our code. From `stories.txt`.

    The title                       see `exercise.py`; an exhibit's number is its position, from 1
    trap 10 vLLM #42571             and the origin: see `Exhibit`, as for words not explained here
    symptom, cause, lesson
    room                            the chapter, if it is not that of the patched module
    limit_s 2                       if the symptom is that it does not end
    watch, parts                    the sentence that says what to look at; see `Workload`
    request a b:2 {"prompt": ...}   two equal ones, a at step 0 and b at step 2. The prompt: text,
                                    SONG or CODE, or the letters of `blocks` and the text `then`
    config {"num_blocks": 6, ...}   of the engine
    scheduler chapter 2             instead of the "fcfs" of `config`

    nothing                         why there is nothing to watch: then a failing test shows it

The order is that of the chapters. The bug is the patch of its title in `patches.txt`, with the
tests that catch it. A workload shows it: an engine serves a few requests with the bug and without,
and the two films are compared (`watched_run.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workshop.book.text_rows import TextRow
from workshop.practice.exercise import Exercise, read_exercises
from workshop.practice.patch_table import Bug, bug_of_exhibit
from workshop.practice.trial import LIMIT_S

STORIES = Path(__file__).with_name("stories.txt")
_WORDS = """trap symptom cause lesson room limit_s watch parts request config scheduler
nothing"""
CODE = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"
SONG = "a = [1, 2, 3, 4]\nb = [1, 2, 3, 4]\nc = [1, 2, 3, 4]\nd = [1, 2,"
_TEXT = """and are all add|but bytes base block|can class call code|data default does doc|error end
event exec|for file from first|get given getattr group|has have header handle|import index into
item|line list last log|method module must may|not name new number|object other out one|path prefix
process package|return read result run|self string set size|the that this time|used use using
user|value version values valid|with will which when"""
_PROMPTS = {"SONG": SONG, "CODE": CODE}


def blocks(letters: str, then: str = "") -> str:
    """A prompt of the shipped model: for each letter a block of four tokens, words that begin with
    it; then the text `then`."""
    by_letter = {words[0]: " " + " ".join(words.split()) for words in _TEXT.split("|")}
    return "".join(by_letter[letter] for letter in letters) + then


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and the step before which it arrives. `sampling` defaults to greedy."""

    name: str
    prompt: str
    max_tokens: int = 8
    step: int = 0
    priority: int = 0
    adapter: str | None = None  # a name for the shipped one
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, in order of arrival, for an engine with the settings of `config`."""

    parts: str  # where the two films first differ: "step 3, plan, in_flight, b"
    requests: tuple[Arrival, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    has_chapter_2s_scheduler: bool = False  # instead of the "fcfs" of `config`


@dataclass(frozen=True, slots=True)
class Exhibit(Exercise):
    trap: int  # its number in the project's list of traps, as cited by tests: "Trap 10"
    origin: str  # the engine that shipped it: "vLLM #42571"; or "ours"
    patch: Bug
    watch: Workload | None
    limit_s: float  # for each test, with the bug
    chapter: str  # the folder of the patched module, unless the row names another

    @property
    def tests(self) -> tuple[str, ...]:
        """The tests that catch the bug, as path::name."""
        return self.patch.tests


def read_exhibits(table: Path) -> Iterator[Exhibit]:
    for row, chinese in read_exercises(table, _WORDS):
        patch = bug_of_exhibit(row.head)
        trap, _, origin = row.text("trap").partition(" ")
        yield Exhibit(
            row,
            chinese,
            trap=int(trap),
            origin=origin,
            patch=patch,
            watch=None if row.said["nothing"] else _workload(row),
            limit_s=float(row.text("limit_s") or LIMIT_S),
            chapter=row.text("room") or patch.chapter,
        )


def _workload(row: TextRow) -> Workload:
    requests = tuple(request for line in row.said["request"] for request in _requests(line))
    config: dict[str, Any] = json.loads(row.text("config") or "{}")
    return Workload(row.text("parts"), requests, config, row.text("scheduler") == "chapter 2")


def _requests(line: str) -> Iterator[Arrival]:
    names, brace, rest = line.partition("{")
    said = json.loads(brace + rest)
    letters, then, prompt = said.pop("blocks", ""), said.pop("then", ""), said.pop("prompt", "")
    prompt = _PROMPTS.get(prompt, prompt) or blocks(letters, then)
    for name, _, step in (part.partition(":") for part in names.split()):
        yield Arrival(name, prompt, step=int(step or 0), **said)


EXHIBITS = tuple(read_exhibits(STORIES))
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
