"""The pool against a naive model of "least recently used", and threads that use it."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bounded_loops import as_long_as
from global_kv_pool import GlobalKVPool, KVBlock, TransferResult

HASHES = [bytes([i]) * 32 for i in range(8)]
TOKENS = {h: tuple(range(i, i + 2 + i % 2)) for i, h in enumerate(HASHES)}  # 2 or 3 tokens
WAIT_S = 20.0  # never waited for, unless the test fails


def kv_of(block_hash: bytes, made_by: str = "any") -> bytes:
    return block_hash + made_by.encode()


def publish(pool: GlobalKVPool, node_id: str, *indices: int, made_by: str = "any") -> list[bool]:
    hashes = [HASHES[i] for i in indices]
    return [pool.publish(h, node_id, TOKENS[h], kv_of(h, made_by)) for h in hashes]


def transfer(pool: GlobalKVPool, indices, target: str, request_id: str = "r") -> TransferResult:
    pool.async_transfer(request_id, [HASHES[i] for i in indices], target)
    return finish(pool, request_id)


def finish(pool: GlobalKVPool, request_id: str = "r") -> TransferResult:
    for _ in as_long_as(lambda: not pool.is_transfer_complete(request_id), seconds=WAIT_S):
        time.sleep(0.0005)
    return pool.transfer_result(request_id)


def arrived(result: TransferResult) -> list[int]:
    """Indices of the blocks, each of which is as published."""
    for block in result.blocks:
        assert block.is_intact and block.token_ids == TOKENS[block.block_hash]
        assert block.kv_data.startswith(block.block_hash)
    return [HASHES.index(block.block_hash) for block in result.blocks]


def on_node(pool: GlobalKVPool, node_id: str) -> list[int]:
    """The blocks of a node, least recently used first."""
    return [HASHES.index(block_hash) for block_hash in pool._nodes.get(node_id, ())]


@contextmanager
def make_pool(*args, **kwargs) -> Iterator[GlobalKVPool]:
    """Closed and checked at the end."""
    pool = GlobalKVPool(*args, **kwargs)
    try:
        yield pool
        pool.check_invariants()
    finally:
        pool.close()
    pool.check_invariants()


# -- against a naive model


class NaiveNodes:
    """Every copy with the time of its last use and the time it came; eviction is a search."""

    def __init__(self, max_blocks_per_node: int) -> None:
        self.max_blocks = max_blocks_per_node
        self.copies: dict[tuple[str, int], dict] = {}
        self.time = 0

    def tick(self) -> int:
        self.time += 1
        return self.time

    def of_node(self, node_id: str) -> list[int]:
        copies = [(c["used"], i) for (node, i), c in self.copies.items() if node == node_id]
        return [i for _, i in sorted(copies)]

    def holders(self, i: int) -> list[str]:
        return [n for _, n in sorted((c["came"], n) for (n, j), c in self.copies.items() if j == i)]

    def use(self, copies: list[tuple[str, int]]) -> None:
        for copy in copies[::-1]:
            self.copies[copy]["used"] = self.tick()

    def put(self, node_id: str, i: int, kv_data: bytes) -> bool:
        if (node_id, i) in self.copies:
            self.use([(node_id, i)])
            return False
        if len(self.of_node(node_id)) == self.max_blocks:
            del self.copies[node_id, self.of_node(node_id)[0]]
        now = self.tick()
        self.copies[node_id, i] = {"used": now, "came": now, "kv": kv_data}
        return True

    def query(self, indices: list[int]) -> tuple[int, list[str]]:
        nodes: list[str] = []
        for i in indices:
            holders = self.holders(i)
            if not holders:
                break
            nodes.append(nodes[-1] if nodes and nodes[-1] in holders else holders[0])
        self.use(list(zip(nodes, indices, strict=False)))
        return sum(len(TOKENS[HASHES[i]]) for i in indices[: len(nodes)]), nodes

    def transfer(
        self, indices: list[int], target: str, broken: str
    ) -> tuple[list[bytes], list[tuple[str, int]]]:
        """The bytes that arrive, and the copies that are sent, one after the other until one is
        good. Nodes in `broken` fail."""
        chosen, data, sent = [], [], []
        sources = [sorted(self.holders(i), key=lambda node: node != target) for i in indices]
        for i, nodes in zip(indices, sources, strict=True):
            if not nodes:
                break
            chosen.append((nodes[0], i))
        self.use(chosen)
        for (_, i), nodes in zip(chosen, sources, strict=False):
            is_bad = [node in broken and node != target for node in nodes]
            num_bad = is_bad.index(False) if False in is_bad else len(nodes)
            sent += [(node, i) for node in nodes[: num_bad + 1] if node != target]
            if num_bad == len(nodes):
                break
            data.append((i, self.copies[nodes[num_bad], i]["kv"]))
        for i, kv_data in reversed(data):
            self.put(target, i, kv_data)
        return [kv_data for _, kv_data in data], sent


NODES = st.sampled_from("abc")
CHAINS = st.lists(st.integers(0, 4), unique=True, max_size=5)


class GlobalPoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = GlobalKVPool(3, transport=self.transport, num_transfer_threads=1)
        self.model = NaiveNodes(3)
        self.count = 0
        self.broken, self.raises = "", False  # else wrong bytes arrive
        self.sent: list[tuple[str, int]] = []
        for node_id, chain in (("a", [0, 1, 2]), ("b", [3, 2, 1])):
            for i in chain:
                assert publish(self.pool, node_id, i) == [True]
                self.model.put(node_id, i, kv_of(HASHES[i]))

    def transport(self, block: KVBlock) -> bytes:
        self.sent.append((block.node_id, HASHES.index(block.block_hash)))
        if block.node_id not in self.broken:
            return block.kv_data
        if self.raises:
            raise OSError("cable cut")
        return kv_of(HASHES[7])

    @rule(node_id=NODES, chain=CHAINS)
    def publish(self, node_id, chain):
        for i in chain:
            self.count += 1
            made_by = f"{node_id}{self.count}"  # each publication can be told from any other
            is_new = publish(self.pool, node_id, i, made_by=made_by) == [True]
            assert is_new == self.model.put(node_id, i, kv_of(HASHES[i], made_by))

    @rule(chain=CHAINS)
    def query(self, chain):
        assert self.pool.query([HASHES[i] for i in chain]) == self.model.query(chain)

    @rule(
        chain=CHAINS,
        node_id=NODES,
        broken=st.sampled_from(["", "a", "b", "ab"]),
        raises=st.booleans(),
    )
    def transfer(self, chain, node_id, broken, raises):
        self.broken, self.raises = broken, raises
        self.sent.clear()
        expected, sent = self.model.transfer(chain, node_id, broken)
        result = transfer(self.pool, chain, node_id)
        assert [block.kv_data for block in result.blocks] == expected
        assert {block.node_id for block in result.blocks} <= {node_id}
        assert self.sent == sent, "the target's own copy is not sent, and no second good one"
        if len(expected) == len(chain):
            assert result.error is None
        elif not self.model.holders(chain[len(expected)]):
            assert f"block {len(expected)}: not in the pool" in result.error
        else:
            assert "node '" in result.error

    @rule(i=st.integers(0, 5))
    def invalidate(self, i):
        self.pool.invalidate([HASHES[i]])
        for node_id in self.model.holders(i):
            del self.model.copies[node_id, i]

    @invariant()
    def same(self):
        self.pool.check_invariants()
        for node_id in "abc":
            assert on_node(self.pool, node_id) == self.model.of_node(node_id)
        assert self.pool.total_cached_blocks == len(self.model.copies)

    def teardown(self):
        self.pool.close()


TestGlobalPoolMachine = pytest.mark.net(GlobalPoolMachine.TestCase)
TestGlobalPoolMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_missing_block_ends_the_transfer_and_what_is_before_it_arrives():
    with make_pool() as pool:
        publish(pool, "a", 0, 2)
        result = transfer(pool, [0, 1, 2], "b")
        assert arrived(result) == [0] == on_node(pool, "b")
        assert "block 1" in result.error


REFUSED = [
    ({"max_blocks_per_node": 0}, "max_blocks_per_node must be > 0, got 0"),
    ({"transfer_timeout_s": 0}, "transfer_timeout_s must be > 0, got 0"),
    ({"num_transfer_threads": 0}, "num_transfer_threads must be > 0, got 0"),
    ((1, "a", ()), r"token_ids must be non-empty here, got \(\)"),
    ((0, "a", ()), r"token_ids must be \(0, 1\) here, got \(\)"),
    ((0, "a", (0, 2)), r"token_ids must be \(0, 1\) here, got \(0, 2\)"),
    ((0, "b", (0, 1, 2)), r"token_ids must be \(0, 1\) here, got \(0, 1, 2\)"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_wrong_numbers_and_other_tokens_of_a_known_hash_are_refused(wrong, message):
    """Trap 1: a hash stands for one content, on all nodes."""
    with make_pool() as pool:
        publish(pool, "a", 0)
        with pytest.raises(ValueError, match=message):
            if isinstance(wrong, dict):
                GlobalKVPool(**wrong)
            index, node_id, tokens = wrong
            pool.publish(HASHES[index], node_id, tokens, b"x")
        assert pool.total_cached_blocks == 1


# -- a transport that stands still


class Gate:
    """A transport that stands still in each copy until it is let through."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Semaphore(0)

    def __call__(self, block: KVBlock) -> bytes:
        self.entered.release()
        assert self.open.acquire(timeout=WAIT_S)
        return block.kv_data


