"""Hashes of a request's blocks outside its engine: chained hashes under a namespace.

The chain is the local cache's (`prefix_cache_local.py`), but its root also mixes in the engine's
namespace: model, dtype, layout. So KV of another model is not even found. The tags of engine and
request are kept apart, so no request can imitate a namespace.

See 03_prefix_cache/beyond/README.md"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from prefix_cache import extra_keys_of, normalise_extra_keys
from prefix_cache_local import compute_block_hash
from request import Request

Link = tuple[bytes, tuple[int, ...]]  # hash and tokens of one block


def root_keys(
    namespace: Sequence[tuple[str, str]], extra_keys: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """The extra keys of a first block outside its engine; `extra_keys` normalised."""
    return [(f"engine {tag}", value) for tag, value in namespace] + [
        (f"request {tag}", value) for tag, value in extra_keys
    ]


class RequestChains:
    """Hash chains of requests, each hashed once: tokens only ever grow at their end."""

    def __init__(self, block_size: int, namespace: Sequence[tuple[str, str]]) -> None:
        self.block_size = block_size
        self.namespace = tuple(namespace)
        self._chains: WeakKeyDictionary[Request, list[Link]] = WeakKeyDictionary()

    def chain(self, request: Request, num_blocks: int) -> list[Link]:
        """Hash and tokens of the first `num_blocks` blocks, which must be full."""
        return self.known(request, num_blocks)[:num_blocks]

    def known(self, request: Request, num_blocks: int) -> list[Link]:
        """The same list each time, of at least `num_blocks`. It grows later."""
        chain = self._chains.setdefault(request, [])
        size = self.block_size
        for start in range(len(chain) * size, num_blocks * size, size):
            tokens = tuple(request.all_token_ids[start : start + size])
            if chain:
                block_hash = compute_block_hash(chain[-1][0], tokens)
            else:
                keys = root_keys(self.namespace, normalise_extra_keys(extra_keys_of(request)))
                block_hash = compute_block_hash(None, tokens, keys)
            chain.append((block_hash, tokens))
        return chain
