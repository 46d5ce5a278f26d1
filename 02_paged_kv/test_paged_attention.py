"""Attention through block tables against a loop over queries in float64 that has no blocks.

Every slot that no test sequence owns is NaN, the null block and the tables' spare entries included.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

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
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}


def naive_attention(query, keys, values, scale, window=None):
    """One query and one head at a time. query `[query_len, num_heads, head_dim]`, keys and values
    `[seq_len, num_kv_heads, head_dim]` of one sequence. Returns float64 on the CPU."""
    query = query.double().cpu()
    keys = keys.double().cpu()
    values = values.double().cpu()
    output = torch.empty_like(query)
    num_shared = query.shape[1] // keys.shape[1]
    for i in range(len(query)):
        num_seen = len(keys) - len(query) + i + 1
        seen = slice(max(num_seen - (window or num_seen), 0), num_seen)
        for head in range(query.shape[1]):
            kv_head = head // num_shared
            scores = scale * (keys[seen, kv_head] @ query[i, head])
            weights = (scores - scores.max()).exp()
            output[i, head] = weights @ values[seen, kv_head] / weights.sum()
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
    tolerance = TOLERANCE

    def expected(self) -> torch.Tensor:
        rows = self.query[: sum(self.query_lens)].split(self.query_lens)
        sequences = zip(rows, self.keys, self.values, strict=True)
        outputs = [naive_attention(*each, self.scale, self.metadata.window) for each in sequences]
        return torch.cat([self.query[:0].double().cpu(), *outputs])

    def plan(self, backend: AttentionBackend) -> AttentionPlan:
        return backend.plan(self.metadata, self.query.shape[1], self.key_cache)

    def attend(self, plan: AttentionPlan | None = None) -> torch.Tensor:
        plan = plan or self.plan(TorchAttentionBackend())
        return plan.attend(self.query, self.key_cache, self.value_cache, self.scale)

    def check_backend(self, backend: AttentionBackend) -> AttentionPlan:
        """Return the plan, if the output of two layers is right: other contents, same places. The
        second one's query is a part of a projection."""
        plan = self.plan(backend)
        self.check(self.attend(plan))
        self.key_cache.mul_(2), self.value_cache.neg_()
        self.keys = [k * 2 for k in self.keys]
        self.values = [-v for v in self.values]
        num_heads = self.query.shape[1]
        self.query = torch.cat([self.query, self.query * math.nan], 1)[:, :num_heads]
        self.check(self.attend(plan))
        return plan

    def check(self, output: torch.Tensor) -> None:
        assert output.dtype == self.query.dtype and output.shape == self.query.shape
        num_tokens = sum(self.query_lens)
        found = output[:num_tokens].double().cpu()
        atol = self.tolerance[output.dtype]
        torch.testing.assert_close(found, self.expected(), atol=atol, rtol=0)
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
    window: int | None = None,
    scale: float | None = None,
) -> Case:
    """Blocks in random order, spare table entries that point anywhere, everything unused NaN."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)

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
    num_columns = max(num_blocks, default=0) + 1
    tables = [[rng.choice(spare) for _ in range(num_columns)] for _ in num_blocks]
    keys = []
    values = []
    slots = []
    for table, num, (query_len, seq_len) in zip(tables, num_blocks, lengths, strict=True):
        table[:num] = [free_ids.pop() for _ in range(num)]
        keys.append(normal(seq_len, num_kv_heads, head_dim))
        values.append(normal(seq_len, num_kv_heads, head_dim))
        blocks = [table[position // block_size] for position in range(seq_len)]
        offsets = [position % block_size for position in range(seq_len)]
        key_cache[blocks, offsets] = keys[-1]
        value_cache[blocks, offsets] = values[-1]
        seq_slots = [b * block_size + o for b, o in zip(blocks, offsets, strict=True)]
        slots += seq_slots[seq_len - query_len :]
    query_lens = [query_len for query_len, _ in lengths]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens], device=device).cumsum(0),
        seq_lens=torch.tensor([n for _, n in lengths], dtype=torch.int64, device=device),
        block_tables=torch.tensor(tables, device=device).int().view(len(tables), num_columns),
        slot_mapping=torch.tensor(slots + [-1] * num_padding_tokens, device=device).long(),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max((n for _, n in lengths), default=0),
        window=window,
    )
    num_heads = num_kv_heads * num_shared
    query = normal(sum(query_lens) + num_padding_tokens, num_heads, head_dim)
    scale = scale or head_dim**-0.5
    return Case(query, key_cache, value_cache, metadata, scale, keys, values, query_lens)


def decode_alone(case: Case, row: int) -> Case:
    """One of a batch of decodes, without padding tokens, as a batch of its own."""
    names = ("seq_lens", "block_tables", "slot_mapping")
    fields = {name: getattr(case.metadata, name)[row : row + 1] for name in names}
    fields["query_start_loc"] = case.metadata.query_start_loc[:2]
    fields["max_seq_len"] = int(fields["seq_lens"])
    metadata = replace(case.metadata, **fields)
    return replace(case, query=case.query[row : row + 1], metadata=metadata)


# -- the contract of everything that attends


Lengths = list[tuple[int, int]]  # (query_len, seq_len): decodes, drafts, chunks, whole prompts
MIXED: Lengths = [(1, 1), (1, 17), (5, 5), (1, 40), (7, 20), (1, 3), (2, 35), (1, 33), (3, 3)]
LONG: Lengths = [*MIXED, (8, 8), (16, 19), (17, 17), (19, 41), (0, 9), (30, 33)]
# Every start and end within one of a border of blocks of 4 (Traps 28 and 30).
EDGES: Lengths = [(b - a, b) for b in (1, 3, 4, 5, 7, 8, 9) for a in (0, 3, 4, 5, 7, 8) if a < b]

Batch = dict[str, Any]


def batch(lengths: Lengths, block_size: int, **options: Any) -> Batch:
    return {"lengths": lengths, "block_size": block_size} | options


BATCHES = {
    "blocks of 1": batch(LONG, 1),
    "blocks of 2, float32": batch(LONG, 2, dtype=torch.float32),
    "blocks of 3, a head": batch(MIXED, 3, num_kv_heads=1, num_shared=1),
    "blocks of 4, edges": batch(EDGES, 4, num_kv_heads=1, num_shared=3),
    "blocks of 16, 8 heads share": batch(LONG, 16, num_kv_heads=1, num_shared=8, head_dim=5),
    "blocks of 33, none shares": batch(MIXED, 33, num_kv_heads=4, num_shared=1, head_dim=80),
    "blocks of 256, bfloat16": batch(LONG, 256, dtype=torch.bfloat16),
    "window of 1": batch(LONG, 3, window=1),
    "window of 2": batch(LONG, 1, window=2),
    "window of 5": batch(LONG, 16, window=5, num_shared=3),
    "window of 16, bfloat16": batch(LONG, 3, window=16, dtype=torch.bfloat16),
    "window of 64": batch(LONG, 1, window=64),
    "scores that overflow exp": batch(MIXED, 4, scale=300.0),
    "padding sequences (trap 33)": batch([(0, 9), (1, 5), (0, 0), (4, 6), (0, 1)], 4),
    "padding alone": batch([(0, 9), (0, 7)], 4),
    "nothing": batch([], 4, num_padding_tokens=0),
}
WINDOWS = [name for name in BATCHES if name.startswith("window")]


class Attention:
    """A way to attend: what it is given, and its backend. Another one derives from it, and imports
    the tests that take it."""

    def make_case(self, lengths: Lengths, block_size: int, **options: Any) -> Case:
        options = {"num_padding_tokens": 2, "seed": block_size} | options
        return make_case(lengths, block_size, **options)

    def make_backend(self, case: Case) -> AttentionBackend:
        return TorchAttentionBackend()

    def check(self, lengths: Lengths, block_size: int, **options: Any) -> AttentionPlan:
        """Trap 35: NaN in every unused slot reaches no output. Traps 28, 29: who sees which key."""
        case = self.make_case(lengths, block_size, **options)
        return case.check_backend(self.make_backend(case))


@pytest.fixture
def attention(monkeypatch) -> Attention:
    monkeypatch.setattr(module, "QUERY_TILE", 7)
    return Attention()


@pytest.mark.net
@pytest.mark.parametrize("name", BATCHES)
def test_each_query_attends_to_what_it_sees(name, attention):
    attention.check(**BATCHES[name])


@pytest.mark.net
@pytest.mark.parametrize("num_shared", [(2, 3), (1, 4)])
def test_models_with_other_numbers_of_query_heads_share_metadata(num_shared, attention):
    """A target and its draft: equal caches, as many query heads to a KV head as they like, and a
    plan each. In turn, layer after layer."""
    target, draft = (attention.make_case(MIXED, 4, num_shared=n) for n in num_shared)
    backend = attention.make_backend(target)
    draft.metadata = target.metadata
    draft.key_cache = target.key_cache
    draft.value_cache = target.value_cache
    draft.keys = target.keys
    draft.values = target.values
    plans = {id(case): case.plan(backend) for case in (target, draft)}
    for case in (target, draft, draft, target):
        case.check(case.attend(plans[id(case)]))


@pytest.mark.net
@pytest.mark.parametrize("block_size", [1, 3, 256])
def test_written_tokens_stand_in_their_slots_and_nothing_else_changes(block_size, attention):
    case = attention.make_case([(1, 20)] * 5, block_size)  # and two padding tokens
    caches = case.key_cache.fill_(7), case.value_cache.fill_(8)
    slots = case.metadata.slot_mapping[[0, 5, 1, 2, 6, 3, 4]]
    expected = [cache.clone() for cache in caches]
    new = [torch.randn(7, *cache.shape[2:]).to(cache) for cache in caches]
    for mapping in (slots.clone().fill_(-1), slots):
        case.metadata.slot_mapping = mapping
        case.plan(attention.make_backend(case)).write_kv(*new, *caches)
        for token, slot in enumerate(mapping.tolist()):
            if slot >= 0:
                for contents, written in zip(expected, new, strict=True):
                    contents[slot // block_size, slot % block_size] = written[token]
        for cache, contents in zip(caches, expected, strict=True):
            assert torch.equal(cache[1:], contents[1:]), "no request owns the null block"


# -- PyTorch's


@pytest.mark.net
@pytest.mark.parametrize("short", [(), (1,), (2, 4)], ids=str)
def test_which_queries_are_attended_together_does_not_matter(short, attention, monkeypatch):
    monkeypatch.setattr(attention_plan, "SHORT_QUERIES", short)
    attention.check(LONG, 3, num_kv_heads=3)


def test_a_long_prompt_needs_no_square_of_memory(monkeypatch):
    """No mask at all for a whole prompt, one of tile x seq_len for a chunk with history."""
    spy = mock.Mock(wraps=module.scaled_dot_product_attention)
    monkeypatch.setattr(module, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(module, "QUERY_TILE", 16)
    case = make_case([(100, 100), (40, 50)], 16, num_kv_heads=1)
    case.check(
        paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, 8**-0.5)
    )
    masks = [call.kwargs.get("attn_mask") for call in spy.call_args_list]
    shapes = [None if mask is None else (*mask.shape,) for mask in masks]
    assert shapes == [None, (16, 26), (16, 42), (8, 50)]


# -- the memory


def test_kv_bytes():
    """The reading material's example is 7.3 GB, not the 3.6 it prints."""
    cache = PagedKVCache(28, 1, 256, 2, 128, torch.bfloat16, device="meta")
    assert 1000 * cache.kv_bytes_per_block == 7_340_032_000


def test_memory_is_the_systems_until_it_is_written():
    """Half a GiB of zeros. Zeroed by hand, all of it would be in this process from the start."""
    process = psutil.Process()
    before = process.memory_info().rss
    cache = PagedKVCache(2, 1 << 23, 1, 2, 4, torch.bfloat16)
    caches = (*cache.key_cache, *cache.value_cache)
    assert cache.num_blocks * cache.kv_bytes_per_block == sum(t.nbytes for t in caches) == 1 << 29
    assert all(t.data_ptr() % ALIGNMENT == 0 and not t[::4099].any() for t in caches)
    assert process.memory_info().rss - before < 1 << 27
    cache.key_cache[1][7] = 1
    assert [t.count_nonzero() for t in (c[:100] for c in caches)] == [0, 8, 0, 0]
