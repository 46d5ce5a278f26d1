"""Chapter 2 in 32 lines: a table finds a slot. Run it: `python 02_paged_kv/small_paging.py`.

See 02_paged_kv/README.md#the-idea-in-one-small-file"""

from collections import deque

from block_pool import BlockPool
from kv_cache_manager import KVCacheManager
from request import Request

BLOCK_SIZE, NUM_BLOCKS = 4, 6
memory = ["--"] * (NUM_BLOCKS * BLOCK_SIZE)  # a slot holds the keys and values of one token
free = deque(range(1, NUM_BLOCKS))  # block 0 is the null block
tables = {}  # by request: the blocks that hold its positions, in order


def slot(name, position):
    return tables[name][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def write(name, start, stop):
    """Store the keys and values that positions [start, stop) of a request computed."""
    table = tables.setdefault(name, [])
    while len(table) * BLOCK_SIZE < stop:  # a new block only when the last one is full
        table.append(free.popleft())
    for position in range(start, stop):
        memory[slot(name, position)] = f"{name}{position}"


def end(name):
    free.extend(reversed(tables.pop(name)))  # not erased: the next request overwrites them


# a has 5 tokens and b has 3; both grow; b finishes, and c takes one of its blocks.
EVENTS = [("a", 0, 5), ("b", 0, 3), ("a", 5, 8), ("b", 3, 5), ("b", None, None), ("c", 0, 6)]
for name, start, stop in EVENTS:
    if stop is None:
        end(name)
        event = "ends"
    else:
        write(name, start, stop)
        event = f"writes {start}..{stop - 1}"
    print(f"{name} {event:12}  tables {tables}")
rows = [memory[first : first + BLOCK_SIZE] for first in range(0, len(memory), BLOCK_SIZE)]
print("\n".join(f"block {block_id}  {'  '.join(row)}" for block_id, row in enumerate(rows)))
for name, length in (("a", 8), ("c", 6)):  # each reads its own tokens through its table
    assert [memory[slot(name, p)] for p in range(length)] == [f"{name}{p}" for p in range(length)]

# Compare with the chapter's classes.
manager, requests = KVCacheManager(BlockPool(NUM_BLOCKS), BLOCK_SIZE), {}
for name, start, stop in EVENTS:
    if stop is None:
        manager.free(requests.pop(name))
        continue
    request = requests.setdefault(name, Request.from_tokens(name, [0], max_new_tokens=9))
    request.num_computed_tokens = start
    assert manager.allocate_slots(request, stop - start)
assert {name: list(manager.get_block_ids(name)) for name in requests} == tables
assert manager.slot_mapping("c", 0, 6) == [slot("c", position) for position in range(6)]
print("kv_cache_manager.py says the same")