OUTCOMES = [
    ("arrives", 1, True, "None"),
    ("fails", 2, False, "block 1: not in the pool"),
    ("hangs", 1, False, "timed out after 0.05 s"),
    ("closes", 1, False, "closed"),
]


@pytest.mark.sample
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(("outcome", "num_blocks", "success", "error"), OUTCOMES)
def test_a_callback_is_called_once_when_the_result_can_be_taken(
    outcome, num_blocks, success, error, raises, caplog
):
    gate, called = Gate(), threading.Event()
    calls: list[tuple[str, bool]] = []
    errors: list[str] = []

    def callback(request_id: str, success: bool) -> None:
        calls.append((request_id, success))
        errors.append(str(pool.transfer_result(request_id).error))
        called.set()
        if raises:
            raise IndexError("of the caller")

    if outcome in ("arrives", "fails"):
        gate.open.release()
    timeout_s = 0.05 if outcome == "hangs" else WAIT_S
    with make_pool(transport=gate, transfer_timeout_s=timeout_s, num_transfer_threads=1) as pool:
        publish(pool, "a", 0)
        pool.async_transfer("r", HASHES[:num_blocks], "b", callback)
        if outcome == "closes":
            pool.close()
        assert called.wait(WAIT_S)
        gate.open.release(2)
        if outcome != "closes":
            pool._transfers.timeout_s = WAIT_S
            assert arrived(transfer(pool, [0], "b")) == [0], "the thread goes on"
    assert calls == [("r", success)] and error in errors[0]
    if outcome != "hangs":  # there a thread of its own writes the log
        assert ("of the caller" in caplog.text) == raises


