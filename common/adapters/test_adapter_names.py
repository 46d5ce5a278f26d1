"""Names, contents and who uses them: with interrupts, with ranks that disagree or are gone, and in
two threads."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace

import pytest
import torch

from common.adapters.adapter_files import Adapter
from common.adapters.adapter_names import AdapterNames
from common.adapters.adapter_slots import AdaptedModel, AdapterSlots, Ordered, StepAdapters
from common.parallel.executor import WorkerError
from common.parallel.message import unpack
from common.parallel.remote import RemoteAdapters


class Loader:
    """Of a directory the content is its first letter."""

    def __init__(self) -> None:
        self.there: list[str] = []

    def load(self, directory: str) -> str:
        self.there += [directory[0]] * (directory[0] not in self.there)
        return directory[0]

    def drop(self, digest: str) -> None:
        self.there.remove(digest)


class Interrupted(dict):
    def __setitem__(self, name, value) -> None:
        raise KeyboardInterrupt


def test_content_stays_while_a_name_or_a_request_has_it() -> None:
    loader = Loader()
    names = AdapterNames(loader, int)
    names.load("x", "a1")
    names.load("y", "a2")
    names.begin("a", "request")
    names.unload("x")
    names.unload("y")
    assert loader.there == ["a"] and names.names == []
    names.end("a", "another")
    assert loader.there == ["a"]
    names.end("a", "request")
    names.end("a", "request")
    assert loader.there == []


def test_what_an_interrupt_left_without_a_name_goes_with_the_next_call() -> None:
    loader = Loader()
    names = AdapterNames(loader, int)
    whole, names._digests = names._digests, Interrupted()
    with pytest.raises(KeyboardInterrupt):
        names.load("x", "a")
    names._digests = whole
    assert loader.there == ["a"]
    names.load("x", "b")
    assert loader.there == ["b"] and names.digest_of("x") == "b"


def test_steps_under_way_are_waited_for_and_their_errors_are_their_own() -> None:
    loader, waited = Loader(), []

    def wait() -> None:
        waited.append(list(loader.there))
        raise RuntimeError("of a step")

    names = AdapterNames(loader, wait)
    names.load("x", "a")
    names.unload("x")
    assert waited == [["a"]] and loader.there == []


class Ranks:
    """An executor whose ranks answer `answers` in turn, until they are gone."""

    def __init__(self, *answers: list[str | None]) -> None:
        self.answers, self.dropped, self.is_gone = list(answers), [], False

    def send(self, content: bytes) -> None:
        if self.is_gone:
            raise WorkerError("gone")
        kind, told = unpack(content, {"adapter": ["directory"], "drop": ["digest"]})
        if kind == "drop":
            self.dropped.append(told["digest"])

    def collect(self, what: str) -> list[dict]:
        why = {"kind_of_error": "ValueError", "sentence": "half a file"}
        return [{"digest": digest, **why} for digest in self.answers.pop(0)]


def test_ranks_that_disagree_keep_what_they_had() -> None:
    ranks = Ranks(["a", "a"], ["a", "b"], ["a", None], ["c", "d"])
    adapters = RemoteAdapters(ranks)
    assert adapters.load("x") == "a"
    for why in ("not the same on all ranks", "half a file", "not the same"):
        with pytest.raises(ValueError, match=why):
            adapters.load("x")
    assert sorted(ranks.dropped) == ["b", "c", "d"]
    ranks.is_gone = True
    adapters.drop("a")


def test_what_ranks_took_in_an_interrupted_load_is_dropped_again() -> None:
    class Interrupting(Ranks):
        def collect(self, what: str) -> list[dict]:
            signal.raise_signal(signal.SIGINT)
            return super().collect(what)

    ranks = Interrupting(["a", "a"], ["b", "b"])
    adapters = RemoteAdapters(ranks)
    adapters._held.add("a")
    for path in ("x", "y"):
        with pytest.raises(KeyboardInterrupt):
            adapters.load(path)
    assert ranks.dropped == ["b"], "a is somebody's"


def test_a_pass_in_another_thread_has_adapters_of_its_own(random_loaded) -> None:
    slots = AdapterSlots(random_loaded.model, 1, 4)
    adapted, begun, goes_on = (
        AdaptedModel.of(random_loaded.model),
        *(threading.Event() for _ in range(2)),
    )
    step, seen = StepAdapters(slots, Ordered(None, []), Ordered(None, [])), []

    batch = SimpleNamespace(staged={AdaptedModel.name: step})

    def other_pass() -> None:
        adapted._begin(random_loaded.model, (batch,))
        begun.set()
        goes_on.wait()
        seen.append(adapted.step)
        adapted._end(random_loaded.model, (batch,), torch.empty(0))
        seen.append(adapted.step)

    thread = threading.Thread(target=other_pass)
    thread.start()
    begun.wait()
    seen.append(adapted.step)
    goes_on.set()
    thread.join()
    assert seen == [None, step, None]


def test_who_is_needed_longest_ago_makes_room_and_nobody_is_filled_twice(random_loaded) -> None:
    slots, filled = AdapterSlots(random_loaded.model, 2, 4), []
    slots.taken = {name: Adapter(name, {}) for name in "abcd"}
    fill = slots._fill
    slots._fill = lambda slot, adapter: filled.append(adapter.digest) or fill(slot, adapter)
    for wanted, brought in (("ab", "ab"), ("b", ""), ("c", "c"), ("ab", "a"), ("da", "d")):
        slot_of = slots.bring_in(wanted)
        assert slot_of.keys() == set(wanted) and len(set(slot_of.values())) == len(wanted)
        assert all(slots.slot_of[name] == slot for name, slot in slot_of.items())
        assert filled == list(brought), wanted
        filled.clear()
    assert slots.slot_of.keys() == set("da") and set(slots.slot_of.values()) == {1, 2}
    with pytest.raises(AssertionError, match="more adapters in a step"):
        slots.bring_in("abc")
