"""A reader of the stream knows which blocks are cached and where, from any start on; its bytes are
vLLM's, and a reader that misses messages recovers their contents."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgpack
import pytest

from block_pool import BlockPool
from cache_checks import cached_prefixes
from common.engine import LLMEngine
from common.engine_config import SHIPPED_ADAPTER, EngineConfig
from common.serve import kv_events, kv_publisher
from common.serve.conftest import wait_for
from common.serve.kv_events import CacheStream, KVEvents
from common.serve.kv_publisher import END, EventPublisher
from common.serve.kv_wire import CLEARED, GPU, Event, pack_batch
from common.tests.engine_oracle import Oracle, greedy_params, serve, serve_a_crowd
from kv_slots import PREFIX_CACHES
from prefix_cache import PrefixCache

HERE = Path(__file__).parent
RECORD = json.loads((HERE / "vllm_kv_events.json").read_text())
LIMIT_S = 20.0
LOOPBACK = "tcp://127.0.0.1:*"
CACHES = pytest.mark.parametrize("kind", ["hash", "radix"])


class Index:
    """It knows nothing but the stream."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[str, Any]] = {}
        self.held: set[int] = set()

    def apply(self, payload: bytes) -> None:
        _, events, rank = msgpack.unpackb(payload)
        assert rank == 0 and events
        for event in events:
            names = event.get("block_hashes", ())
            if event == CLEARED:
                self.held.clear()
                self.blocks.clear()
            elif event["type"] == "BlockRemoved":
                assert self.held >= set(names), "removed, and never stored"
                self.held -= set(names)
            else:
                self._store(event)

    def _store(self, event: Event) -> None:
        parent, size = event["parent_block_hash"], event["block_size"]
        names, tokens = event["block_hashes"], event["token_ids"]
        each_keys = event.get("extra_keys") or [None] * len(names)
        assert event["medium"] == GPU and (parent is None or parent in self.held)
        assert len(tokens) == size * len(names)
        for index, (name, keys) in enumerate(zip(names, each_keys, strict=True)):
            own = tuple(tokens[index * size : (index + 1) * size])
            block = dict(parent=parent, tokens=own, adapter=event["lora_name"], keys=keys or [])
            assert self.blocks.setdefault(name, block) == block, "one hash, two contents"
            assert name not in self.held, "stored twice"
            self.held.add(name)
            parent = name

    def prefixes(self) -> set[tuple]:
        """What the device has: keys and tokens of each whole prefix."""
        found = set()
        for name in self.held:
            path = [self.blocks[name]]
            while (parent := path[-1]["parent"]) is not None:
                path.append(self.blocks[parent])
            adapter, keys = path[-1]["adapter"], path[-1]["keys"]
            named = [adapter] if adapter else []
            assert all((b["keys"], b["adapter"]) == (named, adapter) for b in path[:-1])
            assert keys[: len(named)] == named
            tokens = sum((block["tokens"] for block in reversed(path)), ())
            found.add((adapter, *keys[len(named) :], tokens))
        return found


def prefixes_of(cache: PrefixCache) -> set[tuple]:
    found = set()
    for prefix in cached_prefixes(cache):
        named = {tag: value.removeprefix("str:") for tag, value in prefix.extra_keys}
        salts = [named["salt"]] if "salt" in named else []
        found.add((named.get("lora"), *salts, prefix.token_ids))
    return found


def take(stream: CacheStream, index: Index) -> list[Event]:
    """Over the wire's bytes."""
    events = []
    for batch in stream.take():
        assert len(batch) <= kv_events.MAX_EVENTS
        size = sum(len(event.get("token_ids", ())) for event in batch)
        assert len(batch) == 1 or size <= kv_events.MAX_TOKENS
        index.apply(pack_batch(batch, 0.0))
        events += batch
    return events


def check(stream: CacheStream, index: Index, cache: PrefixCache) -> list[Event]:
    events = take(stream, index)
    assert index.prefixes() == prefixes_of(cache)
    return events


