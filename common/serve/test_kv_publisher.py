"""The bytes are vLLM's, and a reader that misses messages recovers their contents."""

from __future__ import annotations

import gc
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from block_pool import BlockPool
from bounded_loops import as_long_as
from common.engine import LLMEngine
from common.engine_config import SHIPPED_ADAPTER, EngineConfig
from common.serve.kv_events import CacheChanges, KVEvents
from common.serve.kv_publisher import EventPublisher
from common.serve.kv_wire import (
    CLEARED,
    CPU,
    GPU,
    Event,
    HeldBlock,
    add_removed,
    add_stored,
    pack_batch,
)
from common.tests.engine_oracle import Oracle, greedy_params, serve
from common.tests.kv_stream import LIMIT_S, Index, Reader, engine_of, prefixes_of, take
from kv_slots import PREFIX_CACHES

RECORD = json.loads((Path(__file__).parent / "vllm_kv_events.json").read_text())
LOOPBACK = "tcp://127.0.0.1:*"


# -- the bytes


def unpacked(payload: bytes) -> object:
    return payload and msgpack.unpackb(payload)


@pytest.mark.parametrize("batch", RECORD["batches"], ids=lambda batch: batch["name"])
def test_a_batch_has_the_bytes_that_vllm_gives_it(batch: dict) -> None:
    """But for the length of a map, which msgspec writes in three bytes where one is enough."""
    (now, events, rank), theirs = batch["content"], bytes.fromhex(batch["bytes"])
    shorter = theirs
    for length in {len(event) for event in events}:
        shorter = shorter.replace(bytes([0xDE, 0, length]), bytes([0x80 + length]))
    assert rank == 0 and pack_batch(events, now) == shorter
    assert msgpack.unpackb(theirs) == batch["content"]


