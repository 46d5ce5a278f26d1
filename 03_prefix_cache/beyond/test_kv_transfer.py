"""Background transfers on their own; in a pool they are tested in `test_global_kv_pool.py`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from kv_pool import KVBlock, TransferResult
from kv_transfer import BackgroundTransfers

WAIT_S = 20.0  # never waited for, unless the test fails
BLOCKS = [KVBlock.create(bytes([i]), "a", [i], bytes([i])) for i in range(3)]


@pytest.fixture
def transfers() -> Iterator[BackgroundTransfers]:
    transfers = BackgroundTransfers(num_transfer_threads=1)
    yield transfers
    transfers.check_invariants()
    transfers.close()
    transfers.check_invariants()


def run(transfers: BackgroundTransfers, blocks: Iterator[KVBlock], **kwargs) -> TransferResult:
    ended = threading.Event()
    transfers.start("run", blocks, lambda *_: ended.set(), **kwargs)
    assert ended.wait(WAIT_S)
    return transfers.take_result("run")


def test_what_came_before_an_iterator_raises_is_the_result(transfers):
    def blocks():
        yield from BLOCKS[:2]
        raise OSError("cable cut")

    assert run(transfers, blocks()) == TransferResult(tuple(BLOCKS[:2]), "cable cut")
    assert run(transfers, iter(BLOCKS)) == TransferResult(tuple(BLOCKS))


def test_a_callback_that_raises_is_announced_and_the_thread_goes_on(transfers, caplog):
    def callback(*_):
        raise KeyError("mine")

    with caplog.at_level(logging.ERROR):
        transfers.start("r", iter(BLOCKS), callback)
        assert run(transfers, iter(BLOCKS[:1])).blocks == (BLOCKS[0],)
    assert "transfer 'r'" in caplog.text and "mine" in caplog.text
    assert transfers.take_result("r").blocks == tuple(BLOCKS)


def test_blocks_that_cannot_be_kept_are_not_handed_out(transfers):
    def on_arrival(_):
        raise ValueError("full")

    result = run(transfers, iter(BLOCKS), on_arrival=on_arrival)
    assert not result.blocks and "full" in result.error
    assert run(transfers, iter(BLOCKS)).error is None


def test_one_thread_runs_transfers_in_the_order_of_their_starts(transfers):
    order: list[str] = []
    hold = threading.Event()

    def blocks(name: str) -> Iterator[KVBlock]:
        assert hold.wait(WAIT_S)
        order.append(name)
        yield BLOCKS[0]

    for name in "abc":
        transfers.start(name, blocks(name))
    transfers.cancel("b")
    hold.set()
    run(transfers, iter(()))
    assert order == ["a", "c"], "a cancelled transfer is not begun"


def test_no_further_block_is_fetched_for_a_cancelled_transfer(transfers):
    fetched: list[int] = []
    entered, hold = threading.Event(), threading.Event()

    def blocks() -> Iterator[KVBlock]:
        for i, block in enumerate(BLOCKS):
            fetched.append(i)
            entered.set()
            assert hold.wait(WAIT_S)
            yield block

    transfers.start("r", blocks(), on_arrival=lambda _: pytest.fail("arrived"))
    assert entered.wait(WAIT_S)
    transfers.cancel("r")
    hold.set()
    run(transfers, iter(()))
    assert fetched == [0]


def test_threads_end_with_close_and_a_result_can_still_be_taken():
    before = set(threading.enumerate())
    transfers = BackgroundTransfers(num_transfer_threads=3)
    assert set(threading.enumerate()) == before, "no transfer, no thread"
    ended = threading.Event()
    transfers.start("r", iter(BLOCKS), lambda *_: ended.set())
    assert ended.wait(WAIT_S)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3 + 1
    transfers.close()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert transfers.take_result("r").blocks == tuple(BLOCKS)
    with pytest.raises(RuntimeError, match="closed"):
        transfers.start("s", iter(BLOCKS))
