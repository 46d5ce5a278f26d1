"""Attention through block tables against a loop over single scores in float64 that has no blocks.

Every slot that no test sequence owns is NaN, the null block and the tables' spare entries included.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
import torch

import attention_plan
import paged_attention as module
from paged_attention import (
    ALIGNMENT,
    AttentionBackend,
    AttentionMetadata,
    AttentionPlan,
    PagedKVCache,
    TorchAttentionBackend,
    paged_attention,
    write_kv,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}
BLOCK_SIZES = [1, 2, 3, 4, 16, 33, 256]


def naive_attention(query, keys, values, scale, window=None):
    """One score at a time. query `[query_len, num_heads, head_dim]`, keys and values `[seq_len,
    num_kv_heads, head_dim]` of one sequence. Returns float64 on the CPU: each score that is read
    from a GPU would wait for it."""
    query, keys, values = query.double().cpu(), keys.double().cpu(), values.double().cpu()
    output = torch.empty_like(query)
    num_shared = query.shape[1] // keys.shape[1]
    for i in range(len(query)):
        num_seen = len(keys) - len(query) + i + 1
        for head in range(query.shape[1]):
            kv_head = head // num_shared
            seen = range(0 if window is None else max(num_seen - window, 0), num_seen)
            scores = [scale * float(query[i, head] @ keys[j, kv_head]) for j in seen]
            highest = max(scores)
            weights = [math.exp(score - highest) for score in scores]
            total = sum(weights)
            output[i, head] = sum(
                weight / total * values[j, kv_head] for j, weight in zip(seen, weights)
            )
    return output


@dataclass
class Case:
    """A batch over a cache that is NaN wherever no sequence has written."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata
    scale: float
    keys: list[torch.Tensor]  # of each sequence, contiguous
    values: list[torch.Tensor]
    query_lens: list[int]

    def expected(self) -> torch.Tensor:
        rows = self.query[: sum(self.query_lens)].split(self.query_lens)
        return torch.cat(
            [
                naive_attention(*sequence, self.scale, self.metadata.window)
                for sequence in zip(rows, self.keys, self.values, strict=True)
            ]
        )

    def plan(self, backend: AttentionBackend) -> AttentionPlan:
        return backend.plan(self.metadata, self.query.shape[1], self.key_cache)

    def attend(self, plan: AttentionPlan | None = None) -> torch.Tensor:
        tensors = self.query, self.key_cache, self.value_cache
        if plan is None:
            return paged_attention(*tensors, self.metadata, self.scale)
        return plan.attend(*tensors, self.scale)

    def check_backend(self, backend: AttentionBackend) -> AttentionPlan:
        """Return the plan, if the output of two layers is right: other contents, same places."""
        plan = self.plan(backend)
        self.check(self.attend(plan))
        self.key_cache.mul_(2), self.value_cache.neg_()
        self.keys, self.values = [k * 2 for k in self.keys], [-v for v in self.values]
        self.check(self.attend(plan))
        return plan

    def check(self, output: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        assert output.dtype == self.query.dtype and output.shape == self.query.shape
        num_tokens = sum(self.query_lens)
        torch.testing.assert_close(
            output[:num_tokens].double().cpu(),
            self.expected(),
            atol=TOLERANCE[dtype or output.dtype],
            rtol=0,
        )
        assert not output[num_tokens:].any(), "rows of padding tokens are zero"


def make_case(
    lengths: list[tuple[int, int]],  # (query_len, seq_len) of each sequence
    block_size: int,
    dtype: torch.dtype = torch.float64,
    num_kv_heads: int = 2,
    num_shared: int = 2,
    head_dim: int = 8,
    num_padding_tokens: int = 0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Case:
    """Blocks in random order, spare table entries that point anywhere, everything unused NaN."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    num_blocks = [-(-seq_len // block_size) for _, seq_len in lengths]
    free_ids = list(range(1, sum(num_blocks) + 3))
    rng.shuffle(free_ids)
    cache = PagedKVCache(
        1, len(free_ids) + 1, block_size, num_kv_heads, head_dim, dtype, device=device
    )
    key_cache, value_cache = cache.key_cache[0], cache.value_cache[0]
    key_cache.fill_(math.nan), value_cache.fill_(math.nan)
    spare = [0, *free_ids]
    tables = [
        [rng.choice(spare) for _ in range(max(num_blocks, default=0) + 1)] for _ in num_blocks
    ]
    keys, values, slots = [], [], []
    for table, num, (query_len, seq_len) in zip(tables, num_blocks, lengths, strict=True):
        table[:num] = [free_ids.pop() for _ in range(num)]
        keys.append(normal(seq_len, num_kv_heads, head_dim))
        values.append(normal(seq_len, num_kv_heads, head_dim))
        seq_slots = [table[p // block_size] * block_size + p % block_size for p in range(seq_len)]
        for position, slot in enumerate(seq_slots):  # by hand: `write_kv` has tests of its own
            block, offset = divmod(slot, block_size)
            key_cache[block, offset] = keys[-1][position]
            value_cache[block, offset] = values[-1][position]
        slots += seq_slots[seq_len - query_len :]
    query_lens = [query_len for query_len, _ in lengths]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens], device=device).cumsum(0),
        seq_lens=torch.tensor([n for _, n in lengths], dtype=torch.int64, device=device),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device).view(len(lengths), -1)
        if lengths
        else torch.zeros(0, 0, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots + [-1] * num_padding_tokens, device=device).long(),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max((n for _, n in lengths), default=0),
    )
    num_heads = num_kv_heads * num_shared
    query = normal(sum(query_lens) + num_padding_tokens, num_heads, head_dim)
    scale = head_dim**-0.5
    return Case(query, key_cache, value_cache, metadata, scale, keys, values, query_lens)


MIXED = [(1, 1), (1, 17), (5, 5), (1, 40), (7, 20), (1, 3), (2, 35), (1, 33), (3, 3)]


BackendOf = Callable[[Case], AttentionBackend]


@pytest.fixture
def backend_of() -> BackendOf:
    """Make the backend of the tests that take this, for a case that it may change. A module that
    imports these tests has its own backend, so each of them tests every backend."""
    return lambda case: TorchAttentionBackend()


@pytest.fixture(params=[(), (1,), (2, 4), (1, 8, 16)], ids=str)
def short_query(request, monkeypatch):
    """Which queries are attended in groups or one by one. The output must not depend on it."""
    monkeypatch.setattr(attention_plan, "SHORT_QUERIES", request.param)


@pytest.mark.sample
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.usefixtures("short_query")
def test_any_mix_of_query_lengths_through_shuffled_tables(block_size, dtype, backend_of):
    """Trap 35: NaN in every unused slot reaches no output. Traps 28, 29: who sees which key."""
    case = make_case(MIXED, block_size, dtype, num_padding_tokens=2, seed=block_size)
    case.check_backend(backend_of(case))


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 64])
def test_a_query_sees_its_window(window, block_size, backend_of, monkeypatch):
    """In tables that still have the blocks before it; long queries are attended in tiles."""
    monkeypatch.setattr(module, "QUERY_TILE", 7)
    lengths = [*MIXED, (8, 8), (2, 2), (19, 41), (30, 33)]
    case = make_case(lengths, block_size, num_padding_tokens=2, seed=window)
    case.metadata.window = window
    case.check_backend(backend_of(case))


@pytest.mark.sample
@pytest.mark.parametrize("num_kv_heads, num_shared", [(1, 1), (1, 8), (4, 1), (2, 3), (3, 2)])
@pytest.mark.usefixtures("short_query")
def test_grouped_query_heads(num_kv_heads, num_shared, backend_of):
    case = make_case(MIXED, 4, num_kv_heads=num_kv_heads, num_shared=num_shared, head_dim=5)
    case.check_backend(backend_of(case))


@pytest.mark.sample
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.usefixtures("short_query")
def test_chunks_that_end_at_and_around_block_ends(block_size):
    """Traps 28 and 30: every start and end within one of a block boundary, as one batch each."""
    edges = sorted(
        {max(e, 0) for b in (0, 1, 2) for e in range(b * block_size - 1, b * block_size + 2)}
    )
    lengths = [(stop - start, stop) for start in edges for stop in edges if start < stop]
    for seed in range(2):
        random.Random(seed).shuffle(lengths)
        case = make_case(lengths, block_size, seed=seed)
        case.check(case.attend())


def test_decode_groups_hold_similar_lengths_within_the_limit():
    lens = np.array([100, 7, 60, 51, 50, 49, 3, 1])

    def split(rows: list[int], max_slots: int) -> list[list[int]]:
        groups = attention_plan.split_by_length(np.array(rows), lens, max_slots)
        return [group.tolist() for group in groups]

    assert split(list(range(8)), 10**6) == [[0, 2, 3, 4], [5], [1], [6], [7]]
    assert split([0, 2, 3, 4], 299) == [[0, 2], [3, 4]]
    assert split([0, 1], 1) == [[0], [1]], "too long for any group"
    groups = attention_plan.group_short_queries(np.arange(4), np.array([8, 1, 16, 2]), lens, 10**6)
    assert [group.tolist() for group in groups] == [[1], [0, 3], [2]], "lengths 1, 2 to 8, more"
    assert attention_plan.is_short_query(np.array([1, 16, 17])).tolist() == [True, True, False]


def test_batches_without_tokens_and_sequences_without_tokens(backend_of):
    """Trap 33: a padding sequence has no query token, whatever its length says."""
    empty = make_case([], 4)
    assert empty.attend(empty.plan(backend_of(empty))).shape == (0, 4, 8)
    case = make_case([(0, 9), (1, 5), (0, 3), (4, 6), (0, 1)], 4, num_padding_tokens=3)
    case.metadata.seq_lens[2] = 0
    case.check_backend(backend_of(case))


@pytest.mark.parametrize("num_shared", [(2, 3), (4, 1), (1, 4)])
def test_models_with_other_numbers_of_query_heads_share_metadata(num_shared, backend_of):
    """A target and its draft: equal caches, as many query heads to a KV head as they like, and a
    plan each. In turn, layer after layer."""
    target, draft = (make_case(MIXED, 4, num_shared=n) for n in num_shared)
    backend = backend_of(target)
    draft.metadata = target.metadata
    draft.key_cache, draft.value_cache = target.key_cache, target.value_cache
    draft.keys, draft.values = target.keys, target.values
    plans = {id(case): case.plan(backend) for case in (target, draft)}
    for case in (target, draft, draft, target):
        case.check(case.attend(plans[id(case)]))


@pytest.mark.parametrize(
    "query_len, seq_len, num_columns", [(5, 4, 9), (1, 0, 9), (1, 9, 2), (3, 9, 2)]
)
def test_metadata_that_contradicts_itself_is_an_error(query_len, seq_len, num_columns, backend_of):
    case = make_case([(1, 4)], 4)
    case.metadata.query_start_loc = torch.tensor([0, query_len])
    case.metadata.seq_lens = torch.tensor([seq_len])
    case.metadata.block_tables = torch.ones(1, num_columns, dtype=torch.int32)
    backend = backend_of(case)
    with pytest.raises(ValueError, match=f"sequence 0: query_len {query_len}, seq_len {seq_len}"):
        case.plan(backend)


def test_a_long_prompt_needs_no_square_of_memory(monkeypatch):
    """No mask at all for a whole prompt, one of tile x seq_len for a chunk with history."""
    seen = []
    real = module.scaled_dot_product_attention

    def spy(query, keys, values, attn_mask=None, is_causal=False, scale=None):
        seen.append(None if attn_mask is None else tuple(attn_mask.shape))
        return real(query, keys, values, attn_mask=attn_mask, is_causal=is_causal, scale=scale)

    monkeypatch.setattr(TorchAttentionBackend, "attend_group", staticmethod(spy))
    monkeypatch.setattr(module, "QUERY_TILE", 16)
    case = make_case([(100, 100), (40, 50)], 16, num_kv_heads=1)
    case.check(case.attend())
    assert seen == [None, (16, 26), (16, 42), (8, 50)]


# -- writing


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_written_tokens_stand_in_their_slots_and_nothing_else_changes(block_size):
    cache = PagedKVCache(1, 6, block_size, 2, 3, torch.float64)
    key_cache, value_cache = cache.key_cache[0].fill_(7), cache.value_cache[0].fill_(8)
    slots = random.Random(block_size).sample(range(6 * block_size), 5)
    key, value = torch.randn(7, 2, 3).double(), torch.randn(7, 2, 3).double()
    mapping = torch.tensor([slots[0], -1, *slots[1:], -1])
    expected = key_cache.clone(), value_cache.clone()
    write_kv(key, value, key_cache, value_cache, torch.full_like(mapping, -1))  # padding alone
    assert torch.equal(key_cache, expected[0]) and torch.equal(value_cache, expected[1])
    for written, contents in zip((key, value), expected, strict=True):
        for slot, token in zip(slots, (0, 2, 3, 4, 5), strict=True):
            contents[slot // block_size, slot % block_size] = written[token]
    write_kv(key, value, key_cache, value_cache, mapping)
    assert torch.equal(key_cache, expected[0]) and torch.equal(value_cache, expected[1])


def test_kv_bytes():
    """The reading material's example is 7.3 GB, not the 3.6 it prints."""
    cache = PagedKVCache(28, 1, 256, 2, 128, torch.bfloat16, device="meta")
    assert 1000 * cache.kv_bytes_per_block == 7_340_032_000
    cache = PagedKVCache(3, 5, 4, 2, 8, torch.float32)
    total = sum(t.nbytes for t in (*cache.key_cache, *cache.value_cache))
    assert total == cache.num_blocks * cache.kv_bytes_per_block
    assert cache.key_cache[2].shape == cache.value_cache[0].shape == (5, 4, 2, 8)
    assert cache.key_cache[0].data_ptr() != cache.value_cache[0].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_memory_is_the_systems_until_it_is_written(dtype):
    """Half a GiB of zeros. Zeroed by hand, all of it would be in this process from the start."""
    process = psutil.Process()
    before = process.memory_info().rss
    cache = PagedKVCache(2, (1 << 24) // dtype.itemsize, 1, 2, 4, dtype)
    caches = (*cache.key_cache, *cache.value_cache)
    assert all(t.dtype == dtype and t.is_contiguous() for t in caches)
    assert all(t.data_ptr() % ALIGNMENT == 0 and not t[::4099].any() for t in caches)
    assert process.memory_info().rss - before < 1 << 27
    cache.key_cache[1][7] = 1
    assert [t.count_nonzero() for t in (c[:100] for c in caches)] == [0, 8, 0, 0]
