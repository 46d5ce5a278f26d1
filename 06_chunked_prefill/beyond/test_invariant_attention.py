"""Invariant attention is the same to the last bit, however a sequence is chunked and whatever else
is in the batch. Slots that are not, or not yet, its own are NaN. That it is right:
`test_every_attention.py`."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invariant_attention import KEY_TILE, InvariantAttentionBackend
from paged_attention import AttentionMetadata, PagedKVCache
from test_paged_attention import make_case
from test_window_attention import give_up_blocks, skip_blocks

DTYPES = [torch.float32, torch.bfloat16]


def test_spans_in_front_of_a_window_are_not_read():
    case = make_case([(1, 4096), (64, 4096)], 16, torch.float32, window=200)
    plan = give_up_blocks(case).plan(InvariantAttentionBackend())
    assert [len(group.spans) for group in plan.chunk_groups] == [2, 3]


# -- the same


@dataclass
class World:
    """Sequences, with everything that is known of them in the end."""

    queries: list[torch.Tensor]  # [len, num_heads, head_dim]
    keys: list[torch.Tensor]  # [len, num_kv_heads, head_dim]
    values: list[torch.Tensor]
    window: int | None = None

    @classmethod
    def make(cls, lengths, dtype, num_kv_heads, num_shared, head_dim, seed, window=None) -> World:
        generator = torch.Generator().manual_seed(seed)
        heads = num_kv_heads * num_shared, num_kv_heads, num_kv_heads
        queries, keys, values = (
            [torch.randn(n, num, head_dim, generator=generator).to(dtype) for n in lengths]
            for num in heads
        )
        return cls([3 * query for query in queries], keys, values, window)

    def attend(
        self, parts: list[tuple[int, int, int]], block_size: int, rng: random.Random
    ) -> list[torch.Tensor]:
        """Positions start to stop of a sequence, for each of the parts (sequence, start, stop) of
        one batch. Positions after `stop` are not yet known and hold NaN, as does every other slot
        and every position before the window of `start`."""
        num_blocks = [-(-stop // block_size) for _, _, stop in parts]
        ids = list(range(1, sum(num_blocks) + 4))
        rng.shuffle(ids)
        dtype, (_, num_kv_heads, head_dim) = self.keys[0].dtype, self.keys[0].shape
        cache = PagedKVCache(1, len(ids) + 1, block_size, num_kv_heads, head_dim, dtype)
        caches = cache.key_cache[0].fill_(math.nan), cache.value_cache[0].fill_(math.nan)
        tables = torch.zeros(len(parts), max(num_blocks) + 1, dtype=torch.int32)
        for row, (sequence, _, stop) in enumerate(parts):
            block_ids = torch.tensor([ids.pop() for _ in range(num_blocks[row])])
            tables[row, : len(block_ids)] = block_ids
            slots = (block_ids[:, None] * block_size + torch.arange(block_size)).flatten()[:stop]
            outside = slots[: max(0, parts[row][1] - (self.window or stop) + 1)]
            for known, kv in zip((self.keys, self.values), caches, strict=True):
                kv = kv.view(-1, num_kv_heads, head_dim)
                kv[slots], kv[outside] = known[sequence][:stop], math.nan
        lens = [stop - start for _, start, stop in parts]
        stops = torch.tensor([stop for _, _, stop in parts])
        starts = torch.tensor([0, *lens]).cumsum(0)
        query = torch.cat([self.queries[i][start:stop] for i, start, stop in parts])
        slots = torch.zeros(len(query), dtype=torch.int64)
        lengths = max(lens), int(stops.max())
        metadata = AttentionMetadata(starts, stops, tables, slots, *lengths, self.window)
        if self.window is not None:
            metadata = skip_blocks(metadata, block_size)
        plan = InvariantAttentionBackend().plan(metadata, query.shape[1], caches[0])
        return list(plan.attend(query, *caches, head_dim**-0.5).split(lens))

    def whole(self) -> list[torch.Tensor]:
        """Each sequence alone and unchunked."""
        parts = [(i, 0, len(query)) for i, query in enumerate(self.queries)]
        return [self.attend([part], 16, random.Random(0))[0] for part in parts]


def pieces_of(lengths: list[int], rng: random.Random) -> Iterator[list[tuple[int, int, int]]]:
    """Batches that compute every sequence from its beginning to its end, chunked anywhere: decodes,
    draft tokens, chunks."""
    done = [0] * len(lengths)
    while done != lengths:
        batch = []
        for i in rng.sample(range(len(lengths)), rng.randint(1, len(lengths))):
            start, done[i] = done[i], min(done[i] + rng.choice([1, 1, 3, 5, 40, 150]), lengths[i])
            if start < done[i]:
                batch.append((i, start, done[i]))
        if batch:
            yield batch


@pytest.mark.net
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 30, 127, 128, 129, 260]), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (1, 4), (2, 2), (2, 3), (8, 2)]),
    head_dim=st.sampled_from([8, 64, 80]),
    window=st.sampled_from([None, None, 1, 20, 128, 129, 200]),
    seed=st.integers(0, 2**20),
)
def test_a_token_has_the_same_bits_however_its_sequence_is_cut_and_in_any_company(
    dtype, lengths, heads, head_dim, window, seed
):
    world, rng = World.make(lengths, dtype, *heads, head_dim, seed, window), random.Random(seed)
    whole, block_size = world.whole(), rng.choice([1, 3, 16, 33])
    for batch in pieces_of(lengths, rng):
        outputs = world.attend(batch, block_size, rng)
        for (i, start, stop), output in zip(batch, outputs, strict=True):
            assert torch.equal(output, whole[i][start:stop])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_rows_and_every_place_in_a_batch(dtype):
    """Chunks of 1 to 70 tokens of one sequence; and a decode at every place among 70."""
    world, rng = World.make([KEY_TILE + 70], dtype, 2, 2, 64, seed=1), random.Random(1)
    (whole,) = world.whole()
    for n in range(1, 71):
        (output,) = world.attend([(0, 100, 100 + n)], 16, rng)
        assert torch.equal(output, whole[100 : 100 + n]), n
    for place in range(0, 70, 3):
        parts = [(0, p, p + 1) for p in range(95, 164)]
        parts.insert(place, (0, 150, 151))
        assert torch.equal(world.attend(parts, 16, rng)[place], whole[150:151]), place
