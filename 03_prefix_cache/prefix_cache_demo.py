# %% [markdown]
# # Prefixes computed once
#
# This notebook uses the code of chapter 3. It defines only a few lines that print.
#
# **中文提要**：一条哈希链；匹配、占用、释放、淘汰各做什么；一棵基数树（radix tree）怎样长出来；
# 最后在引擎里看，命中以后首 token 快了多少。

# %%
import warnings

import torch

from common.llm import LLM, SamplingParams
from prefix_cache_local import PrefixCacheLocal, compute_hash_chain
from radix_cache import RadixCache

torch.set_num_threads(1)
warnings.filterwarnings("ignore", message="IProgress")  # no progress bars are wanted here

# %% [markdown]
# ## A chain of hashes
#
# Two prompts differ after 8 tokens, in blocks of 4. Equal prefixes have equal hashes. From the
# first difference on, no hash is equal, although block 3 of both begins with the same tokens.

# %%
a = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
b = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 99]
for name, prompt in (("a", a), ("b", b)):
    print(name, [block_hash.hex()[:8] for block_hash, _ in compute_hash_chain(prompt, 4)])
print("a, for tenant x", [h.hex()[:8] for h, _ in compute_hash_chain(a, 4, [("salt", "x")])])

# %% [markdown]
# ## Match, touch, release, evict
#
# The cache has five blocks. `b` finds the two blocks that it shares with `a`. A prompt that merely
# *contains* them finds nothing: `B, C` does not hit `A, B, C`.

# %%
cache = PrefixCacheLocal(max_cached_blocks=5, block_size=4)
cache.cache_computed_blocks(a)
blocks, num_cached_tokens = cache.match_prefix(b)
print("b finds", num_cached_tokens, "tokens in blocks", [block.block_id for block in blocks])
print("a without its first block finds", cache.match_prefix(a[4:]).num_cached_tokens)

# %% [markdown]
# A prefix stays in the cache while a request uses it. `c` needs five blocks, but only two are free
# and one more is unused, so `c` gets three, from its front.

# %%
c = list(range(100, 120))
cache.touch(blocks)
print("blocks of c that were cached:", len(cache.cache_computed_blocks(c)))
print("a still finds", cache.match_prefix(a).num_cached_tokens, "tokens: its tail had to go")
cache.release(blocks)
cache.check_invariants()

# %% [markdown]
# ## A radix tree grows
#
# A run of tokens without a branch is one node. `b` splits the node of `a` where the two prompts
# differ, and `c` shares nothing with them.


# %%
def show(cache):
    """Print a line for each node, indented below its parent."""
    for node in cache.tree.nodes():
        if not node.is_root:
            print(f"{'    ' * node.start}{node.key} users: {node.lock_ref}")
    print()


tree = RadixCache(page_size=4, num_pages=20)
for prompt in (a, b, c[:8]):
    tree.cache_computed_blocks(prompt)
    show(tree)

# %% [markdown]
# A request that uses the shared blocks locks only those, so the rest can be evicted.

# %%
used = tree.match_prefix(a[:8]).blocks
tree.touch(used)
show(tree)
print("evicted:", tree.evict(100), "blocks; still cached:")
show(tree)
tree.release(used)

# %% [markdown]
# ## In the engine
#
# Generate from a long prompt twice. The second time only its last block is computed, and the output
# tokens are the same.

# %%
llm = LLM(num_blocks=600)
text = "import os\n\n\n" + "".join(
    f"def function_{i}(x):\n    return x + {i}\n\n\n" for i in range(40)
)
params = SamplingParams(temperature=0, max_tokens=8)
llm.generate("warm up", params, use_tqdm=False)
outputs = [llm.generate(text, params, use_tqdm=False)[0] for _ in range(2)]
for output in outputs:
    print(
        f"{output.num_cached_tokens:4d} of {len(output.prompt_token_ids)} prompt tokens cached, "
        f"first token after {output.metrics.time_to_first_token * 1e3:.0f} ms"
    )
assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids

# %% [markdown]
# ## Watch it run
#
# ![Film 3: a shared beginning, and an eviction](figures/film.png)
#
# b begins like a. In step 4 it finds 6 blocks of a in the cache and computes 4 tokens instead of
# 28; after block 6 the two chains differ. When memory runs short, the end that only a had is
# evicted, its last block first: block 8 in step 19 and block 7 in step 20. The shared blocks stay,
# and e finds all 6 in step 22.
#
# The film itself takes seconds to make: `make watch ARGS="--film 3 --open"`
# in the root of the repository. Step through it with the arrow keys.
