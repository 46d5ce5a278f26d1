"""Adapter names, contents and users: with interrupts, with ranks that disagree or have failed, and
in two threads."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import Any

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

    def begin(self, directory: str) -> Loaded:
        return Loaded(self, directory[0])

    def drop(self, digest: str) -> None:
        self.there.remove(digest)


@dataclass
class Loaded:
    loader: Loader
    content: str
    is_discarded: bool = False

    def is_over(self) -> bool:
        return True

    def digest(self) -> str:
        if self.content == "?":
            raise ValueError("it can not be read")
        return self.content

    def take(self) -> None:
        self.loader.there += [self.content] * (self.content not in self.loader.there)

    def discard(self) -> None:
        self.is_discarded = True


class Interrupted(dict):
    def __setitem__(self, name, value) -> None:
        raise KeyboardInterrupt


@pytest.mark.net
@pytest.mark.parametrize("seed", range(20))
def test_content_is_there_while_a_name_or_a_request_has_it(seed: int) -> None:
    """With loads that overlap, fail or are interrupted, and a step in flight that fails when a
    drop waits for it. What an interrupt leaves is dropped by the next call."""
    rng = random.Random(seed)
    loader = Loader()
    names = AdapterNames(loader, lambda: 1 / 0)
    digests = dict[str, str]()
    users = dict[str, Request]()
    begun = list[tuple[str, Any]]()
    for number in range(80):
        name, content = rng.choice("xyz"), rng.choice("abc?")
        act = rng.choice(["begin", "end", "end", "unload", "add", "finish", "interrupt"])
        if act == "begin" and name not in digests:
            begun.append((name, names.begin_load(name, content + "1")))
        elif act == "end" and begun:
            name, loading = begun.pop(rng.randrange(len(begun)))
            if name in digests or loading.content == "?":
                with pytest.raises(ValueError, match=r"must be unused|can not be read"):
                    names.end_load(name, loading)
                assert loading.is_discarded
            else:
                names.end_load(name, loading)
                digests[name] = loading.content
        elif act == "unload" and name in digests:
            names.unload(name)
            del digests[name]
        elif act == "add" and digests:
            request = Request.from_tokens(str(number), [1], 1)
            request.features = {"adapter": rng.choice(list(digests.values()))}
            names.on_add(request)
            users[request.request_id] = request
        elif act == "finish" and users:
            request = users.pop(rng.choice(list(users)))
            for _ in range(2):
                names.on_finish(request)
        elif act == "interrupt" and name not in digests and content != "?":
            whole = names._digests
            names._digests = Interrupted(names._digests)
            with pytest.raises(KeyboardInterrupt):
                names.load(name, content)
            names._digests = whole
        else:
            continue
        used = {user.features["adapter"] for user in users.values()}
        wanted = used | set(digests.values())
        there = set(loader.there)
        assert there >= wanted and len(there) == len(loader.there)
        assert there == wanted or act in ("end", "interrupt", "add")
        assert {name: names.digest_of(name) for name in names.names} == digests


class Ranks:
    """An executor whose two ranks answer in turn, one of them a look, until they are gone."""

    def __init__(self, *answers: str | None) -> None:
        self.coming = list(answers)
        self.found: dict[int, list[dict]] = {}
        self.num_asked = 0
        self.taken = []

    def ask(self, kind: str, directory: str) -> int:
        if not self.coming:
            raise WorkerError("gone")
        self.num_asked += 1
        self.found[self.num_asked] = []
        return self.num_asked

    def send(self, content: bytes) -> None:
        if not self.coming:
            raise WorkerError("gone")
        kinds = {"take": ["number", "is_wanted"], "drop": ["digest"]}
        kind, sent = unpack(content, kinds)
        self.taken += [tuple(sent.values())] * (kind == "take")

    def is_answered(self, number: int) -> bool:
        reason = {"kind_of_error": "ValueError", "sentence": "half a file"}
        self.found[number].append({"digest": self.coming.pop(0), **reason})
        return len(self.found[number]) == 2

    def answers(self, number: int, late_for: str, timeout_s: float) -> list[dict]:
        while len(self.found[number]) < 2:
            self.is_answered(number)
        return self.found[number]

    def forget(self, number: int) -> None:
        del self.found[number]


def test_ranks_keep_only_adapters_that_all_have_read() -> None:
    """Each answers when it has read, and steps may come between."""
    ranks = Ranks("a", "a", "a", "b", "a", None, "c", "d", "left")
    adapters = RemoteAdapters(ranks)
    loading = adapters.begin("x")
    assert [loading.is_over() for _ in range(2)] == [False, True]
    assert loading.digest() == "a"
    loading.take()
    names = AdapterNames(adapters, int)
    for reason in ("must be the same on all ranks", "half a file", "must be the same"):
        with pytest.raises(ValueError, match=reason):
            names.load("x", "x")
    assert ranks.taken == [(1, True), (2, False), (3, False), (4, False)]
    assert not ranks.found and not names.names
    ranks.coming.clear()
    adapters.drop("a")
    with pytest.raises(WorkerError):
        names.load("x", "x")
    assert not ranks.found


def test_files_are_read_in_a_thread_and_taken_when_it_is_said(random_loaded, monkeypatch) -> None:
    slots = AdapterSlots(random_loaded.model, 1, 4)
    goes_on = threading.Event()

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
    slots = AdapterSlots(random_loaded.model, 2, 4)
    filled = []
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