def engine_of(loaded, kind: str | None, **config: Any) -> LLMEngine:
    config |= {"block_size": 4, "num_blocks": 60, "max_num_seqs": 5, "check_invariants": True}
    return LLMEngine(EngineConfig(prefix_cache=kind, **config), loaded=loaded)


class Reader:
    """A subscriber, who asks again for what it has missed."""

    def __init__(self, publisher: EventPublisher) -> None:
        import zmq

        context = zmq.Context.instance()
        self.socket = context.socket(zmq.SUB)
        self.replays = context.socket(zmq.DEALER)
        self.socket.connect(publisher.endpoint)
        self.socket.subscribe("")
        assert publisher.replay_endpoint is not None
        self.replays.connect(publisher.replay_endpoint)
        self.index = Index()
        self.next = 0
        self.num_anew = 0
        self.loses: Callable[[], bool] = lambda: False

    def read(self) -> None:
        """One batch, if there is one soon, and what was missed before it."""
        if not self.socket.poll(50):
            return
        _, sequence, batch = self.socket.recv_multipart()
        if self.loses():
            return
        if int.from_bytes(sequence, "big") > self.next:
            self.catch_up()
        self.take(sequence, batch)

    def catch_up(self) -> None:
        """Once: the batches that are kept no more come anew."""
        self.replays.send_multipart([b"", self.next.to_bytes(8, "big")])
        while (parts := frames(self.replays))[2] != END:
            self.take(*parts[2:])

    def take(self, sequence: bytes, batch: bytes) -> None:
        number = int.from_bytes(sequence, "big")
        is_anew = msgpack.unpackb(batch)[1][0] == CLEARED
        if number == self.next or (is_anew and number > self.next):
            self.num_anew += is_anew
            self.index.apply(batch)
            self.next = number + 1

    def read_until(self, is_enough: Callable[[], bool]) -> None:
        wait_for(lambda: is_enough() or self.read())

    def close(self) -> None:
        self.socket.close(0)
        self.replays.close(0)


def frames(socket: Any) -> list[bytes]:
    assert socket.poll(LIMIT_S * 1e3)
    return socket.recv_multipart()


class Quiet:
    """In place of a publisher: the test takes the stream."""

    streams: ClassVar[list[CacheStream]] = []

    def __init__(self, stream: CacheStream, *_: Any) -> None:
        self.streams.append(stream)

    def close(self) -> None:
        pass


@contextmanager
def observed(engine: Any) -> Iterator[tuple[CacheStream, Index]]:
    """Observe the cache. Yields the stream, and an index that has read nothing yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_events, "EventPublisher", Quiet)
        events = KVEvents(engine, "")
        yield Quiet.streams.pop(), Index()
        events.close()


class Owner:
    """What `KVEvents` needs of an engine."""

    kv_manager = None

    def __init__(self, cache: PrefixCache) -> None:
        self.prefix_cache = cache
        self.adapters_by_digest: dict[str, list[str]] = {}


# -- the cache alone


def work(cache: PrefixCache, rng: random.Random) -> None:
    """Something that changes what is cached, one way or another."""
    choice = rng.randrange(40)
    if choice < 28:
        keys = [("lora", rng.choice([None, "d1", "d2"])), ("salt", rng.choice([None, None, "a b"]))]
        tokens = rng.choices(range(3), k=rng.randint(2, 18))
        cache.cache_computed_blocks(tokens, [(tag, value) for tag, value in keys if value])
    elif choice < 36:
        cache.evict(rng.randint(1, 5))
    elif choice < 38:
        cache.withdraw_all()
    elif choice < 39:
        assert cache.reset()
    else:
        cache.clear()
        cache.pool.free([block for block in cache.pool.blocks[1:] if block.ref_cnt])


@pytest.mark.net
@CACHES
@pytest.mark.parametrize("max_events", [4, 100_000])
def test_the_stream_alone_determines_the_cached_blocks(
    kind: str, max_events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thread that comes late; a chain is one event, and no batch is too large."""
    monkeypatch.setattr(kv_events, "MAX_EVENTS", max_events)
    monkeypatch.setattr(kv_events, "MAX_TOKENS", 3 * max_events)
    max_cached = 0
    for seed in range(20):
        rng = random.Random(seed)
        cache = PREFIX_CACHES[kind](BlockPool(24), 2)
        owner = Owner(cache)
        with observed(owner) as (stream, index):
            check(stream, index, cache)
            for _ in range(60):
                work(cache, rng)
                if rng.random() < 0.5:
                    assert CLEARED not in check(stream, index, cache)[1:], f"seed {seed}"
                max_cached = max(max_cached, cache.num_cached_blocks)
            assert cache.reset() and check(stream, index, cache) in ([], [CLEARED])
            cache.cache_computed_blocks([1, 2] * 3)
            assert len(check(stream, index, cache)) == 1, f"seed {seed}"
            assert cache.reset() and check(stream, index, cache) == [CLEARED], f"seed {seed}"
            assert not stream._held, f"seed {seed}: what is nowhere is forgotten"
    assert max_cached == 23


