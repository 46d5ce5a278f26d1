"""The calls that a sequence shows are made, in this order."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import pytest

from block_pool import BlockPool
from bounded_loops import as_long_as
from common.llm import LLM
from global_kv_pool import GlobalKVPool, copy_in_process
from kv_memory import ComputedBlocks, NotReady
from kv_store import KVStore, SharedStore
from loading_kv_cache_manager import LoadingKVCacheManager
from pool_connector import PoolConnector
from prefix_cache import KeyedRequest
from prefix_cache_local import PrefixCacheLocal
from request import SamplingParams
from tiered_cache import KVTierConfig, TieredCache
from workshop.book.picture import Call, Picture

# -- a step of the engine: drawn boxes and the functions that run. Boxes without a function are
# returned

FUNCTIONS = {
    "step": "EngineCore.step",
    "schedule": "Scheduler.schedule",
    "get_computed_blocks": "CachedKVCacheManager.get_computed_blocks",
    "allocate_slots": "CachedKVCacheManager.allocate_slots",
    "execute(plan)": "PagedModelRunner.execute",
    "lays out": "compose",
    "forward": "DecoderModel.forward",
    "begin": "AsyncStepOutput.begin",
    "handle.wait()": "AsyncStepOutput.wait",
    "update_from_output": "PreemptiveScheduler.update_from_output",
    "process": "OutputProcessor.process",
}


@pytest.fixture(scope="module")
def called() -> list[str]:
    """Every function of one step in which a request is admitted, by its qualified name."""
    engine = LLM(num_blocks=50).engine
    engine.add_request("a", "def f(x):", SamplingParams(temperature=0, max_tokens=2))
    names: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            owner = frame.f_locals.get("self")
            name = frame.f_code.co_name
            kinds = [] if owner is None else [kind.__name__ for kind in type(owner).__mro__]
            defined = [k for k in kinds if name in vars(_class_of(owner, k))]
            names.append(f"{defined[0]}.{name}" if defined else name)
            names.extend(f"{kind}.{name}" for kind in defined[1:])

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return names


def _class_of(owner: object, name: str) -> type:
    return next(kind for kind in type(owner).__mro__ if kind.__name__ == name)


def test_a_step_makes_the_calls_that_are_drawn_in_this_order(called: list[str]) -> None:
    drawn = [label for *_, label in Picture("step_calls").calls("calls")]
    assert set(drawn) - FUNCTIONS.keys() == {"plan", "token ids"}
    must_contain(called, [FUNCTIONS[label] for label in drawn if label in FUNCTIONS])


def must_contain(log: list, drawn: list) -> None:
    """In this order; what is polled for may be asked more often."""
    rest = iter(log)
    for call in drawn:
        assert call in rest, f"{call} is not made, or not there"


# -- KV that goes down the tiers and comes back, and through a pool

BLOCK_SIZE = 2
NAMESPACE = (("model", "drawn"),)
PROMPT_IDS = [1, 2, 3, 4, 5]  # two full blocks, and the token that is computed in any case


class TracedIO:
    """The KV memory of a device."""

    block_nbytes = 8

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}

    def read_block(self, block_id: int) -> bytes:
        return self.blocks.get(block_id, bytes(8))

    def write_block(self, block_id: int, data: bytes | memoryview) -> None:
        self.blocks[block_id] = bytes(data)


def spy(log: list[Call], start: str, stop: str, part: object, *names: str) -> None:
    """Calls of these methods of `part` are written down from here on."""

    def make(name: str) -> Callable[..., Any]:
        method = getattr(part, name)

        def called(*arguments: Any, **keywords: Any) -> Any:
            log.append((start, stop, name))
            return method(*arguments, **keywords)

        return called

    for name in names:
        setattr(part, name, make(name))


def say(log: list[Call], start: str, stop: str, answer: object) -> None:
    if isinstance(answer, NotReady):
        answer = f"NotReady.{answer.name}"
    elif isinstance(answer, ComputedBlocks):
        answer = "ComputedBlocks"
    log.append((start, stop, str(answer)))


@dataclass(frozen=True, slots=True)
class TierRun:
    calls: list[Call]
    num_evicted: int
    num_from_host: int
    num_from_disk: int


def tier_run() -> TierRun:
    """a is computed and ends; b needs its blocks; a's prompt comes again. The host has room for one
    block, so the other goes to disk. The reader waits until it was asked for once."""
    log: list[Call] = []
    io, pool, may_read = TracedIO(), BlockPool(5), threading.Event()
    tiers = TieredCache(KVTierConfig(host_blocks=1, disk_blocks=4))
    tiers.bind(io, BLOCK_SIZE, NAMESPACE)
    spy(log, "manager", "tiers", tiers, "blocks_evicted", "get_num_new_matched_tokens",
        "update_state_after_alloc", "get_finished_load")  # fmt: skip
    spy(log, "tiers", "device", io, "read_block", "write_block")
    spy(log, "tiers", "reader", tiers._loads, "start")
    disk = tiers.disk
    assert disk is not None
    spy(log, "reader", "disk", disk, "read")
    read = disk.read
    disk.read = lambda link: read(link) if may_read.wait(20) else b""
    spy(log, "tiers", "disk", disk, "put")
    try:
        cache = PrefixCacheLocal(pool=pool, block_size=BLOCK_SIZE, listener=tiers)
        manager = LoadingKVCacheManager(pool, BLOCK_SIZE, cache, tiers)
        spy(log, "scheduler", "manager", manager, "get_computed_blocks", "allocate_slots")
        params = SamplingParams(max_tokens=1)

        def serve(name: str, tokens: list[int]) -> None:
            request = KeyedRequest(name, tokens, params)
            computed = manager.get_computed_blocks(request)
            assert isinstance(computed, ComputedBlocks)
            assert manager.allocate_slots(request, len(tokens), 0, computed)
            manager.cache_blocks(request, len(tokens))
            manager.free(request)

        serve("a", PROMPT_IDS)
        serve("b", [6, 7, 8, 9, 10, 11, 12])
        num_evicted = sum(name == "read_block" for *_, name in log)
        again = KeyedRequest("c", PROMPT_IDS, params)
        say(log, "manager", "scheduler", manager.get_computed_blocks(again))
        may_read.set()
        for _ in as_long_as(lambda: manager.get_computed_blocks(again) is NotReady.LOADING, 2000):
            tiers.wait_for_load(0.01)
        computed = manager.get_computed_blocks(again)
        assert isinstance(computed, ComputedBlocks)
        say(log, "tiers", "manager", f"{computed.num_tokens} tokens")
        say(log, "manager", "scheduler", computed)
        return TierRun(log, num_evicted, tiers.stats.num_host_hits, tiers.stats.num_disk_hits)
    finally:
        may_read.set()
        tiers.close()


def pool_run() -> list[Call]:
    """Engine 1 has computed the prompt, engine 2 is asked for it."""
    log: list[Call] = []

    def copy(*arguments: Any) -> Any:
        log.append(("pool", "thread", "copy"))
        return copy_in_process(*arguments)

    with closing(GlobalKVPool(transport=copy)) as pool:
        connectors = []
        for number in (1, 2):
            seen = _Watched(pool, log, f"connector {number}")
            connector = PoolConnector(cast(SharedStore, seen), f"node {number}", load_timeout_s=20)
            io = TracedIO()
            connector.bind(io, BLOCK_SIZE, NAMESPACE)
            spy(log, f"connector {number}", f"memory {number}", io, "read_block", "write_block")
            spy(log, f"engine {number}", f"connector {number}", connector, "request_finished",
                "get_num_new_matched_tokens", "update_state_after_alloc",
                "get_finished_load")  # fmt: skip
            connectors.append(connector)
        params = SamplingParams(max_tokens=1)
        first, second = connectors
        first.request_finished(KeyedRequest("a", PROMPT_IDS, params), [1, 2])
        request = KeyedRequest("b", PROMPT_IDS, params)
        num_tokens, _ = second.get_num_new_matched_tokens(request, 0)
        say(log, "connector 2", "engine 2", f"{num_tokens} tokens")
        second.update_state_after_alloc(request, [5, 6], num_tokens)
        arrived: list[int] = []
        for _ in as_long_as(lambda: not arrived, 2000):
            second.wait_for_load(0.01)
            num_arrived = second.get_finished_load("b")
            if num_arrived is not None:
                arrived.append(num_arrived)
        say(log, "connector 2", "engine 2", f"{arrived[0]} tokens")
    return log


class _Watched:
    """A pool as one engine sees it."""

    def __init__(self, pool: GlobalKVPool, log: list[Call], lane: str) -> None:
        self._pool, self._log, self._lane = pool, log, lane

    def at_node(self, node_id: str) -> KVStore:
        store = self._pool.at_node(node_id)
        spy(self._log, self._lane, "pool", store, "has", "get", "put")
        return store


def test_the_calls_between_the_tiers() -> None:
    """`4 tokens` is said at the end of the run, when it is known that they came."""
    picture, run = Picture("tiers_sequence"), tier_run()
    for group in ("down", "up"):
        drawn = picture.calls(group)
        must_contain(run.calls, [call for call in drawn if call[2] != "4 tokens"])
    assert ("tiers", "manager", "4 tokens") in run.calls
    came = f"{run.num_from_host} block came from the host, {run.num_from_disk} from disk."
    texts = picture.texts()
    assert f"Down: {run.num_evicted} blocks are evicted" in texts
    assert any(text.startswith(came) for text in texts)


def test_the_calls_of_two_engines_with_a_pool() -> None:
    picture = Picture("pool_sequence")
    must_contain(pool_run(), picture.calls("published") + picture.calls("fetched"))
