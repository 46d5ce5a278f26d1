"""For tests: what must have happened for a sentence of the page to be true.

    unproven(page.evaluate(TOLD))      the sentences of all steps for which it has not happened

The page writes a sentence from what its own script found in a frame. The test goes the other way:
from a sentence and the numbers that it shows, it looks into the frames of the sentence's step with
Python's `happened`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.events.frames import Frame, Happened, happened

TOLD = """() => Watch.store.films.map((film) => film.steps.map((facts, step) => ({
    told: Watch.sentencesOf({film, step, facts}), frames: facts.frames.map(({at}, i) => [
        at, film.frameBehind(facts.first + i), film.frameBehind(facts.first + i + 1)])})))"""

Values = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """A frame of a step, and the request of a sentence, "" or "cache"."""

    at: str
    changes: Happened
    before: Frame
    after: Frame
    name: str

    @property
    def plan(self) -> dict[str, Any]:
        return self.changes["plan"] or {}

    @property
    def result(self) -> dict[str, Any]:
        return self.changes["result"] or {}

    @property
    def computed(self) -> dict[str, Any]:
        """The plan whose results came."""
        return self.before["in_flight"].get(str(self.result.get("step")), {})

    @property
    def end(self) -> dict[str, Any]:
        is_end = self.name in self.changes["finished"]
        return self.after["requests"][self.name]["finish"] if is_end else {}

    def row(self, kind: str) -> list[Any]:
        """The request's own of the rows that begin with a name."""
        return next((row for row in self.changes[kind] if row[0] == self.name), [])


def unproven(films: list[list[dict[str, Any]]]) -> list[str]:
    return [
        f"step {number}: {one['group']} {one['key']} {one['values']}"
        for steps in films
        for number, step in enumerate(steps)
        for frames in [[(at, happened(a, b), a, b) for at, a, b in step["frames"]]]
        for one in step["told"]
        if not any(_is_proof(Seen(*frame, one["group"]), one) for frame in frames)
    ]


def _is_proof(seen: Seen, sentence: dict[str, Any]) -> bool:
    kind, *form = sentence["key"].removeprefix("say.").split(".")
    return bool(_NEEDS[kind](seen, form, sentence["values"]))


