"""The pool against a naive model of "least recently used", and threads that use it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import takewhile

import pytest

from bounded_loops import as_long_as
from global_kv_pool import GlobalKVPool, KVBlock, TransferResult
from request_chain import Link

LINKS: list[Link] = [(bytes([i]) * 32, tuple(range(i, i + 2 + i % 2))) for i in range(8)]
HASHES = [block_hash for block_hash, _ in LINKS]
WAIT_S = 20.0  # never waited for, unless the test fails


def kv_of(i: int, made_by: str = "any") -> bytes:
    return HASHES[i] + made_by.encode()


def publish(pool: GlobalKVPool, node_id: str, *indices: int, made_by: str = "any") -> list[bool]:
    return [pool.publish(HASHES[i], node_id, LINKS[i][1], kv_of(i, made_by)) for i in indices]


def transfer(pool: GlobalKVPool, indices: list[int], target: str) -> TransferResult:
    pool.async_transfer("r", [HASHES[i] for i in indices], target)
    for _ in as_long_as(lambda: not pool.is_transfer_complete("r"), seconds=WAIT_S):
        time.sleep(0.0005)
    return pool.transfer_result("r")


# -- against a naive model


class NaiveNodes:
    """Each copy's bytes, and the time of its last use; the copies are in the order of arrival."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.now = 0
        self.copies: dict[tuple[str, int], bytes] = {}
        self.used_at: dict[tuple[str, int], int] = {}

    def holders(self, i: int) -> list[str]:
        return [node for node, j in self.copies if j == i]

    def by_use(self, node: str) -> list[int]:
        return [i for name, i in sorted(self.copies, key=self.used_at.get) if name == node]

    def use(self, copies: Iterable[tuple[str, int]]) -> None:
        for copy in reversed(list(copies)):
            self.now += 1
            self.used_at[copy] = self.now

    def put(self, node: str, i: int, kv_data: bytes) -> bool:
        is_new = (node, i) not in self.copies
        if is_new and len(self.by_use(node)) == self.max_blocks:
            del self.copies[node, self.by_use(node)[0]]
        self.copies.setdefault((node, i), kv_data)
        self.use([(node, i)])
        return is_new

    def query(self, indices: list[int]) -> tuple[int, list[str]]:
        nodes: list[str] = []
        for i in takewhile(self.holders, indices):
            holders = self.holders(i)
            nodes.append(nodes[-1] if nodes and nodes[-1] in holders else holders[0])
        self.use(zip(nodes, indices))
        return sum(len(LINKS[i][1]) for i in indices[: len(nodes)]), nodes

    def transfer(
        self, indices: list[int], target: str, broken: str
    ) -> tuple[list[bytes], list[tuple[str, int]]]:
        """The bytes that arrive, and the copies that are sent, one after the other until one is
        good. Nodes in `broken` fail."""
        data: list[tuple[int, bytes]] = []
        sent: list[tuple[str, int]] = []
        found = list(takewhile(self.holders, indices))
        sources = [sorted(self.holders(i), key=lambda node: node != target) for i in found]
        self.use((nodes[0], i) for nodes, i in zip(sources, found))
        for i, nodes in zip(found, sources):
            good = next((node for node in nodes if node == target or node not in broken), None)
            num_sent = len(nodes) if good is None else nodes.index(good) + 1
            sent += [(node, i) for node in nodes[:num_sent] if node != target]
            if good is None:
                break
            data.append((i, self.copies[good, i]))
        for i, kv_data in reversed(data):
            self.put(target, i, kv_data)
        return [kv_data for _, kv_data in data], sent


def guard(pool: GlobalKVPool) -> None:
    """From now on the index is only touched under the lock. No other call runs meanwhile, so only
    the code that touches it can hold the lock."""

    def guarded(name: str):
        def method(self, *args):
            assert pool._lock.locked(), f"{name} without the lock"
            return getattr(dict, name)(self, *args)

        return method

    names = "get pop setdefault values items __getitem__ __setitem__ __delitem__ __iter__ __len__"
    Guarded = type("Guarded", (dict,), {name: guarded(name) for name in names.split()})
    pool._nodes = Guarded()
    pool._copies = Guarded()


