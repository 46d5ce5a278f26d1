"""The interface through which KV is loaded from elsewhere: a lower tier, a store, another machine.

Fetching KV that the local cache does not have can be cheaper than computing it. The manager calls a
connector before a request is admitted:

    local cache     | hit: num_computed_tokens |
    connector       |                          | get_num_new_matched_tokens |
    to be computed  |                                                       | the rest: >= 1 token |

If something can be loaded, the manager allocates blocks for it and passes their ids, and the
request waits with its own status (`WAITING_FOR_REMOTE_KVS`) while others run. Blocks that arrived
enter the local prefix cache, and the request is looked up again like any other. The rest is
computed: a load that fails, takes too long or brings wrong bytes costs time and never changes a
token.

Invariants: after `cancel_load` or a finished load nothing more is written to the load's blocks;
each request loads at most once at a time; a failing connector costs only its benefit.

vLLM's `KVConnectorBase_V1` has these three hooks; there a load writes directly into the request's
own blocks.

See 03_prefix_cache/beyond/README.md#the-seam"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from request import Request


class KVBlockIO(Protocol):
    """The bytes of one block of the engine's KV memory: keys and values of all layers."""

    @property
    def block_nbytes(self) -> int: ...

    def read_block(self, block_id: int) -> bytes: ...

    def write_block(self, block_id: int, data: bytes | memoryview) -> None:
        """Overwrite a block with `block_nbytes` bytes."""
        ...


class KVConnector(ABC):
    """The interface of a connector. Called only from the engine's thread; slow work happens in
    other threads and is polled."""

    def bind(self, io: KVBlockIO, block_size: int, namespace: Sequence[tuple[str, str]]) -> None:
        """Called once, by the engine. `namespace` identifies model, dtype and layout: KV of another
        namespace does not match, even for equal tokens. Raises `ValueError` the second time,
        because two engines would mix their loads and saves."""
        if hasattr(self, "io"):
            raise ValueError(
                f"kv_connector must belong to this engine, got {self!r}; make one for each engine"
            )
        self.io = io
        self.block_size = block_size
        self.namespace = tuple(namespace)

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens after the first `num_computed_tokens` (a multiple of `block_size`)
        can be loaded, in whole blocks and short of the request's last token, and whether the load
        runs in the background. `(0, False)` if there are none. Starts nothing."""

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Start the load. `block_ids` were allocated for these tokens."""

    @abstractmethod
    def get_finished_load(self, request_id: str) -> int | None:
        """Return None while the load is in flight. Otherwise, once: the number of tokens whose KV
        is now in the load's blocks, in whole blocks from the front; 0 if it failed."""

    @abstractmethod
    def cancel_load(self, request_id: str) -> None:
        """Cancel a load. When this returns, nothing more may be written to the load's blocks. Also
        called for a finished request that was only looked up; no state may be kept for it. Unknown
        ids are ignored."""

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> None:  # noqa: B027
        """Called when a request frees its blocks. `block_ids` hold its first full blocks, published
        and final; they may be read until this returns."""

    def refuse(self, request: Request, num_blocks: int) -> None:  # noqa: B027
        """Called when a request's logits were NaN, instead of offering its blocks. Its first
        `num_blocks` blocks, or what was computed from them, may be the cause: a connector drops
        them, and neither loads nor saves blocks with these keys again."""

    def num_loaded_blocks(self) -> Mapping[str, int]:
        """Blocks loaded so far, by tier; empty if the connector has no tiers."""
        return {}

    @abstractmethod
    def wait_for_load(self, timeout_s: float) -> None:
        """Return when some load has finished, or after `timeout_s`."""

    @abstractmethod
    def close(self) -> None:
        """Stop threads and close files and connections."""
