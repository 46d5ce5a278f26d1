"""A batch by itself: the needs of its next decode, and its victims."""

from __future__ import annotations

from block_pool import BlockPool
from kv_memory import UncachedKVCacheManager
from request import Request, RequestStatus
from schedule_batch import ScheduleBatch


def memory_of(num_pages: int) -> UncachedKVCacheManager:
    return UncachedKVCacheManager(BlockPool(num_pages + 1), 4)


def decoding(
    memory: UncachedKVCacheManager,
    name: str,
    num_prompt: int,
    num_outputs: int = 1,
    max_tokens: int = 50,
) -> Request:
    """One token behind, with pages for what is computed."""
    request = Request.from_tokens(name, list(range(num_prompt)), max_tokens)
    for token_id in range(num_outputs):
        request.append_output_token(token_id)
    assert memory.allocate_slots(request, request.num_tokens - 1)
    request.num_computed_tokens = request.num_tokens - 1
    request.status = RequestStatus.RUNNING
    return request


def names(requests: list[Request]) -> str:
    return "".join(request.request_id for request in requests)


def test_a_page_is_needed_where_one_begins():
    """Trap 27: only the two counters decide. With 4 positions computed, the next one is the first
    of a page; with 3 it is the last."""
    memory = memory_of(20)
    counts = []
    for num_prompt in range(1, 10):
        request = decoding(memory, str(num_prompt), num_prompt)
        counts.append(ScheduleBatch(memory, [request]).new_page_count_next_decode())
    assert counts == [0, 0, 0, 1, 0, 0, 0, 1, 0]


def test_pages_are_handed_out_once_and_kept():
    memory = memory_of(5)
    batch = ScheduleBatch(memory, [decoding(memory, name, 4) for name in "abc"])
    assert batch.new_page_count_next_decode() == 3
    assert not batch.check_decode_mem()
    assert memory.num_blocks_in_use == 5
    assert not batch.check_decode_mem()
    memory.free(batch.reqs.pop(0))
    assert batch.check_decode_mem() and memory.num_blocks_in_use == 4
    assert batch.check_decode_mem() and memory.num_blocks_in_use == 4


def test_fewest_outputs_go_first_and_of_those_the_longest_input():
    memory = memory_of(10)
    sizes = {"a": (8, 1), "b": (4, 1), "c": (2, 3), "d": (12, 1), "e": (3, 10)}
    requests = [decoding(memory, name, *sizes[name]) for name in "abcde"]
    batch = ScheduleBatch(memory, requests)
    assert memory.pool.num_free_blocks == 0 and batch.new_page_count_next_decode() == 5

    def retract(request: Request) -> None:
        memory.free(request)
        request.status = RequestStatus.PREEMPTED

    retracted = batch.retract_decode(retract, lambda request: False)
    assert names(retracted) == "da", "12, then 8 prompt tokens; no more than it takes"
    assert names(batch.reqs) == "bce"
