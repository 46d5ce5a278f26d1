# %% [markdown]
# # Blocks, tables, slots
#
# This notebook uses the code of chapter 2. It defines only a few lines that print. It needs no
# model.
#
# **中文提要**：块池怎样分配和释放块；一个 token 的位置怎样经过块表（block table）变成槽位（slot）；
# 什么时候才需要新块。不需要模型。

# %%
from block_pool import BlockPool
from kv_cache_manager import KVCacheManager
from request import Request

# %% [markdown]
# ## A pool of blocks
#
# There are nine blocks of four slots. Block 0 is the null block: padding points to it, and it is
# never allocated.

# %%
pool = BlockPool(num_blocks=9)
manager = KVCacheManager(pool, block_size=4)
print("free order:", [block.block_id for block in pool.free_order()])


# %%
def show(*requests):
    for request in requests:
        table = list(manager.get_block_ids(request.request_id))
        references = [pool.blocks[block_id].ref_cnt for block_id in table]
        counters = f"known {request.num_tokens:2}, computed {request.num_computed_tokens:2}"
        print(f"{request.request_id}: {counters}, block table {table}, ref_cnt {references}")
    print("free order:", [block.block_id for block in pool.free_order()])


# %% [markdown]
# ## Positions become slots
#
# Request `a` has a prompt of six tokens. It needs six slots and gets two blocks. `slot_mapping`
# returns the slot of each position's keys and values: `block_id * block_size + offset`.

# %%
a = Request.from_tokens("a", [1, 2, 3, 4, 5, 6])
b = Request.from_tokens("b", [7, 8, 9])
for request in (a, b):
    assert manager.allocate_slots(request, request.num_prompt_tokens)
    request.num_computed_tokens = request.num_prompt_tokens  # a step has written them
show(a, b)
print("slots of a:", manager.slot_mapping("a", 0, 6))
print("slots of b:", manager.slot_mapping("b", 0, 3))

# %% [markdown]
# ## When is a new block needed?
#
# Watch the two counters while `a` decodes. A sampled token is *known* immediately. Its keys and
# values are *computed* one step later, and only then need a slot. So in the step that allocates a
# block `num_tokens % block_size == 1`: the ninth token is known, eight are computed, two blocks are
# full.

# %%
for token_id in (50, 51, 52, 53):
    a.append_output_token(token_id)  # sampled by the step before
    before = len(manager.get_block_ids("a"))
    assert manager.allocate_slots(a, num_new_tokens=1)
    table = list(manager.get_block_ids("a"))
    change = "new block" if len(table) > before else "no new block"
    print(f"known {a.num_tokens:2}, computed {a.num_computed_tokens}: table {table}, {change}")
    a.num_computed_tokens += 1  # the step writes it

# %% [markdown]
# Freeing drops one reference of each block, the deepest first. No other request holds one here, so
# all three become free. They will be reused after the blocks that have been free for longer.

# %%
manager.free(a)
show(b)
manager.check_invariants([b])

# %% [markdown]
# ## Watch it run
#
# ![Film 2: blocks that are reserved](figures/film.png)
#
# a can grow to 29 tokens of KV, so it reserves 8 blocks of 4 immediately, although its prompt fills
# only 3. It can never run out. In step 4 c needs 3 blocks, but 2 are free. It waits, while 5
# reserved blocks are empty. After b has ended, c gets [13, 14, 12] in step 9: any free block will
# do.
#
# The film itself takes seconds to make: `make watch ARGS="--film 2 --open"`
# in the root of the repository. Step through it with the arrow keys.