def begin_transfer(pool: GlobalKVPool, gate: Gate, num_blocks: int = 1) -> None:
    """The first blocks are on their way from a to b, and wait at the gate."""
    publish(pool, "a", *range(num_blocks))
    pool.async_transfer("r", HASHES[:num_blocks], "b")
    assert gate.entered.acquire(timeout=WAIT_S)


def test_a_block_evicted_while_it_is_sent_arrives_all_the_same():
    gate = Gate()
    with make_pool(max_blocks_per_node=2, transport=gate) as pool:
        begin_transfer(pool, gate, num_blocks=2)
        read = pool.at_node("c").get([(h, TOKENS[h]) for h in HASHES[:2]])
        publish(pool, "a", 2, 3)
        assert pool.query(HASHES[:2]) == (0, [])
        gate.open.release(4)
        assert arrived(finish(pool)) == [0, 1]
        assert list(read) == [kv_of(h) for h in HASHES[:2]], "so it is for an engine's load"
        assert pool.query(HASHES[:2]) == (5, ["b", "b"])


def test_a_pool_that_closes_ends_its_transfers_and_takes_nothing_more():
    gate = Gate()
    with make_pool(transport=gate) as pool:
        begin_transfer(pool, gate)
        pool.close()
        pool.close()
        assert "closed" in pool.transfer_result("r").error
        gate.open.release()
        for call in (lambda: publish(pool, "a", 1), lambda: transfer(pool, [0], "b")):
            with pytest.raises(RuntimeError, match="closed"):
                call()
        assert (pool.query(HASHES), pool.total_cached_blocks) == ((0, []), 0)