def _blocks(words: str) -> set[int]:
    """Return the block ids in a text such as "blocks 1–3, 7"."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:–(\d+))?\b(?! blocks)", words):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _names(blocks: list[int], values: Values) -> bool:
    """Whether the words name all blocks, or the first ones of many; and there are some."""
    named = _blocks(values["blocks"])
    return bool(blocks) and (
        named == set(blocks) or ("…" in values["blocks"] and named <= set(blocks))
    )


def _admitted(seen: Seen, form: list[str], values: Values, is_back: bool) -> bool:
    return seen.row("admitted")[1:] == [values["n"], is_back]


def _preempted(seen: Seen, form: list[str], values: Values) -> bool:
    """Whether it is told for which request it was; for none, it was the debug switch or itself."""
    if not (row := seen.row("preempted")):
        return False
    _, num_tokens, taker = row
    is_admitted = any(name == taker for name, *_ in seen.changes["admitted"])
    forms = {None: [["forced"]], seen.name: [[]]}.get(taker, [["for"], ["seat"]])
    is_named = len(forms) == 1 or taker == values["who"]
    is_right = form in forms and is_named and (form != ["seat"] or is_admitted)
    return is_right and num_tokens == values["lost"]


def _taken(seen: Seen, form: list[str], values: Values) -> bool:
    taken = seen.changes["taken"].get(seen.name) or _load(seen)
    table = seen.after["tables"].get(seen.name, {}).get("0", [])
    return _names(taken, values) and (not form or values["n"] == len(table))


def _load(seen: Seen) -> list[int]:
    return seen.after["loads"].get(seen.name, {}).get("blocks", [])


def _matched(seen: Seen, form: list[str], values: Values) -> bool:
    if not form:
        return _names(seen.plan.get("found", {}).get(seen.name, []), values)
    table = seen.after["tables"].get(seen.name, {}).get(str(values["group"]), [])
    return seen.row("admitted") != [] and _blocks(values["blocks"]) <= set(table)


def _published(seen: Seen, form: list[str], values: Values) -> bool:
    return _blocks(values["blocks"]) <= set(seen.changes["published"].get(seen.name, []))


def _known(seen: Seen, form: list[str], values: Values) -> bool:
    """Whether the cache keeps another block; the request has ended, or its table is as it was."""
    given, kept = (_blocks(values[side]).pop() for side in ("given", "kept"))
    if not form:
        return [seen.name, given, kept] in seen.changes["known"]
    is_given_back = str(given) in seen.before["refs"] and str(given) not in seen.after["refs"]
    is_kept = str(kept) in seen.after["cached"] and str(given) not in seen.after["cached"]
    return is_given_back and is_kept and bool(seen.end) == (form == ["ended"])


def _stop(seen: Seen, form: list[str], values: Values) -> bool:
    stop, has_admitted = seen.plan.get("stop"), bool(seen.plan.get("admitted"))
    if stop is None or (stop[0] == "preempting" and not seen.changes["preempted"]):
        return False
    of_all = {"nobody": stop[1] == "" and not has_admitted, "others": has_admitted}
    return of_all.get("".join(form), stop[1] != "")


def _size(seen: Seen, form: list[str], values: Values) -> bool:
    sizes = zip(seen.computed.get("requests", []), seen.computed.get("num_tokens", []))
    return values["n"] <= dict(sizes).get(seen.name, 0)


def _verdict(seen: Seen) -> list[int]:
    return seen.result.get("verified", {}).get(seen.name, [])


def _arrival(seen: Seen) -> dict[str, Any]:
    return seen.after["requests"][seen.name] if seen.name in seen.changes["arrived"] else {}


_NEEDS: dict[str, Callable[[Seen, list[str], Values], Any]] = {
    "run": lambda seen, form, v: True,
    "arrived": lambda seen, form, v: len(_arrival(seen).get("prompt", ())) == v["n"],
    "brings": lambda seen, form, v: (
        (row := _arrival(seen)) and all(row[name] in v["what"] for name in ("adapter", "grammar"))
    ),
    "queue": lambda seen, form, v: seen.after["waiting"] != seen.before["waiting"],
    "snapshot": lambda seen, form, v: seen.at == "start",
    "admitted": lambda seen, form, v: _admitted(seen, form, v, False),
    "returned": lambda seen, form, v: _admitted(seen, form, v, True),
    "preempted": _preempted,
    "finished": lambda seen, form, v: [seen.end.get("reason")] == form,
    "cut": lambda seen, form, v: seen.end.get("text_length") is not None,
    "taken": _taken,
    "shared": lambda seen, form, v: _names(seen.changes["shared"].get(seen.name, []), v),
    "freed": lambda seen, form, v: _names(seen.changes["freed"].get(seen.name, []), v),
    "matched": _matched,
    "published": _published,
    "known": _known,
    "split": lambda seen, form, v: _blocks(v["blocks"]) <= set(seen.changes["split"]),
    "evicted": lambda seen, form, v: _blocks(v["blocks"]) <= set(seen.changes["evicted"]),
    "load_begun": lambda seen, form, v: seen.name in seen.changes["loads_begun"],
    "loaded": lambda seen, form, v: form == ["nothing"] or _names(_load(seen), v),
    "load_ended": lambda seen, form, v: seen.name in seen.changes["loads_ended"],
    "passed_over": lambda seen, form, v: seen.name in seen.plan.get("skipped", {}),
    "parent": lambda seen, form, v: seen.name in seen.plan.get("parents", {}),
    "stop": _stop,
    "empty": lambda seen, form, v: seen.at == "result" and not seen.computed.get("requests"),
    "chunk": _size,
    "prompt": _size,
    "again": _size,
    "drafts": lambda seen, form, v: _verdict(seen) == [v["accepted"], v["n"] - v["accepted"]],
    "rejected": lambda seen, form, v: _verdict(seen)[1:] == [v["n"]],
    "decode": lambda seen, form, v: len(seen.changes["tokens"].get(seen.name, ())) == 1,
    "discarded": lambda seen, form, v: seen.name in seen.result.get("discarded", {}),
    "failed": lambda seen, form, v: seen.at == "failed",
}
