"""What all layers of a step share: who is attended together, and where keys are gathered to.

Attention on a CPU gathers keys and values before it attends to them. Which blocks, for whom, with
which mask: that depends on lengths and tables alone, so the first layer of a step works it out, on
the host, and the others use it.

Sequences with one query token, or with a few (guesses to be verified, chapter 5), are attended
together, in groups of similar length:

    lengths 100 60 51 50 | 49 | 7 | 3 | 1      no more than twice the shortest, within a budget of
                                               bytes that stays in the processor's cache

What is gathered goes into one small buffer, which every group and every layer reuses: fresh memory
for each layer costs more than the attention does.

Invariants: a group's unused slots are overwritten before they are read (0 * NaN is NaN); a plan is
used only for queries and caches of the dtype and shape that it was made for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

# Keys gathered at a time in decoding: on a CPU what stays in its cache (measured), else plenty.
GROUP_KEY_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
# Query lengths that are attended in groups: up to each of these together, longer ones alone.
SHORT_QUERIES = (1, 8, 16)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of similar length with a few query tokens each. Who has fewer than `query_len` of
    them has its first one several times."""

    tokens: torch.Tensor  # [n * query_len] int64, their rows in the query
    block_ids: torch.Tensor  # [n * blocks of the longest] int, 0 beyond a sequence's own
    num_seqs: int
    num_keys: int  # of the longest
    unused: torch.Tensor  # [num_unused] int64, gathered slots that are not the sequence's
    mask: torch.Tensor | None  # [n, 1, heads that share keys * query_len, num_keys], 0 or -inf


