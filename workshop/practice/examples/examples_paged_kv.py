"""Evening 2: blocks, block tables, and the slot of a token."""

from __future__ import annotations

from workshop.practice.examples.example_tools import Lines, request


def slots() -> Lines:
    from block_pool import BlockPool
    from kv_cache_manager import BlockTable, KVCacheManager

    manager = KVCacheManager(BlockPool(9), block_size=4)
    table = manager._tables["r"] = BlockTable()
    table.append(manager.pool.blocks[block_id] for block_id in (7, 2, 5))
    yield "blocks of 4, table [7, 2, 5]"
    for start, stop in ((5, 10), (0, 12), (11, 13), (-1, 1), (6, 3)):
        try:
            shown = str(manager.slot_mapping("r", start, stop))
        except ValueError:
            shown = "refused"
        yield f"positions [{start}, {stop}): {shown}"


def free_order() -> Lines:
    from block_pool import BlockPool

    pool = BlockPool(6)
    one, two, three = pool.allocate(3) or []
    pool.touch([two])
    pool.free([three, two, one])
    order = [block.block_id for block in pool.free_order()]
    yield f"1, 2, 3 are held, 2 by two tables; free([3, 2, 1]): free are {order}"
    pool.free([two])
    order = [block.block_id for block in pool.free_order()]
    yield f"free([2]): free are {order}"
    pool.reclaim([three])
    try:
        pool.free([three, two])
        shown = "accepted"
    except ValueError:
        shown = "refused"
    order = [block.block_id for block in pool.free_order()]
    counts = f"ref_cnt of 3 is {three.ref_cnt}, of 2 {two.ref_cnt}"
    yield f"3 is held again; free([3, 2]): {shown}, free are {order}, {counts}"


def growing_tables() -> Lines:
    from block_pool import BlockPool
    from kv_cache_manager import KVCacheManager

    manager = KVCacheManager(BlockPool(5), block_size=4)
    one, other = request("one", 5), request("other", 20)
    yield "4 blocks of 4 positions"
    for asks, computed, num_new in ((one, 0, 5), (one, 5, 3), (one, 8, 1), (other, 0, 12)):
        asks.num_computed_tokens = computed
        answer = manager.allocate_slots(asks, num_new)
        table = list(manager.get_block_ids(asks.request_id))
        yield (
            f"{asks.request_id} has {computed}, wants {num_new} more: {answer}, table {table}, "
            f"{manager.pool.num_free_blocks} free"
        )
    known = f"there are tables of {sorted(manager._tables)}"
    yield f"tables that have grown: {sorted(manager.req_ids_with_new_blocks)}; {known}"


def layout() -> Lines:
    import numpy as np
    import torch

    from batch_layout import Queries, compose_in_order
    from block_delta import PagedRunnerState
    from request import SamplingParams
    from scheduler_interface import NewRequestData

    state = PagedRunnerState(4, 12)
    for name, tokens, table in (("x", [1], [8]), ("a", [10, 11, 12, 13], [3, 6]), ("b", [20], [5])):
        state.admit(NewRequestData(name, tokens, SamplingParams(), 0, (table,)))
    rows = np.array([state.row_of["a"], state.row_of["b"]])
    columns = rows, np.array([1, 0]), np.array([3, 1]), np.array([1, 1])
    batch = compose_in_order(state, Queries(*columns), 2).on(torch.device("cpu"))
    yield (
        "blocks of 2; a computes 1 to 3, table [3, 6]; b computes 0, table [5]\n"
        f"positions {batch.positions.tolist()}\n"
        f"tokens {batch.input_ids.tolist()}\n"
        f"slots {batch.attention[0].slot_mapping.tolist()}"
    )


# -- exhibits
