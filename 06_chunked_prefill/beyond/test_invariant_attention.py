"""Invariant attention is the same to the last bit, however a sequence is chunked and whatever else
is in the batch. That it is right: `test_every_attention.py`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invariant_attention import KEY_TILE, InvariantAttentionBackend
from test_paged_attention import Case, make_case
from test_window_attention import give_up_blocks, skip_blocks

DTYPES = [torch.float32, torch.bfloat16]
Part = tuple[int, int, int]  # a sequence, its first position, and the one after its last


def test_spans_in_front_of_a_window_are_not_read():
    case = make_case([(1, 4096), (64, 4096)], 16, torch.float32, window=200)
    plan = give_up_blocks(case).plan(InvariantAttentionBackend())
    assert [len(group.spans) for group in plan.chunk_groups] == [2, 3]


def attend(case: Case, parts: list[Part]) -> list[torch.Tensor]:
    """Parts of a batch of whole prompts, as a batch of their own."""
    sequences, starts, stops = (torch.tensor(column) for column in zip(*parts, strict=True))
    first_rows = case.metadata.query_start_loc.tolist()
    whole = case.metadata
    lens = (stops - starts).tolist()
    metadata = replace(
        whole,
        query_start_loc=torch.tensor([0, *lens]).cumsum(0),
        seq_lens=stops,
        block_tables=whole.block_tables[sequences],
        max_query_len=max(lens),
        max_seq_len=int(stops.max()),
    )
    if whole.window is not None:
        metadata = skip_blocks(metadata, case.key_cache.shape[1])
    rows = [torch.arange(first_rows[i] + start, first_rows[i] + stop) for i, start, stop in parts]
    part = replace(case, query=case.query[torch.cat(rows)], metadata=metadata)
    return list(part.attend(part.plan(InvariantAttentionBackend())).split(lens))


def pieces_of(lengths: list[int], rng: random.Random) -> Iterator[list[Part]]:
    """Batches that compute every sequence from its beginning to its end, chunked anywhere: decodes,
    draft tokens, chunks."""
    done = [0] * len(lengths)
    while done != lengths:
        batch = []
        for i in rng.sample(range(len(lengths)), rng.randint(1, len(lengths))):
            start = done[i]
            done[i] = min(done[i] + rng.choice([1, 1, 3, 5, 40, 150]), lengths[i])
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
    """And in blocks of any size, anywhere in memory."""
    rng = random.Random(seed)
    prompts = [(n, n) for n in lengths]
    options = {"head_dim": head_dim, "seed": seed, "window": window, "scale": 3 / head_dim}
    sizes = 16, rng.choice([1, 3, 33])
    one, other = (make_case(prompts, n, dtype, *heads, **options) for n in sizes)
    whole = [attend(one, [(i, 0, n)])[0] for i, n in enumerate(lengths)]
    for batch in pieces_of(lengths, rng):
        for (i, start, stop), output in zip(batch, attend(other, batch), strict=True):
            assert torch.equal(output, whole[i][start:stop])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_rows_and_every_place_in_a_batch(dtype):
    """Chunks of 1 to 70 tokens of one sequence; and a decode at every place among 70."""
    length = KEY_TILE + 70
    case = make_case([(length, length)], 16, dtype, head_dim=64)
    (whole,) = attend(case, [(0, 0, length)])
    for n in range(1, 71):
        (output,) = attend(case, [(0, 100, 100 + n)])
        assert torch.equal(output, whole[100 : 100 + n]), n
    for place in range(0, 70, 3):
        parts = [(0, p, p + 1) for p in range(95, 164)]
        parts.insert(place, (0, 150, 151))
        assert torch.equal(attend(case, parts)[place], whole[150:151]), place