@pytest.mark.net
@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_calls_agrees_with_naive_nodes(seed):
    rng = random.Random(seed)
    model = NaiveNodes(3)
    sent = []
    broken = ""

    def transport(block: KVBlock) -> bytes:
        sent.append((block.node_id, HASHES.index(block.block_hash)))
        if block.node_id not in broken:
            return block.kv_data
        if raises:
            raise OSError("cable cut")
        return kv_of(7)

    with closing(GlobalKVPool(3, transport, num_transfer_threads=1)) as pool:
        guard(pool)
        for turn in range(60):
            chain = rng.sample(range(5), rng.randint(0, 5))
            node_id = rng.choice("abc")
            match rng.choice("ppqqttu"):
                case "p":
                    for i in chain:
                        made_by = f"{node_id}{turn}"  # each publication can be told from any other
                        is_new = publish(pool, node_id, i, made_by=made_by) == [True]
                        assert is_new == model.put(node_id, i, kv_of(i, made_by))
                case "q":
                    assert pool.query([HASHES[i] for i in chain]) == model.query(chain)
                case "t":
                    broken = rng.choice(["", "a", "b", "ab"])
                    raises = rng.choice([True, False])
                    sent.clear()
                    expected, expected_sent = model.transfer(chain, node_id, broken)
                    result = transfer(pool, chain, node_id)
                    assert [block.kv_data for block in result.blocks] == expected
                    assert {block.node_id for block in result.blocks} <= {node_id}
                    assert sent == expected_sent, "its own copy is not sent, and no second one"
                    num = len(expected)
                    reason = "node '"
                    if num < len(chain) and not model.holders(chain[num]):
                        reason = f"{num}: not in the pool"
                    assert result.error is None if num == len(chain) else reason in result.error
                case "u":
                    pool.invalidate([HASHES[i] for i in chain[:1]])
                    model.copies = {
                        c: kv for c, kv in model.copies.items() if c[1] not in chain[:1]
                    }
            pool.check_invariants()
            with pool._lock:
                held = {n: [HASHES.index(h) for h in pool._nodes.get(n, ())] for n in "abc"}
            assert held == {node: model.by_use(node) for node in "abc"}
            assert pool.total_cached_blocks == len(model.copies)


REFUSED = [
    ({"max_blocks_per_node": 0}, "max_blocks_per_node must be > 0, got 0"),
    ({"transfer_timeout_s": 0}, "transfer_timeout_s must be > 0, got 0"),
    ({"num_transfer_threads": 0}, "num_transfer_threads must be > 0, got 0"),
    ((1, "a", ()), r"token_ids must be non-empty here, got \(\)"),
    ((0, "a", (0, 2)), r"token_ids must be \(0, 1\) here, got \(0, 2\)"),
    ((0, "b", (0, 1, 2)), r"token_ids must be \(0, 1\) here, got \(0, 1, 2\)"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_wrong_numbers_and_other_tokens_of_a_known_hash_are_refused(wrong, message):
    """Trap 1: a hash stands for one content, on all nodes."""
    with closing(GlobalKVPool()) as pool:
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
    ("arrives", 1, "None"),
    ("fails", 2, "block 1: not in the pool"),
    ("hangs", 1, "timed out after 0.05 s"),
    ("closes", 1, "closed"),
]


@pytest.mark.parametrize(("outcome", "num_blocks", "error"), OUTCOMES)
def test_a_callback_is_called_once_when_the_result_can_be_taken(outcome, num_blocks, error, caplog):
    """And may raise. A closed pool takes nothing more."""
    gate = Gate()
    called = threading.Event()
    calls = []

    def callback(request_id: str, success: bool) -> None:
        calls.append((request_id, success, str(pool.transfer_result(request_id).error)))
        called.set()
        raise IndexError("of the caller")

    timeout_s = 0.05 if outcome == "hangs" else WAIT_S
    with closing(GlobalKVPool(9, gate, timeout_s, num_transfer_threads=1)) as pool:
        if outcome in ("arrives", "fails"):
            gate.open.release()
        publish(pool, "a", 0)
        pool.async_transfer("r", HASHES[:num_blocks], "b", callback)
        if outcome == "closes":
            pool.close()
        assert called.wait(WAIT_S)
        gate.open.release(2)
        pool._transfers.timeout_s = WAIT_S
        if outcome == "closes":
            for call in (lambda: publish(pool, "a", 1), lambda: transfer(pool, [0], "b")):
                with pytest.raises(RuntimeError, match="closed"):
                    call()
            assert pool.query(HASHES) == (pool.total_cached_blocks, []) == (0, [])
        else:
            assert transfer(pool, [0], "b").error is None, "the thread goes on"
    assert [call[:2] for call in calls] == [("r", outcome == "arrives")] and error in calls[0][2]
    assert "of the caller" in caplog.text or outcome == "hangs", "logged by a thread of its own"


def test_a_block_evicted_while_it_is_sent_arrives_all_the_same():
    gate = Gate()
    with closing(GlobalKVPool(2, gate)) as pool, ThreadPoolExecutor(1) as thread:
        publish(pool, "a", 0, 1)
        sent = thread.submit(transfer, pool, [0, 1], "b")
        read = pool.at_node("c").get(LINKS[:2])
        assert gate.entered.acquire(timeout=WAIT_S)
        publish(pool, "a", 2, 3)
        assert pool.query(HASHES[:2]) == (0, [])
        gate.open.release(4)
        assert [block.kv_data for block in sent.result().blocks] == [kv_of(0), kv_of(1)]
        assert list(read) == [kv_of(0), kv_of(1)], "so it is for an engine's load"
        assert pool.query(HASHES[:2]) == (5, ["b", "b"])