def test_the_page_shows_a_message_as_it_is() -> None:
    cache = PREFIX_CACHES["hash"](BlockPool(9), 4)
    changes = CacheChanges(cache)
    changes.put_in()
    take(changes, Index())
    cache.cache_computed_blocks([1, 2, 3, 4, 5, 6, 7, 300, 9])
    ((event,),) = changes.take()
    for name in ("KV_EVENTS.md", "KV_EVENTS.zh.md"):
        page = (Path(__file__).parent / name).read_text(encoding="utf-8")
        (decoded,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
        assert json.loads(decoded) == event
        dump = re.findall(r"^((?:[0-9a-f]{2} )+) +\S", page, re.MULTILINE)
        assert bytes.fromhex("".join(dump)) == pack_batch([event], 1763923200.25)


def test_events_have_vllms_fields_in_vllms_order() -> None:
    cache, index = PREFIX_CACHES["hash"](BlockPool(9), 2), Index()
    changes = CacheChanges(cache, {"d1": ["sql"]})
    changes.put_in()
    assert take(changes, index) == [CLEARED]
    cache.cache_computed_blocks([1, 2, 3, 4], [("lora", "d1"), ("salt", "tenant a")])
    cache.cache_computed_blocks([1, 2])
    cache.evict(2)
    stored, plain, removed = take(changes, index)
    by_vllm = {name: contents for contents in RECORD["batches"] if (name := contents["name"])}
    for ours, name, number in [
        (stored, "an adapter and a salt", 0),
        (plain, "a first block", 0),
        (removed, "down to the host", 1),
    ]:
        assert list(ours) == list(by_vllm[name]["content"][1][number])
    assert stored["extra_keys"] == [["sql", "tenant a"], ["sql"]]


def test_an_event_is_of_one_kind_and_one_medium() -> None:
    """A tier may lose a block before it gets what comes after it."""
    one, other = b"a" * 8, b"b" * 8
    events, block = list[Event](), HeldBlock(one, (1, 2), None, ())
    add_removed(events, one, CPU, None)
    add_stored(events, other, block, CPU, None)
    add_removed(events, other, CPU, None)
    add_removed(events, other, GPU, None)
    assert [(event["type"], event["medium"], len(event["block_hashes"])) for event in events] == [
        ("BlockRemoved", CPU, 1),
        ("BlockStored", CPU, 1),
        ("BlockRemoved", CPU, 1),
        ("BlockRemoved", GPU, 1),
    ]


@pytest.fixture
def addresses(tmp_path: Path) -> tuple[str, str]:
    """Fresh addresses: one is free only a moment after its socket is closed."""
    return f"inproc://{tmp_path}/events", f"inproc://{tmp_path}/replays"


Publish = Callable[..., tuple[EventPublisher, Reader]]


@pytest.fixture
def publish(addresses: tuple[str, str]) -> Iterator[Publish]:
    """Return a function that makes a publisher, not started yet, and a reader of it."""
    with ExitStack() as stack:

        def _publish(source: Scripted, **options: Any) -> tuple[EventPublisher, Reader]:
            publisher = EventPublisher(source, *addresses, **options)
            reader = Reader(publisher)
            stack.callback(reader.close)
            stack.callback(publisher.close)
            return publisher, reader

        yield _publish


class Scripted:
    """Says what it is told to, once."""

    def __init__(self, batches: list[list[Event]]) -> None:
        self.batches, self.num_anew, self.num_taken = batches, 0, 0

    def take(self) -> Iterator[list[Event]]:
        self.num_taken += 1
        while self.batches:
            yield self.batches.pop(0)

    def restart_stream(self) -> None:
        self.num_anew += 1


def test_the_frames_are_those_that_vllm_s_publisher_sent(
    publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [batch["content"] for batch in RECORD["batches"]]
    times = iter([now for now, *_ in contents])
    clock = SimpleNamespace(time=lambda: next(times))
    monkeypatch.setattr("common.serve.kv_publisher.time", clock)
    source = Scripted([events for _, events, _ in contents])
    publisher, reader = publish(source, topic="kv")
    publisher.start()
    for head, batch in zip(RECORD["heads"], RECORD["batches"], strict=True):
        assert reader.socket.poll(LIMIT_S * 1e3)
        *heads, payload = reader.socket.recv_multipart()
        assert [part.hex() for part in heads] == head
        assert msgpack.unpackb(payload) == batch["content"]
    reader.replays.send_multipart([b"nonsense"])
    reader.replays.send_multipart([b"", (6).to_bytes(8, "big")])
    for frames in RECORD["replay"]:
        assert reader.replays.poll(LIMIT_S * 1e3)
        *heads, payload = reader.replays.recv_multipart()
        assert [part.hex() for part in heads] == frames[:-1]
        assert unpacked(payload) == unpacked(bytes.fromhex(frames[-1]))
    publisher.close()
    assert source.num_anew == 0


def test_a_batch_that_cannot_be_packed_ends_nothing(
    publish: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    source = Scripted([[{"type": object()}], [CLEARED]])
    publisher, reader = publish(source)
    publisher.start()
    reader.read_until(lambda: reader.next > 0)
    publisher.close()
    assert source.num_anew == 1 and "starts again from scratch" in caplog.text


def test_a_reader_that_pauses_misses_nothing(publish: Publish) -> None:
    source = Scripted([[CLEARED]] * 5000)
    publisher, reader = publish(source, buffer_steps=5000)
    publisher.start()
    for _ in as_long_as(lambda: source.batches, seconds=LIMIT_S):
        time.sleep(0.01)
    publisher.wake()
    num_taken = source.num_taken
    time.sleep(0.3)
    assert source.num_taken - num_taken < 9, "nor does it ask without end"
    reader.replays.send_multipart([b"", bytes(8)])
    time.sleep(0.3)
    for socket, at in (reader.socket, 1), (reader.replays, 2):
        for number in range(5000):
            assert socket.poll(LIMIT_S * 1e3)
            assert int.from_bytes(socket.recv_multipart()[at], "big") == number
    source.batches.append([CLEARED])
    publisher.close()
    assert len(publisher._kept) == 5000, "and no more"


def test_it_sends_when_woken_and_ends_on_close(
    addresses: tuple[str, str], publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and not when it would have looked."""
    monkeypatch.setattr("common.serve.kv_publisher.POLL_S", 2 * LIMIT_S)
    source = Scripted([])
    publisher, reader = publish(source)
    publisher.start()
    for number in range(2):
        time.sleep(0.05)  # it waits
        source.batches.append([CLEARED])
        publisher.wake()
        assert reader.socket.poll(LIMIT_S * 1e3)
        assert int.from_bytes(reader.socket.recv_multipart()[1], "big") == number
    source.batches.append([CLEARED])
    begin = time.monotonic()
    publisher.close()
    assert time.monotonic() - begin < LIMIT_S
    assert not publisher._thread.is_alive() and not source.batches
    for address in addresses:
        wait_until_free(address)


def wait_until_free(address: str) -> None:
    """Soon after its socket is closed."""

    def is_free() -> bool:
        with suppress(ValueError):
            EventPublisher(Scripted([]), address).close()
            return True
        return False

    for _ in as_long_as(lambda: not is_free()):
        time.sleep(0.02)


@pytest.mark.parametrize("frames", [[b""], [b"x", bytes(8)], [b"", bytes(7)], [b"", b"", bytes(8)]])
def test_an_invalid_replay_request_is_not_answered(
    frames: list[bytes], publish: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, reader = publish(Scripted([]))
    publisher.start()
    reader.replays.send_multipart(frames)
    publisher.wake()
    for _ in as_long_as(lambda: not caplog.records, seconds=LIMIT_S):
        time.sleep(0.01)
    publisher.close()
    assert [record.message for record in caplog.records] == [
        "ignoring a replay request that is not \"'' | 8 bytes\""
    ]
    assert not reader.replays.poll(0)


@pytest.mark.parametrize(("num", "first", "num_anew"), [(5, 2, 1), (5, 3, 0), (0, 0, 0)])
def test_a_full_snapshot_is_sent_only_if_a_requested_message_was_dropped(
    num: int, first: int, num_anew: int, publish: Publish
) -> None:
    source = Scripted([[CLEARED]] * num)
    publisher, reader = publish(source, buffer_steps=2)
    reader.replays.send_multipart([b"", first.to_bytes(8, "big")])
    publisher.start()
    publisher.close()
    assert source.num_anew == num_anew


def test_it_may_end_in_its_own_thread(addresses: tuple[str, str]) -> None:
    """Where the collector finds its engine there."""
    source = Scripted([])
    publisher = EventPublisher(source, addresses[0])
    source.take = lambda: publisher.close() or iter(())
    publisher.start()
    publisher._thread.join(LIMIT_S)
    assert not publisher._thread.is_alive() and source.num_anew == 0


# -- an engine's


@pytest.fixture
def engine(oracle: Oracle, loaded, one_thread) -> Iterator[LLMEngine]:
    engine = engine_of(loaded, "hash")
    yield engine
    engine.close()


@pytest.fixture
def events(engine: LLMEngine) -> Iterator[KVEvents]:
    events = KVEvents(engine, LOOPBACK, LOOPBACK)
    yield events
    events.publisher.close()


@pytest.fixture
def reader(events: KVEvents) -> Iterator[Reader]:
    reader = Reader(events.publisher)
    yield reader
    reader.close()


def has_all_blocks(reader: Reader, engine: LLMEngine) -> Callable[[], bool]:
    return lambda: reader.next > 0 and reader.index.prefixes() == prefixes_of(engine.prefix_cache)


def test_a_late_reader_gets_every_block(engine: LLMEngine, reader: Reader, oracle: Oracle) -> None:
    rng = random.Random(3)
    serve(engine, oracle, [0, 1, 2], 4)
    reader.loses = lambda: rng.random() < 0.6
    for index in range(3, 12):
        serve(engine, oracle, [index], 4)
        reader.read()
    reader.loses = lambda: False
    serve(engine, oracle, [12], 4)  # a lost last message is learned from the next
    reader.read_until(has_all_blocks(reader, engine))
    assert reader.num_anew == 1, "all was kept"
    assert engine.reset_prefix_cache()
    reader.read_until(lambda: not reader.index.prefixes())


def begin_again(engine: LLMEngine, *addresses: str | None) -> KVEvents:
    """When the sockets of the life before are gone."""
    for _ in as_long_as(lambda: True, seconds=LIMIT_S):
        with suppress(ValueError):
            return KVEvents(engine, *addresses)
        time.sleep(0.01)
    raise AssertionError


def test_an_engine_that_begins_again_is_not_taken_for_the_one_before(
    engine: LLMEngine, events: KVEvents, reader: Reader, oracle: Oracle
) -> None:
    for _ in as_long_as(lambda: reader.last < 60, seconds=LIMIT_S):
        serve(engine, oracle, [0], 1)
        assert engine.reset_prefix_cache()
        reader.read()
    old, addresses = reader.last, (events.publisher.endpoint, events.publisher.replay_endpoint)
    events.take_out(engine)
    again = begin_again(engine, *addresses)
    for _ in as_long_as(lambda: not reader.num_restarts, seconds=LIMIT_S):  # until it is connected
        assert engine.reset_prefix_cache()
        serve(engine, oracle, [0], 1)
        reader.read()
    assert reader.last < old
    reader.read_until(has_all_blocks(reader, engine))
    again.take_out(engine)


def test_taken_out_it_leaves_the_engine_as_it_was(
    engine: LLMEngine, oracle: Oracle, tmp_path: Path
) -> None:
    """Also with a watching reader."""
    plugins, listener = engine.scheduler.plugins, engine.prefix_cache.listener
    engine.watch(tmp_path / "run.jsonl")
    events = KVEvents(engine, LOOPBACK, LOOPBACK)
    reader = Reader(events.publisher)
    serve(engine, oracle, [0, 1], 4)
    reader.read_until(has_all_blocks(reader, engine))
    assert reader.index.prefixes()
    engine.unwatch()
    serve(engine, oracle, [2, 3], 4)
    reader.read_until(has_all_blocks(reader, engine))
    events.take_out(engine)
    reader.read_until(lambda: not reader.index.prefixes())
    assert (engine.scheduler.plugins, engine.prefix_cache.listener) == (plugins, listener)
    assert not events.publisher._thread.is_alive()
    reader.close()


def test_an_address_that_cannot_be_had_changes_nothing(
    engine: LLMEngine,
    events: KVEvents,
    loaded,
    addresses: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, plugins = events.publisher.endpoint, engine.scheduler.plugins
    listener = engine.prefix_cache.listener
    for wrong in [(taken, None), (LOOPBACK, taken), ("nowhere", None)]:
        name = "kv_events_replay" if wrong[1] else "kv_events"
        with pytest.raises(ValueError, match=rf"^{name} must .*'tcp://\*:5557', got '"):
            KVEvents(engine, *wrong)
    assert engine.scheduler.plugins == plugins and engine.prefix_cache.listener is listener
    with pytest.raises(ValueError) as caught:
        EventPublisher(Scripted([]), addresses[0], taken)

    wait_until_free(addresses[0])  # the sockets are closed, though `caught` has them
    assert caught.tb
    monkeypatch.setattr(CacheChanges, "put_in", lambda changes: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        KVEvents(engine, addresses[1])
    wait_until_free(addresses[1])
    assert engine.scheduler.plugins == plugins
    with pytest.raises(ValueError, match="kv_events needs a prefix cache"):
        KVEvents(engine_of(loaded, None), LOOPBACK)


def test_it_ends_with_its_engine(loaded) -> None:
    publisher = KVEvents(engine_of(loaded, "hash"), LOOPBACK).publisher
    gc.collect()
    publisher._thread.join(LIMIT_S)
    assert not publisher._thread.is_alive()


def test_an_adapter_goes_by_the_name_that_requests_have_for_it(shipped_loaded, one_thread) -> None:
    """By each of several: vLLM hashes the name, so a router looks for its blocks under both."""
    config = EngineConfig(block_size=4, num_blocks=60, adapters={"tests": SHIPPED_ADAPTER})
    engine = LLMEngine(config, loaded=shipped_loaded)
    events = KVEvents(engine, LOOPBACK, LOOPBACK)
    reader = Reader(events.publisher)
    prompts = [list(range(9))] * 2
    engine.generate_batch(prompts, greedy_params(2), adapter=[None, "tests"])
    reader.read_until(lambda: len(reader.index.prefixes()) == 4)
    assert {adapter for adapter, *_ in reader.index.prefixes()} == {None, "tests"}
    for change, expected in (
        (partial(engine.load_adapter, "again", SHIPPED_ADAPTER), {None, "tests", "again"}),
        (partial(engine.unload_adapter, "tests"), {None, "again"}),
        (partial(engine.prefix_cache.evict, 60), set[str | None]()),
    ):
        change()
        engine.generate_batch([[7]], greedy_params(1))  # a step, and no block
        reader.read_until(lambda e=expected: {a for a, *_ in reader.index.prefixes()} == e)
        by_name = {a: {t for b, *_, t in reader.index.prefixes() if b == a} for a in expected}
        assert len({frozenset(tokens) for tokens in by_name.values()}) <= 1, "the same prefixes"
    reader.close()
    events.take_out(engine)
    engine.close()