class AttentionPlan:
    """The part of a plan that is the same for every way to attend to long queries."""

    def __init__(
        self,
        groups: list[DecodeGroup],
        others: Iterable[torch.Tensor],  # the block ids of all that is gathered besides
        query: torch.Tensor,
        key_cache: torch.Tensor,
    ) -> None:
        self.groups = groups
        self.dtype = query.dtype
        self.num_heads = query.shape[1]  # a group's mask has a row for each of them
        gathered = [*(group.block_ids for group in groups), *others]
        most_blocks = max(map(len, gathered), default=0)
        shape = (most_blocks, *key_cache.shape[1:])
        self.key_buffer, self.value_buffer = key_cache.new_empty(shape), key_cache.new_empty(shape)

    def fits(self, query: torch.Tensor, key_cache: torch.Tensor) -> bool:
        is_same_query = self.dtype == query.dtype and self.num_heads == query.shape[1]
        return is_same_query and self.key_buffer.shape[1:] == key_cache.shape[1:]

    def gather(
        self, key_cache: torch.Tensor, value_cache: torch.Tensor, block_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [num_slots, num_kv_heads, head_dim], in the buffers
        n = len(block_ids)
        keys = torch.index_select(key_cache, 0, block_ids, out=self.key_buffer[:n])
        values = torch.index_select(value_cache, 0, block_ids, out=self.value_buffer[:n])
        return keys.flatten(0, 1), values.flatten(0, 1)

    def attend_groups(
        self,
        output: torch.Tensor,  # [num_tokens, num_heads, head_dim], rows of the groups are written
        query: torch.Tensor,  # the same
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
    ) -> None:
        for group in self.groups:
            keys, values = self.gather(key_cache, value_cache, group.block_ids)
            output[group.tokens] = attend_group(query[group.tokens], keys, values, group, scale)


def group_short_queries(
    starts: Sequence[int],  # query_start_loc
    seq_lens: Sequence[int],
    is_short: Sequence[bool],
    block_tables: torch.Tensor,  # [num_seqs, max_blocks] int
    query: torch.Tensor,
    key_cache: torch.Tensor,
) -> tuple[list[DecodeGroup], list[int]]:
    """The short sequences in groups, and the rows of those that are not short. Whoever has no query
    token is in neither. Raises `ValueError` if lengths and tables contradict each other."""
    others: list[int] = []
    short: dict[int, list[int]] = {}  # by the number of query tokens, rounded up
    for row, seq_len in enumerate(seq_lens):
        query_len = starts[row + 1] - starts[row]
        if query_len == 0:
            continue
        _check_lengths(row, query_len, seq_len, block_tables, key_cache.shape[1])
        if is_short[row]:
            rounded = next((n for n in SHORT_QUERIES if query_len <= n), query_len)
            short.setdefault(rounded, []).append(row)
        else:
            others.append(row)
    groups = [
        _make_decode_group(rows, starts, seq_lens, block_tables, query, key_cache)
        for same in short.values()
        for rows in split_by_length(same, seq_lens, max_group_slots(key_cache))
    ]
    return groups, others


def _check_lengths(
    row: int, query_len: int, seq_len: int, block_tables: torch.Tensor, block_size: int
) -> None:
    if not 0 < query_len <= seq_len or -(-seq_len // block_size) > block_tables.shape[1]:
        raise ValueError(
            f"sequence {row}: query_len is {query_len}, seq_len {seq_len}, block_tables "
            f"{tuple(block_tables.shape)} of {block_size}: they contradict each other"
        )


def is_short_query(query_len: int) -> bool:
    return query_len <= max(SHORT_QUERIES, default=0)


def max_group_slots(key_cache: torch.Tensor) -> int:
    return GROUP_KEY_BYTES[key_cache.device.type] // key_cache[0, 0].nbytes


def split_by_length(
    rows: Sequence[int], seq_lens: Sequence[int], max_slots: int
) -> list[list[int]]:
    """Longest first, into groups of at most `max_slots` slots, padding included, unless it is one
    sequence, and without sequences shorter than half the group's longest."""
    groups: list[list[int]] = []
    for row in sorted(rows, key=seq_lens.__getitem__, reverse=True):
        longest = seq_lens[groups[-1][0]] if groups else 0
        fits = groups and (len(groups[-1]) + 1) * longest <= max_slots
        if fits and 2 * seq_lens[row] >= longest:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _make_decode_group(
    rows: list[int],  # longest first
    starts: Sequence[int],  # query_start_loc
    seq_lens: Sequence[int],
    block_tables: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
) -> DecodeGroup:
    """All that depends on lengths is worked out on the host: nobody waits for the device."""
    device, block_size = query.device, key_cache.shape[1]
    lens = torch.tensor([seq_lens[row] for row in rows])[:, None]
    first = torch.tensor([starts[row] for row in rows])[:, None]
    last = torch.tensor([starts[row + 1] - 1 for row in rows])[:, None]
    query_len = max(starts[row + 1] - starts[row] for row in rows)
    num_keys = seq_lens[rows[0]]
    num_blocks = -(-num_keys // block_size)
    positions = torch.arange(num_blocks * block_size)
    is_unused = positions >= lens
    # Aligned to the last one; rows that a sequence has not are its first once more.
    tokens = (last - torch.arange(query_len - 1, -1, -1)).maximum(first)
    # A query sees all keys but those of the queries behind it.
    hidden = positions[:num_keys] >= (lens - (last - tokens))[:, :, None]  # [n, query_len, keys]
    mask = None
    if hidden.any():
        hidden = hidden.repeat(1, query.shape[1] // key_cache.shape[2], 1)[:, None]
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, -math.inf)
        mask = mask.to(device, non_blocking=True)
    block_ids = block_tables[torch.tensor(rows).to(device, non_blocking=True), :num_blocks]
    is_foreign = is_unused[:, ::block_size].to(device, non_blocking=True)
    return DecodeGroup(
        tokens=tokens.flatten().to(device, non_blocking=True),
        block_ids=block_ids.masked_fill(is_foreign, 0).flatten(),
        num_seqs=len(rows),
        num_keys=num_keys,
        unused=is_unused.flatten().nonzero().flatten().to(device, non_blocking=True),
        mask=mask,
    )


def attend_group(
    query: torch.Tensor,  # [n * query_len, num_heads, head_dim]
    keys: torch.Tensor,  # [n * slots, num_kv_heads, head_dim], unused ones are overwritten
    values: torch.Tensor,  # the same
    group: DecodeGroup,
    scale: float,
) -> torch.Tensor:  # [n * query_len, num_heads, head_dim]
    num_tokens, num_heads, head_dim = query.shape
    num_seqs, num_kv_heads = group.num_seqs, keys.shape[1]
    shared = num_heads // num_kv_heads
    keys.index_fill_(0, group.unused, 0)
    values.index_fill_(0, group.unused, 0)
    # Query heads that share a KV head become query rows of that head: keys are read once.
    query = query.view(num_seqs, -1, num_kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
    query = query.reshape(num_seqs, num_kv_heads, -1, head_dim)
    keys = keys.view(num_seqs, -1, num_kv_heads, head_dim)[:, : group.num_keys].transpose(1, 2)
    values = values.view(num_seqs, -1, num_kv_heads, head_dim)[:, : group.num_keys].transpose(1, 2)
    output = scaled_dot_product_attention(query, keys, values, attn_mask=group.mask, scale=scale)
    output = output.view(num_seqs, num_kv_heads, shared, -1, head_dim).permute(0, 3, 1, 2, 4)
    return output.reshape(num_tokens, num_heads, head_dim)
