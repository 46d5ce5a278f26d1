"""Adapter names, contents and users: with interrupts, with ranks that disagree or have failed, and
in two threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from common.features.adapters import adapter_slots
from common.features.adapters.adapter_files import Adapter
from common.features.adapters.adapter_names import AdapterNames
from common.features.adapters.adapter_slots import AdapterSlots
from common.parallel.executor import WorkerError
from common.parallel.message import unpack
from common.parallel.remote import RemoteAdapters
from request import Request


class Loader:
    """The content of a directory is its first letter."""

    def __init__(self) -> None:
        self.there: list[str] = []
        self.num_forgotten = 0

    def begin(self, directory: str) -> Loaded:
        return Loaded(self, directory[0])

    def drop(self, digest: str) -> None:
        self.there.remove(digest)


@dataclass
class Loaded:
    loader: Loader
    content: str

    def is_over(self) -> bool:
        return True

    def digest(self) -> str:
        if self.content == "?":
            raise ValueError("it can not be read")
        return self.content

    def take(self) -> None:
        self.loader.there += [self.content] * (self.content not in self.loader.there)

    def discard(self) -> None:
        self.loader.num_forgotten += 1


class Interrupted(dict):
    def __setitem__(self, name, value) -> None:
        raise KeyboardInterrupt


def test_content_stays_while_a_name_or_a_request_has_it() -> None:
    loader = Loader()
    names = AdapterNames(loader, int)
    names.load("x", "a1")
    names.load("y", "a2")
    request, another = (Request.from_tokens(name, [1], 1) for name in ("request", "another"))
    request.features = another.features = {"adapter": "a"}
    names.on_add(request)
    assert names.in_use(["request"]) == (["x"], []) and names.in_use([]) == ([], ["x"])
    names.unload("x")
    names.unload("y")
    assert names.in_use(["request"]) == (["a"], []), "by its digest"
    assert loader.there == ["a"] and names.names == []
    names.on_finish(another)
    assert loader.there == ["a"]
    names.on_finish(request)
    names.on_finish(request)
    assert loader.there == [] and names.in_use(["request"]) == ([], [])


def test_content_left_without_a_name_by_an_interrupt_is_dropped_by_the_next_call() -> None:
    loader = Loader()
    names = AdapterNames(loader, int)
    whole, names._digests = names._digests, Interrupted()
    with pytest.raises(KeyboardInterrupt):
        names.load("x", "a")
    names._digests = whole
    assert loader.there == ["a"]
    names.load("x", "b")
    assert loader.there == ["b"] and names.digest_of("x") == "b"


def test_steps_in_flight_are_waited_for_and_keep_their_errors() -> None:
    loader, waited = Loader(), []

    def wait() -> None:
        waited.append(list(loader.there))
        raise RuntimeError("of a step")

    names = AdapterNames(loader, wait)
    names.load("x", "a")
    names.unload("x")
    assert waited == [["a"]] and loader.there == []


def test_of_loads_at_once_the_slower_changes_nothing_and_an_unload_is_undone() -> None:
    loader = Loader()
    names = AdapterNames(loader, int)
    slow = names.begin_load("x", "a")
    names.load("x", "b")
    with pytest.raises(ValueError, match="name must be unused, got 'x'"):
        names.end_load("x", slow)
    with pytest.raises(ValueError, match="can not be read"):
        names.load("y", "?")
    assert loader.there == ["b"] and loader.num_forgotten == 2 and names.names == ["x"]
    again = names.begin_load("y", "b")
    names.unload("x")
    assert loader.there == []
    names.end_load("y", again)
    assert loader.there == ["b"] and names.digest_of("y") == "b"


class Ranks:
    """An executor whose ranks answer `answers` in turn, one of them a look, until they are gone."""

    def __init__(self, *answers: list[str | None]) -> None:
        self.answers, self.has_exited = list(answers), False
        self.links, self.loading, self.sent = [0, 1], {}, []

    def send(self, content: bytes) -> None:
        if self.has_exited:
            raise WorkerError("gone")
        kinds = {"adapter": ["number", "directory"], "take": ["number", "is_wanted"]}
        kind, sent = unpack(content, kinds | {"drop": ["digest"]})
        self.sent.append((kind, *sent.values()))

    def look(self, seconds: float) -> None:
        if self.has_exited:
            raise WorkerError("gone")
        number = max(self.loading)
        reason = {"kind_of_error": "ValueError", "sentence": "half a file"}
        rank, digests = len(self.loading[number]), self.answers[0]
        self.loading[number][rank] = {"digest": digests.pop(0), **reason}
        if not digests:
            self.answers.pop(0)


def test_ranks_keep_only_adapters_that_all_have_read() -> None:
    """Each answers when it has read, and steps may come between."""
    ranks = Ranks(["a", "a"], ["a", "b"], ["a", None], ["c", "d"])
    adapters = RemoteAdapters(ranks)
    loading = adapters.begin("x")
    assert [loading.is_over() for _ in range(3)] == [False, True, True]
    assert loading.digest() == "a"
    loading.take()
    names = AdapterNames(adapters, int)
    for reason in ("must be the same on all ranks", "half a file", "must be the same"):
        with pytest.raises(ValueError, match=reason):
            names.load("x", "x")
    taken = [sent[1:] for sent in ranks.sent if sent[0] == "take"]
    assert taken == [(1, True), (2, False), (3, False), (4, False)]
    assert not ranks.loading and not names.names
    ranks.has_exited = True
    adapters.drop("a")
    with pytest.raises(WorkerError):
        names.load("x", "x")
    assert not ranks.loading


def test_adapters_of_an_interrupted_load_are_dropped_by_the_next_call() -> None:
    class Interrupting(Ranks):
        def send(self, content: bytes) -> None:
            super().send(content)
            if self.sent[-1] == ("take", 2, True):
                raise KeyboardInterrupt

    ranks = Interrupting(["a", "a"], ["b", "b"], ["c", "c"])
    names = AdapterNames(RemoteAdapters(ranks), int)
    names.load("x", "x")
    with pytest.raises(KeyboardInterrupt):
        names.load("y", "y")
    names.load("y", "z")
    assert [sent for sent in ranks.sent if sent[0] == "drop"] == [("drop", "b")]
    assert names.names == ["x", "y"] and names.digest_of("y") == "c"


def test_files_are_read_in_a_thread_and_taken_when_it_is_said(random_loaded, monkeypatch) -> None:
    slots, goes_on = AdapterSlots(random_loaded.model, 1, 4), threading.Event()

    def read(directory: str, *_: object) -> Adapter:
        assert goes_on.wait(60)
        return Adapter(directory, {})

    monkeypatch.setattr(adapter_slots, "read_adapter", read)
    loading = slots.begin("x")
    assert not loading.is_over()
    goes_on.set()
    assert loading.digest() == "x" and loading.is_over() and not slots.taken
    loading.take()
    assert list(slots.taken) == ["x"]


def test_who_is_needed_longest_ago_makes_room_and_nobody_is_filled_twice(random_loaded) -> None:
    slots, filled = AdapterSlots(random_loaded.model, 2, 4), []
    slots.taken = {name: Adapter(name, {}) for name in "abcd"}
    fill = slots._fill
    slots._fill = lambda slot, adapter: filled.append(adapter.digest) or fill(slot, adapter)
    for needed, loaded in (("ab", "ab"), ("b", ""), ("c", "c"), ("ab", "a"), ("da", "d")):
        slot_of = slots.bring_in(needed)
        assert slot_of.keys() == set(needed) and len(set(slot_of.values())) == len(needed)
        assert all(slots.slot_of[name] == slot for name, slot in slot_of.items())
        assert filled == list(loaded), needed
        filled.clear()
    assert slots.slot_of.keys() == set("da") and set(slots.slot_of.values()) == {1, 2}
    with pytest.raises(AssertionError, match="more adapters than max_loras"):
        slots.bring_in("abc")
