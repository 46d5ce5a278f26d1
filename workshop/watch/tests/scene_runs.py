"""Small runs for the browser tests of the pool, the prefix cache and the step in words, with every
case that these must show."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from common.engine import LLMEngine
from common.engine_config import EngineConfig
from kv_connector import KVConnector
from request import Request, SamplingParams
from workshop.watch.page_maker import make_page
from workshop.watch.replay.film import Film
from workshop.watch.watch_command import read_reel
from workshop.watch.workloads import DEFAULT, Cast, Script, Visit, perform

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
    "everything": DEFAULT,
}


class Shown(NamedTuple):
    page: Path
    film: Film  # as read in Python


class Pages(dict[str, Shown]):
    """The pages of `SCRIPTS`, by name, and that of `make_urgent`. Each is made on first access."""

    def __init__(self, folder: Path, cast: Cast) -> None:
        self.folder, self.cast = folder, cast

    def __missing__(self, name: str) -> Shown:
        events = self.folder / f"{name}.jsonl"
        if name in SCRIPTS:
            perform(SCRIPTS[name], events, self.cast)
        else:
            make_urgent(events, self.cast)
        found = self[name] = shown_run(events)
        return found


class SlowStore(KVConnector):
    """Has the first block of one request, which comes when it has been asked for twice."""

    num_calls = 0

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Any:
        return (4, True) if request.request_id == "d" and num_computed_tokens == 0 else (0, False)

    def update_state_after_alloc(self, *_: object) -> None: ...

    def get_finished_load(self, request_id: str) -> int | None:
        self.num_calls += 1
        return 4 if self.num_calls > 2 else None

    def cancel_load(self, request_id: str) -> None: ...

    def request_finished(self, *_: object) -> None: ...

    def wait_for_load(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


def make_urgent(events: Path, cast: Cast) -> None:
    """A run with two running requests, a full batch, and two arrivals of higher priority, one of
    which has KV elsewhere. (A `Visit` has no priorities.)"""
    settings = {"block_size": 4, "num_blocks": 30, "max_num_seqs": 2, "policy": "priority"}
    config = EngineConfig(
        **settings, device="cpu", dtype="float64", events=events, kv_connector=SlowStore()
    )
    engine = LLMEngine(config, loaded=cast.loaded, tokenizer=cast.tokenizer)
    params = SamplingParams(temperature=0, max_tokens=8)
    engine.add_request("a", CODE, params, priority=2)
    engine.add_request("b", "Hello there", params, priority=3)
    for _ in range(3):
        engine.step()
    engine.add_request("c", "The answer", params, priority=0)
    engine.add_request("d", "Once upon a time", params, priority=1)
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()


def shown_run(events: Path) -> Shown:
    page = events.with_suffix(".html")
    page.write_text(make_page([read_reel(events)]), encoding="utf-8")
    return Shown(page, Film.read(events))