# -- threads


class Meeting:
    """Bytes that are only handed over when two threads ask for them at once."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)

    def __bytes__(self) -> bytes:
        self.barrier.wait(WAIT_S)
        return kv_of(HASHES[0])


def test_of_two_concurrent_publishes_of_a_block_one_returns_that_it_is_new():
    """Trap 2: both have seen that it is missing; one copy is kept."""
    with make_pool() as pool, ThreadPoolExecutor(2) as threads:
        block = HASHES[0], "a", TOKENS[HASHES[0]], Meeting()
        answers = threads.map(lambda _: pool.publish(*block), range(2))
        assert sorted(answers) == [False, True]
        assert pool.total_cached_blocks == 1


@pytest.fixture
def hasty_threads():
    """The interpreter changes threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("seed", [0, 1])
def test_eight_threads_publish_ask_copy_and_drop_without_a_contradiction(seed, hasty_threads):
    failures: list[BaseException] = []

    def transport(block: KVBlock) -> bytes:
        return b"" if block.checksum[0] % 16 == seed else block.kv_data

    def work(pool: GlobalKVPool, number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        node_ids = ["a", "b", "c"]
        try:
            for turn in range(60):
                first = rng.randrange(len(HASHES))
                chain = range(first, rng.randint(first, len(HASHES)))
                node_id, request_id = rng.choice(node_ids), f"{number} {turn}"
                match rng.choice("ppqqttu"):
                    case "p":
                        publish(pool, node_id, *chain)
                    case "q":
                        num_tokens, nodes = pool.query([HASHES[i] for i in chain])
                        expected = sum(len(TOKENS[HASHES[i]]) for i in chain[: len(nodes)])
                        assert num_tokens == expected, f"seed {seed}"
                    case "t":
                        found = arrived(transfer(pool, chain, node_id, request_id))
                        assert found == list(chain[: len(found)]), f"seed {seed}"
                    case "u":
                        links = [(HASHES[i], TOKENS[HASHES[i]]) for i in chain]
                        pool.at_node(node_id).drop(links[0]) if links else None
        except BaseException as failure:
            failures.append(failure)

    with make_pool(max_blocks_per_node=5, transport=transport) as pool:
        threads = [threading.Thread(target=work, args=(pool, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not failures and not any(thread.is_alive() for thread in threads), failures
        pool.check_invariants()


def test_the_index_is_only_touched_under_the_lock():
    """No other call runs meanwhile, so only the code that touches the index can hold the lock."""
    names = "get pop setdefault values items __getitem__ __setitem__ __delitem__ __iter__ __len__"
    with make_pool(max_blocks_per_node=2) as pool:

        def guarded(name: str):
            def method(self, *args):
                assert pool._lock.locked(), f"{name} without the lock"
                return getattr(dict, name)(self, *args)

            return method

        Guarded = type("Guarded", (dict,), {name: guarded(name) for name in names.split()})
        pool._nodes, pool._copies = Guarded(), Guarded()
        publish(pool, "a", 0, 0, 1, 2)
        assert pool.query(HASHES[1:]) == (5, ["a", "a"])
        assert arrived(transfer(pool, [1, 2], "b")) == [1, 2]
        pool.invalidate(HASHES[1:2])
        assert pool.total_cached_blocks == 2
