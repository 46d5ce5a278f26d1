"""Small runs for the browser tests of the pool, the prefix cache and the step in words, with every
case that these must show. Also helpers that such a test uses on a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.events.frames import Frame
from request import SamplingParams
from tiered_cache import KVTierConfig
from workshop.watch.page_maker import make_page
from workshop.watch.replay.film import Film, FilmStep
from workshop.watch.watch_command import read_reel
from workshop.watch.workloads import Cast, Script, Visit, perform

if TYPE_CHECKING:
    from playwright.sync_api import Page

SYSTEM = "You are a careful assistant. Answer in one short sentence.\n"
STORY = "Once upon a time there was a village by the sea, and in it lived a clockmaker. "
CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\n"

_SHARED = (
    Visit("a", 0, SYSTEM + "Q: What is a block?\n", 10),
    Visit("b", 2, SYSTEM + "Q: What is a page?\n", 10),
    Visit("c", 4, STORY + "One day", 10),
    Visit("d", 12, SYSTEM + "Q: What is a block?\nA: It is", 10),
    Visit("e", 16, STORY + "At night", 8),
    Visit("f", 26, CODE + CODE, 8),
)
_CROWD = (
    Visit("a", 0, CODE, 24),
    Visit("b", 0, STORY, 24),
    Visit("c", 1, STORY + CODE, 24),
    Visit("d", 3, "The answer is", 12),
)
_REPEATED = "for i in range(10):\n    print(i)\n"
_SMALL: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 48}
_CROWDED: dict[str, Any] = {"block_size": 4, "num_blocks": 36, "max_num_batched_tokens": 40}

SCRIPTS = {
    "radix": Script(_SHARED, {**_SMALL, "num_blocks": 34, "prefix_cache": "radix"}),
    "hash": Script(_SHARED, {**_SMALL, "num_blocks": 34, "max_num_seqs": 2}),
    "preempted": Script(
        _CROWD, {**_CROWDED, "prefix_cache": None, "chunked_prefill": 16, "watermark": 0.0}
    ),
    "forced": Script(_CROWD, {**_CROWDED, "preempt_every": 5}),
    "prefill_first": Script(
        _CROWD, {**_CROWDED, "scheduler": "prefill_first", "chunked_prefill": 16}
    ),
    "fcfs": Script(
        _CROWD,
        {**_CROWDED, "num_blocks": 40, "max_num_batched_tokens": 64, "scheduler": "fcfs"}
        | {"chunked_prefill": False, "max_num_seqs": 2},
    ),
    "drafts": Script(
        (
            Visit("a", 0, _REPEATED * 2, 30),
            Visit("b", 1, CODE, 30),
            Visit("c", 2, "1 2 3 1 2 3 1", 20),
        ),
        {**_SMALL, "num_blocks": 60, "speculative": {"method": "ngram"}},
    ),
    "tiers": Script(
        (
            Visit("a", 0, SYSTEM * 2 + "A", 6),
            Visit("b", 10, STORY * 2 + "B", 6),
            Visit("c", 20, CODE * 2 + "C", 6),
            Visit("d", 30, SYSTEM * 2 + "D", 6),
        ),
        {**_SMALL, "num_blocks": 26, "kv_tiers": KVTierConfig(host_blocks=60)},
    ),
}


@dataclass(frozen=True, slots=True)
class Shown:
    """A page, and its film as read in Python."""

    page: Path
    film: Film

    @property
    def run(self) -> Any:
        return self.film.run

    def step(self, number: int) -> FilmStep:
        return self.film.step(number)

    def state(self, number: int) -> Frame:
        return self.film.state_after(number)


def blocks_in(step: FilmStep, kind: str) -> list[int]:
    """The blocks that changed in a step in one way: "taken", "published", "evicted"."""
    found: list[int] = []
    for what in step.happened:
        changed = what[kind]
        lists = changed.values() if isinstance(changed, dict) else [changed]
        found += [block for blocks in lists for block in blocks]
    return found


def lookups_in(step: FilmStep, block_size: int) -> dict[str, list[int]]:
    """The blocks that the lookups of a step found, by request."""
    found: dict[str, list[int]] = {}
    for what, (_, _, after) in zip(step.happened, step.frames[-len(step.happened) :]):
        found |= (what["plan"] or {}).get("found", {})
        for name, num, _ in what["admitted"]:
            if num:
                found[name] = after["tables"][name]["0"][: -(-num // block_size)]
    return found


class Pages(dict[str, Shown]):
    """The pages of `SCRIPTS`, by name. Each script is performed on first access."""

    def __init__(self, folder: Path, cast: Cast) -> None:
        self.folder, self.cast = folder, cast

    def __missing__(self, name: str) -> Shown:
        found = self[name] = make_one(self.folder, name, SCRIPTS[name], self.cast)
        return found


def make_one(folder: Path, name: str, script: Script, cast: Cast) -> Shown:
    events, page = folder / f"{name}.jsonl", folder / f"{name}.html"
    perform(script, events, cast)
    page.write_text(make_page([read_reel(events)]), encoding="utf-8")
    return Shown(page, Film.read(events))


def make_urgent(folder: Path, cast: Cast) -> Shown:
    """A run with two running requests, a full batch, and two arrivals of higher priority. (A
    `Visit` has no priorities.)"""
    events, page = folder / "urgent.jsonl", folder / "urgent.html"
    settings = {"block_size": 4, "num_blocks": 30, "max_num_seqs": 2, "policy": "priority"}
    config = EngineConfig(**settings, device="cpu", dtype="float64", events=events)
    engine = LLMEngine(config, loaded=cast.loaded, tokenizer=cast.tokenizer)

    def come(name: str, prompt: str, priority: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=8)
        engine.add_request(name, prompt, params, priority=priority)

    come("a", CODE, 2)
    come("b", "Hello there", 3)
    for _ in range(3):
        engine.step()
    come("c", "The answer", 0)
    come("d", "Once", 1)
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    page.write_text(make_page([read_reel(events)]), encoding="utf-8")
    return Shown(page, Film.read(events))


def ready(page: Page) -> Page:
    """Wait until the page has drawn its first step; return the page."""
    page.wait_for_selector("html[data-ready]")
    go(page)
    return page


def go(page: Page, **changes: Any) -> None:
    """Change the page's store, and wait until the change has been drawn."""
    page.evaluate(
        "(changes) => new Promise((done) => { Watch.set(changes);"
        " requestAnimationFrame(() => requestAnimationFrame(done)); })",
        changes,
    )


def visible(text: str) -> str:
    """Return the text with blanks as the page shows them."""
    return text.translate(str.maketrans({" ": "·", "\n": "↵", "\t": "→", "\r": "↵"}))
