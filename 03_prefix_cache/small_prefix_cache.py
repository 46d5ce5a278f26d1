"""Chapter 3 in 37 lines: a dictionary finds a prefix.

Run it: `python 03_prefix_cache/small_prefix_cache.py`.

See 03_prefix_cache/README.md#the-idea-in-one-small-file"""

from block_pool import BlockPool
from prefix_cache_local import PrefixCacheLocal

BLOCK_SIZE, NUM_BLOCKS = 4, 6  # 5 usable blocks: block 0 is the null block
PROMPTS = {
    "a": [1, 2, 3, 4, 5, 6, 7, 8, 9],
    "b": [1, 2, 3, 4, 5, 6, 7, 8, 7, 7, 7, 7, 7],  # begins like a
    "c": [5, 6, 7, 8, 1, 2, 3, 4, 0],  # a's blocks, after other tokens
    "d": [1, 2, 3, 4, 5, 6, 7, 8, 7, 7, 7, 7, 6],
    "e": [9, 9, 9, 9, 9, 9, 9, 9],
    "f": [5, 6, 7, 8, 1, 2, 3, 4, 0],  # the same as c, one of whose blocks was evicted for e
}

cache = {}  # hash of a block and all before it -> block; least recently used first
free = list(range(1, NUM_BLOCKS))
hits = {}  # cached blocks that each prompt found
for name, tokens in PROMPTS.items():
    starts = range(0, len(tokens) - BLOCK_SIZE, BLOCK_SIZE)  # the last token is always computed
    full = [tuple(tokens[i : i + BLOCK_SIZE]) for i in starts]  # the engine keeps a full last block
    hashes, parent = [], None
    for block in full:
        parent = hash((parent, block))  # equal hashes mean that all tokens up to here are equal
        hashes.append(parent)
    table = []
    for key in hashes:  # find the longest cached prefix
        if key not in cache:
            break
        table.append(cache[key])
    hits[name] = list(table)
    for key in hashes[len(table) :]:  # compute the other blocks, and keep them for later prompts
        if not free:  # evict the least recently used block
            oldest = next(known for known in cache if known not in hashes)  # not one of its own
            free.append(cache.pop(oldest))
        table.append(free.pop(0))
        cache[key] = table[-1]
    for key in reversed(hashes):  # mark as used; the deepest block is evicted first
        cache[key] = cache.pop(key)
    num_known = len(hits[name]) * BLOCK_SIZE
    print(f"{name}: {num_known} of {len(tokens)} tokens are known, blocks {table}")

# Compare with the chapter's class. (Its pool allocates and frees; its hash is not Python's.)
real = PrefixCacheLocal(pool=BlockPool(NUM_BLOCKS), block_size=BLOCK_SIZE)
for name, tokens in PROMPTS.items():
    known = tokens[: (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE]
    found = [block.block_id for block in real.match_prefix(known).blocks]
    assert found == hits[name], name
    real.cache_computed_blocks(known)
print("prefix_cache_local.py says the same")
