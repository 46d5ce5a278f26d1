"""Evening 2: blocks, tables, and where a token stands."""

from __future__ import annotations

from common.workshop.museum.props import request
from common.workshop.tasks.task import Task


def slots() -> str:
    from block_pool import BlockPool
    from kv_cache_manager import BlockTable, KVCacheManager

    manager = KVCacheManager(BlockPool(9), block_size=4)
    table = manager._tables["r"] = BlockTable()
    table.append(manager.pool.blocks[block_id] for block_id in (7, 2, 5))
    lines = ["blocks of 4, table [7, 2, 5]"]
    for start, stop in ((5, 10), (0, 12), (11, 13)):
        try:
            shown = str(manager.slot_mapping("r", start, stop))
        except ValueError:
            shown = "refused"
        lines.append(f"positions {start} to {stop - 1}: {shown}")
    return "\n".join(lines)


def free_order() -> str:
    from block_pool import BlockPool

    pool = BlockPool(6)
    one, two, three = pool.allocate(3) or []
    pool.touch([two])
    pool.free([three, two, one])
    order = [block.block_id for block in pool.free_order()]
    lines = [f"1, 2, 3 are held, 2 by two tables; free([3, 2, 1]): free are {order}"]
    pool.free([two])
    order = [block.block_id for block in pool.free_order()]
    lines.append(f"free([2]): free are {order}")
    try:
        pool.free([two])
        lines.append(f"free([2]) again: accepted, ref_cnt {two.ref_cnt}")
    except ValueError:
        lines.append("free([2]) again: refused")
    return "\n".join(lines)


def growing_tables() -> str:
    from block_pool import BlockPool
    from kv_cache_manager import KVCacheManager

    manager = KVCacheManager(BlockPool(5), block_size=4)
    one, other = request("one", 5), request("other", 20)
    lines = ["4 blocks of 4 positions"]
    for asks, computed, num_new in ((one, 0, 5), (one, 5, 3), (one, 8, 1), (other, 0, 12)):
        asks.num_computed_tokens = computed
        answer = manager.allocate_slots(asks, num_new)
        table = list(manager.get_block_ids(asks.request_id))
        lines.append(
            f"{asks.request_id} has {computed}, wants {num_new} more: {answer}, table {table}, "
            f"{manager.pool.num_free_blocks} free"
        )
    lines.append(f"tables that have grown: {sorted(manager.grown)}")
    return "\n".join(lines)


def layout() -> str:
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
    return (
        "blocks of 2; a computes 1 to 3, table [3, 6]; b computes 0, table [5]\n"
        f"positions {batch.positions.tolist()}\n"
        f"tokens {batch.input_ids.tolist()}\n"
        f"slots {batch.attention[0].slot_mapping.tolist()}"
    )