# -- an engine's


@pytest.mark.net
@pytest.mark.sample
@CACHES
def test_after_each_step_the_stream_says_what_is_cached(
    kind: str, oracle: Oracle, loaded, one_thread
) -> None:
    engine = engine_of(loaded, kind, preempt_every=7)
    seen = set[str]()
    with observed(engine) as (stream, index):

        def look(_: object = None) -> None:
            events = check(stream, index, engine.prefix_cache)
            seen.update(event["type"] for event in events)

        engine.on_step = look
        serve_a_crowd(engine, oracle, random.Random(5), 5, salts=[None, "a", "b"], num_requests=20)
        assert engine.stats().num_preemptions and engine.reset_prefix_cache()
        look()
    assert seen == {"BlockStored", "BlockRemoved", "AllBlocksCleared"} and not index.held
    engine.close()


# -- the bytes


@pytest.mark.parametrize("batch", RECORD["batches"], ids=lambda batch: batch["name"])
def test_a_batch_has_the_bytes_that_vllm_gives_it(batch: dict) -> None:
    """But for the length of a map, which msgspec writes in three bytes where one is enough."""
    (now, events, rank) = batch["content"]
    theirs = bytes.fromhex(batch["bytes"])
    shorter = theirs
    for length in {len(event) for event in events}:
        shorter = shorter.replace(bytes([0xDE, 0, length]), bytes([0x80 + length]))
    assert rank == 0 and pack_batch(events, now) == shorter
    assert msgpack.unpackb(theirs) == batch["content"]


# -- a publisher


class Scripted:
    """Says what it is told to, once."""

    def __init__(self, batches: list[list[Event]]) -> None:
        self.batches = batches
        self.num_anew = 0

    def take(self) -> Iterator[list[Event]]:
        while self.batches:
            yield self.batches.pop(0)

    def restart_stream(self) -> None:
        self.num_anew += 1


Publish = Callable[..., tuple[EventPublisher, Reader]]


@pytest.fixture
def publish() -> Iterator[Publish]:
    """Return a function that makes a publisher and a reader of it."""
    with ExitStack() as stack:

        def _publish(source: Any) -> tuple[EventPublisher, Reader]:
            publisher = EventPublisher(source, LOOPBACK, LOOPBACK)
            reader = stack.enter_context(closing(Reader(publisher)))
            return stack.enter_context(closing(publisher)), reader

        yield _publish


