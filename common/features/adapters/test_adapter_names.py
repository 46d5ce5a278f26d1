"""Adapter names, contents and users: with interrupts, with ranks that disagree or have failed."""

from __future__ import annotations

import random

import pytest

from common.features.adapters.adapter_files import Adapter
from common.features.adapters.adapter_names import AdapterNames
from common.features.adapters.adapter_slots import AdapterSlots
from common.parallel.executor import WorkerError
from common.parallel.remote import RemoteAdapters
from request import Request


class Loader:
    """The content of a directory is its first letter."""

    def __init__(self) -> None:
        self.there = set[str]()

    def load(self, directory: str) -> str:
        if directory[0] == "?":
            raise ValueError("it can not be read")
        self.there.add(directory[0])
        return directory[0]

    def drop(self, digest: str) -> None:
        self.there.remove(digest)


class Interrupted(dict):
    def __setitem__(self, name, value) -> None:
        raise KeyboardInterrupt


@pytest.mark.net
@pytest.mark.parametrize("seed", range(20))
def test_content_is_there_while_a_name_or_a_request_has_it(seed: int) -> None:
    """With loads that fail or are interrupted, and a step in flight that fails when a drop waits
    for it. What an interrupt leaves is dropped by the next call."""
    rng = random.Random(seed)
    loader = Loader()
    names = AdapterNames(loader, lambda: 1 / 0)
    digests = dict[str, str]()
    users = dict[str, Request]()
    for number in range(80):
        name, content = rng.choice("xyz"), rng.choice("abc?")
        act = rng.choice(["load", "load", "unload", "add", "finish", "interrupt"])
        if act == "load":
            if name in digests or content == "?":
                with pytest.raises(ValueError, match=r"must be unused|can not be read"):
                    names.load(name, content + "1")
            else:
                names.load(name, content + "1")
                digests[name] = content
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
        assert loader.there >= wanted
        assert loader.there == wanted or act in ("load", "interrupt", "add")
        assert {name: names.digest_of(name) for name in names.names} == digests


class Ranks:
    """An executor whose two ranks answer, until they are gone."""

    def __init__(self, *answers: str) -> None:
        self.coming = list(answers)

    def ask(self, kind: str, directory: str) -> int:
        return 1

    def send(self, content: bytes) -> None:
        raise WorkerError("gone")

    def answers(self, number: int, late_for: str, timeout_s: float) -> list[dict]:
        if not self.coming:
            raise WorkerError("gone")
        found = [self.coming.pop(0) for _ in range(2)]
        reason = {"sentence": "half a file"}
        return [
            {"digest": one, "kind_of_error": "" if one else "ValueError", **reason} for one in found
        ]


def test_ranks_use_only_adapters_that_all_have_read() -> None:
    ranks = Ranks("a", "a", "a", "b", "a", "", "", "a")
    adapters = RemoteAdapters(ranks)
    assert adapters.load("x") == "a"
    names = AdapterNames(adapters, int)
    for reason in ("must be the same on all ranks", "half a file", "half a file"):
        with pytest.raises(ValueError, match=reason):
            names.load("x", "x")
    assert not names.names
    adapters.drop("a")
    with pytest.raises(WorkerError):
        names.load("x", "x")


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
