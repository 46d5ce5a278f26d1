"""For tests: the events that must have happened for a sentence of the page to be true.

    unproven(page.evaluate(TOLD))      the sentences of all steps without such an event

The page writes a sentence when it reads an event. The test goes the other way: from a sentence and
the numbers that it shows, it searches the events of the sentence's step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

Event = dict[str, Any]
TOLD = """() => Watch.store.films.map((film) => film.steps.map((facts, step) => ({
    events: facts.events, told: Watch.sentencesOf({film, step, facts})})))"""


def unproven(films: list[list[dict[str, Any]]]) -> list[str]:
    return [
        f"step {number}: {one['group']} {one['key']} {one['values']}"
        for steps in films
        for number, step in enumerate(steps)
        for one in step["told"]
        if not any(_is_proof(event, one, step["events"]) for event in step["events"])
    ]


def _is_proof(event: Event, told: dict[str, Any], events: list[Event]) -> bool:
    kind, *how = told["key"].removeprefix("say.").split(".")
    needed, is_it = _NEEDS[kind]
    if event["kind"] != needed:
        return False
    named = event.get("request")
    if named is not None and named != told["group"]:
        return False
    return is_it(event, how, told["values"], told["group"], events)


def _blocks(words: str) -> set[int]:
    """Return the block ids in a text such as "blocks 1–3, 7"."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:–(\d+))?\b(?! blocks)", words):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _names(blocks: list[int], words: str) -> bool:
    """Whether the words name all blocks, or the first ones of many."""
    return _blocks(words) == set(blocks) or ("…" in words and _blocks(words) <= set(blocks))


def _later(events: list[Event], event: Event, kind: str) -> Iterator[Event]:
    place = next(i for i, one in enumerate(events) if one is event)
    return (one for one in events[place:] if one["kind"] == kind)


def _known(event: Event, how: list[str], values: Event, name: str, events: list[Event]) -> bool:
    """Whether the cache has kept another block; the table is a second event, or missing."""
    pairs = [(_blocks(values[side]) or {0}).pop() for side in ("given", "kept")]
    places = [i for i, pair in enumerate(zip(event["given"], event["kept"])) if [*pair] == pairs]
    if pairs[0] == pairs[1] or not places:
        return False
    place = event["start"] + places[0]
    tables = [t for t in _later(events, event, "table") if t["request"] == name]
    named = [(t["blocks"][place - t["keep"] :] or [0])[0] for t in tables if t["keep"] <= place]
    is_moved, has_exited = pairs[1] in named, 0 in named
    return {"": is_moved, "ended": has_exited, "stays": not named}["".join(how)]


def _taken(event: Event, how: list[str], values: Event, name: str, events: list[Event]) -> bool:
    sizes = [t["keep"] + len(t["blocks"]) for t in _later(events, event, "table")]
    return _names(event["blocks"], values["blocks"]) and (not how or values["n"] in sizes)


def _preempted(event: Event, how: list[str], values: Event, name: str, events: list[Event]) -> bool:
    takers = {e["request"] for e in _later(events, event, "taken")}
    starts = {e["request"] for e in _later(events, event, "admitted")}
    by_way = {"for": values["who"] in takers, "seat": values["who"] in starts}
    return event["num_lost_tokens"] == values["lost"] and by_way.get("".join(how), True)


def _stop(event: Event, how: list[str], values: Event, name: str, events: list[Event]) -> bool:
    happened = {one["kind"] for one in events}
    if event["stop"] and event["stop"][0] == "preempting" and "preempted" not in happened:
        return False
    of_all = {"nobody": "admitted" not in happened, "others": "admitted" in happened}
    is_of_one = bool(event["stop"]) and event["stop"][1] != ""
    return bool(event["stop"]) and of_all.get("".join(how), is_of_one)


def _in(field: str) -> Callable[..., bool]:
    return lambda event, how, values, name, events: name in event[field]


def _with(**fields: str) -> Callable[..., bool]:
    """Return a check that a value of the sentence equals the event's field."""
    return lambda event, how, values, *_: all(
        event[of] == values[name] for of, name in fields.items()
    )


def _of_blocks(event: Event, how: list[str], values: Event, *_: Any) -> bool:
    return _names(event["blocks"], values["blocks"])


def _always(*_: Any) -> bool:
    return True


def _sizes(event: Event, how: list[str], values: Event, name: str, *_: Any) -> bool:
    return values["n"] <= dict(zip(event["requests"], event["num_tokens"])).get(name, 0)


_BROUGHT = ("adapter", "grammar")
_NEEDS: dict[str, tuple[str, Callable[..., bool]]] = {
    "run": ("planned", lambda event, *_: event["step"] == 0),
    "arrived": ("arrived", lambda e, _, v, *__: len(e["prompt"]) == v["n"]),
    "brings": ("arrived", lambda e, _, v, *__: all(e[x] in v["what"] for x in _BROUGHT)),
    "queue": ("queue", _always),
    "snapshot": ("snapshot", _always),
    "admitted": ("admitted", _with(num_cached_tokens="n")),
    "returned": ("admitted", _with(num_cached_tokens="n")),
    "preempted": ("preempted", _preempted),
    "finished": ("finished", lambda e, how, *_: [e["reason"]] == how),
    "cut": ("cut", _always),
    "taken": ("taken", _taken),
    "shared": ("shared", _of_blocks),
    "freed": ("freed", _of_blocks),
    "matched": ("matched", _of_blocks),
    "published": (
        "published",
        lambda e, _, v, *__: _blocks(v["blocks"]) <= set(e["given"]) & set(e["kept"]),
    ),
    "known": ("published", _known),
    "split": ("split", lambda e, _, v, *__: _blocks(v["blocks"]) == {e["block"]}),
    "evicted": ("evicted", _of_blocks),
    "load_begun": ("load_begun", _of_blocks),
    "loaded": ("loaded", lambda e, how, v, *_: how == ["nothing"] or _of_blocks(e, how, v)),
    "load_ended": ("load_ended", _always),
    "passed_over": ("planned", _in("passed_over")),
    "parent": ("planned", _in("parents")),
    "stop": ("planned", _stop),
    "empty": ("planned", lambda event, *_: not event["requests"]),
    "chunk": ("planned", _sizes),
    "prompt": ("planned", _sizes),
    "again": ("planned", _sizes),
    "drafts": ("computed", lambda e, _, v, name, *__: sum(e["verified"][name]) == v["n"]),
    "rejected": ("computed", lambda e, _, v, name, *__: e["verified"][name][1] == v["n"]),
    "decode": ("computed", lambda e, _, v, name, *__: len(e["tokens"][name]) == 1),
    "discarded": ("computed", _in("discarded")),
    "failed": ("failed", _always),
}
