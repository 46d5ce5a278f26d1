"""A pool of KV blocks that several engines share: blocks that one computed can be copied by others.

A block hash identifies a whole prefix, so it means the same in every engine:

    chain of a prompt   | h0        | h1        | h2        | h3        |
    in the pool         | record    | record    | record    |           |
    has                                                     ^ the match ends here, 3 blocks

This pool is the memory of one process: engines in several processes share `mooncake_pool.py`.
Mooncake keeps an index in a master process and moves bytes by RDMA or TCP. vLLM's LMCache and
SGLang's HiCache use such stores as a last tier. Source: Mooncake, arXiv 2407.00079.

See 03_prefix_cache/beyond/README.md"""

from __future__ import annotations

from kv_tiers import HostTier


class GlobalKVPool(HostTier):
    """A pool of `max_blocks` records, for the `PoolConnector` of each engine. The least recently
    used one is dropped."""