def test_the_frames_are_those_that_vllm_s_publisher_sent(
    publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invalid replay request is not answered, and the end sends what is left."""
    contents = [batch["content"] for batch in RECORD["batches"]]
    times = iter([*(now for now, *_ in contents), 1.0])
    clock = SimpleNamespace(time=lambda: next(times))
    monkeypatch.setattr(kv_publisher, "time", clock)
    monkeypatch.setattr(kv_publisher, "TOPIC", b"kv")
    source = Scripted([])
    publisher, reader = publish(source)
    time.sleep(0.2)  # until the reader has subscribed
    source.batches += [events for _, events, _ in contents]
    for expected, batch in zip(RECORD["heads"], RECORD["batches"], strict=True):
        *heads, payload = frames(reader.socket)
        assert [part.hex() for part in heads] == expected
        assert msgpack.unpackb(payload) == batch["content"]
    for wrong in [b"nonsense"], [b""], [b"x", bytes(8)], [b"", bytes(7)], [b"", b"", bytes(8)]:
        reader.replays.send_multipart(wrong)
    reader.replays.send_multipart([b"", (6).to_bytes(8, "big")])
    for expected in RECORD["replay"]:
        *heads, payload = frames(reader.replays)
        assert [part.hex() for part in heads] == expected[:-1]
        theirs = bytes.fromhex(expected[-1])
        assert payload == theirs or msgpack.unpackb(payload) == msgpack.unpackb(theirs)
    source.batches.append([CLEARED])
    publisher.close()
    assert msgpack.unpackb(frames(reader.socket)[2])[1] == [CLEARED]
    assert not reader.replays.poll(0)


def test_a_full_snapshot_is_sent_only_if_a_requested_message_was_dropped(
    publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_publisher, "BUFFER_STEPS", 2)
    for num, first, num_anew in (5, 2, 1), (5, 3, 0), (0, 0, 0):
        source = Scripted([[CLEARED]] * num)
        publisher, reader = publish(source)
        wait_for(lambda source=source: not source.batches)
        reader.next = first
        reader.catch_up()
        publisher.close()
        assert source.num_anew == num_anew


# -- an engine's publisher


@contextmanager
def heard(engine: LLMEngine) -> Iterator[Reader]:
    """A reader; when it ends, the cache's listener is the one that it was."""
    listener = engine.prefix_cache.listener
    events = KVEvents(engine, LOOPBACK, LOOPBACK)
    with closing(engine), closing(Reader(events.publisher)) as reader:
        yield reader
        events.close()
        reader.read_until(lambda: not reader.index.prefixes())
    assert engine.prefix_cache.listener is listener
    assert not events.publisher._thread.is_alive()


def test_a_late_reader_gets_every_block(oracle: Oracle, loaded, one_thread, tmp_path: Path) -> None:
    """Also with a watching reader, who leaves before."""
    rng = random.Random(3)
    engine = engine_of(loaded, "hash")
    with heard(engine) as reader:
        engine.watch(tmp_path / "run.jsonl")
        reader.loses = lambda: rng.random() < 0.6
        for index in range(12):
            serve(engine, oracle, [index], 4)
            reader.read()
        reader.loses = lambda: False
        engine.unwatch()
        serve(engine, oracle, [12], 4)  # a lost last message is learned from the next
        wanted = prefixes_of(engine.prefix_cache)
        reader.read_until(lambda: reader.next > 0 and reader.index.prefixes() == wanted)
        assert reader.num_anew == 1, "all was kept"


def test_an_address_that_cannot_be_had_changes_nothing(publish: Publish, loaded) -> None:
    taken = publish(Scripted([]))[0].endpoint
    engine = engine_of(loaded, "hash")
    for wrong in [(taken, None), (LOOPBACK, taken), ("nowhere", None)]:
        name = "kv_events_replay" if wrong[1] else "kv_events"
        with pytest.raises(ValueError, match=rf"^{name} must .*'tcp://\*:5557', got '"):
            KVEvents(engine, *wrong)
    assert engine.prefix_cache.listener is None
    engine.generate_batch([list(range(9))], greedy_params(1))
    with pytest.raises(ValueError, match="kv_events needs an empty prefix cache"):
        KVEvents(engine, LOOPBACK)
    with pytest.raises(ValueError, match="kv_events needs a prefix cache"):
        KVEvents(engine_of(loaded, None), LOOPBACK)


def test_an_adapter_goes_by_the_name_that_requests_have_for_it(shipped_loaded, one_thread) -> None:
    """By the first of several."""
    config = EngineConfig(block_size=4, num_blocks=60, adapters={"tests": SHIPPED_ADAPTER})
    with heard(engine := LLMEngine(config, loaded=shipped_loaded)) as reader:
        engine.load_adapter("again", SHIPPED_ADAPTER)
        engine.generate_batch([list(range(9))] * 2, greedy_params(2), adapter=[None, "again"])
        names = {None, "tests"}
        reader.read_until(lambda: {name for name, *_ in reader.index.prefixes()} == names)