TASKS = (
    Task(
        number="2.1",
        title="From positions to slots",
        minutes=10,
        difficulty=1,
        module="kv_cache_manager",
        place="KVCacheManager.slot_mapping",
        write="The KV memory is one long row of slots, cut into blocks of `self.block_size`. A "
        "request has a block table: which block holds its first positions, which the next, and "
        "so on. Find the slot of each position.\n\n"
        "With blocks of 4 and the table [7, 2, 5], position 6 is in the second block of the "
        "table, number 2, and there it is at offset 2: slot 2 * 4 + 2 = 10.\n\n"
        "Return the slots of positions `start` to `stop - 1` as a list. The table is "
        "`self.get_block_ids(request_id)`. Raise `ValueError` if a position is outside of the "
        "table; say which positions, and how far the table reaches.\n\n"
        "Keep this: `stop` is not included, so a `stop` at the very end of the table is right.",
        hints=(
            "Two questions for each position: which block of the table, and which place in it? "
            "Both are a division.",
            "A slot is the block's id times the block size, plus the offset.",
            "[block_ids[pos // size] * size + pos % size for pos in range(start, stop)], after "
            "checking 0 <= start <= stop <= len(block_ids) * size",
        ),
        test_module="test_kv_cache_manager",
        tests=(
            "test_positions_become_slots",
            "test_decode_slots_of_the_reading_material",
            "test_bad_arguments_are_errors_that_change_nothing",
        ),
        probe=slots,
        engine=None,
    ),
    Task(
        number="2.2",
        title="Give blocks back in the right order",
        minutes=12,
        difficulty=1,
        module="block_pool",
        place="BlockPool.free",
        write="A block may have several holders. Each of them drops its reference once; the "
        "block is free when the last one has.\n\n"
        "First `self._check(blocks, 'free', are_held=True)`, which raises for a block that is "
        "free already. Then drop a reference (`block.ref_cnt`) of each block. One without any "
        "left joins the free blocks: `self._free` is an OrderedDict from block id to block, "
        "and `allocate` takes from its front.\n\n"
        "Keep this: a block is in the free order exactly if its `ref_cnt` is 0. Blocks become "
        "free in the order in which they are named, behind those that are free already: what "
        "was free for longest is reused first.",
        hints=(
            "The order of the caller is the right one. Neither sort nor reverse it.",
            "Writing a new key into an OrderedDict puts it at the end, and that is where a "
            "block belongs that has just become free.",
            "for block in blocks: block.ref_cnt -= 1; if block.ref_cnt == 0: "
            "self._free[block.block_id] = block",
        ),
        test_module="test_block_pool",
        tests=(
            "test_all_blocks_but_the_null_block_are_handed_out_once",
            "test_blocks_are_reused_in_the_order_in_which_they_were_freed",
            "test_a_block_is_free_when_its_last_holder_lets_go",
            "test_double_free_is_an_error_and_changes_nothing",
            "test_every_reachable_state_of_a_small_pool",
        ),
        probe=free_order,
    ),
    Task(
        number="2.3",
        title="Let a block table grow",
        minutes=15,
        difficulty=2,
        module="kv_cache_manager",
        place="KVCacheManager._reach",
        write="Before a step, a request needs room for the positions that the step writes. Make "
        "its table reach position `end`.\n\n"
        "`self.num_blocks_needed(end)` says how many blocks that takes, and "
        "`self.get_block_ids(request_id)` which ones it has. If none is missing, return True. "
        "Otherwise ask `self._take_blocks(number)` for all that are missing. It gives a list "
        "of blocks, or None if there are too few; then return False.\n\n"
        "The blocks are appended to the request's table, `self._tables[request_id]`; a request "
        "that has none yet gets a new `BlockTable()`. Add the id to the set `self.grown`, and "
        "return True.\n\n"
        "Keep this: a refusal changes nothing. No block is taken, and no empty table is made.",
        hints=(
            "Most decode steps stay within a block. They should end at the first question.",
            "Ask for all missing blocks in one call, before you touch anything. Then there is "
            "nothing to give back when the answer is None.",
            "num_missing = needed - have; if num_missing <= 0: return True; blocks = "
            "self._take_blocks(num_missing); if blocks is None: return False; then make the "
            "table if there is none, append, and note it in self.grown",
        ),
        test_module="test_kv_cache_manager",
        tests=(
            "test_positions_become_slots",
            "test_a_new_block_is_taken_when_a_position_crosses_into_it",
            "test_the_table_covers_exactly_what_was_asked",
            "test_positions_that_were_reserved_are_not_taken_again",
            "test_a_refusal_changes_nothing",
            "test_asking_for_no_slots_is_never_refused_and_makes_no_table",
        ),
        probe=growing_tables,
    ),
    Task(
        number="2.4",
        title="Lay out a batch without padding",
        minutes=25,
        difficulty=3,
        module="batch_layout",
        place="compose_in_order",
        names=("owner", "positions", "entries"),
        write="Here the tokens of all requests lie end to end, and nothing is padded. Work out, "
        "for each token of the batch, whose it is, where it stands, and which entry of which "
        "block table names its block.\n\n"
        "There are as many queries as there are entries in `row`, `start` and `lens`: query i "
        "computes `lens[i]` tokens from position `start[i]` on, and its block table is row "
        "`row[i]` of the tables. `order` is 0, 1, 2, ... and `query_start_loc` says at "
        "which token of the batch each query begins. All are NumPy arrays; use no loop.\n\n"
        "    lens              [3, 1]             start  [1, 0]    row  [1, 2]\n"
        "    owner             [0, 0, 0, 1]       of each token: the number of its query\n"
        "    positions         [1, 2, 3, 0]       where it stands in its own request\n"
        "    entries           [1, 1, 1, 2]       with blocks of 2: the row of its table,\n"
        "                      [0, 1, 1, 0]       and the entry in that row; a tuple of both\n\n"
        "Make these four arrays of int64. Keep this: a position counts from the beginning of "
        "its own request, not from the beginning of the batch.",
        hints=(
            "np.repeat(a, lens) repeats a[i] as often as lens[i] says.",
            "Count through the whole batch, 0, 1, 2, ... Then take off where the token's query "
            "begins in the batch, and add where it starts in its request.",
            "positions = np.arange(query_start_loc[-1]) - query_start_loc[owner] + start[owner]; "
            "entries = row[owner], positions // block_size",
        ),
        test_module="test_batch_layout",
        tests=(
            "test_every_token_stands_at_its_position_and_writes_to_its_slot",
            "test_logits_are_wanted_of_the_last_tokens_of_each_query",
        ),
        probe=layout,
    ),
)
