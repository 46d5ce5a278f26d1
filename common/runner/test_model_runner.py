"""The runner's copy of the requests, and the layout of a step, by hand and against a plain
model."""

from __future__ import annotations

import pytest
import torch

from common.runner.model_runner import PagedModelRunner
from paged_attention import PagedKVCache, TorchAttentionBackend
from request import SamplingParams
from scheduler_interface import BlockCopy, CachedRequestData, NewRequestData, SchedulerOutput

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def runner(random_loaded) -> PagedModelRunner:
    config = random_loaded.config
    cache = PagedKVCache(
        config.num_hidden_layers,
        12,
        16,
        config.num_key_value_heads,
        config.head_dim,
        torch.float64,
        torch.device("cpu"),
    )
    backend = TorchAttentionBackend()
    return PagedModelRunner(random_loaded.model, cache, backend, max_num_seqs=4, max_model_len=64)


def new(req_id: str, tokens: list[int], blocks: list[int], computed: int = 0) -> NewRequestData:
    return NewRequestData(req_id, tokens, GREEDY, computed, blocks)


def test_worked_example_of_mixed_lengths(runner: PagedModelRunner) -> None:
    """Issue's example, with block ids one higher, because block 0 is the null block here."""
    output = SchedulerOutput(
        scheduled_new_reqs=[
            new("a", [1, 2, 3, 4, 5], [1, 2], computed=3),
            new("b", [6, 7, 8], [3]),
        ],
        num_scheduled_tokens={"a": 2, "b": 3},
    )
    batch = runner.prepare(output)
    assert batch.input_ids.tolist() == [4, 5, 6, 7, 8]
    assert batch.positions.tolist() == [3, 4, 0, 1, 2]
    assert batch.attention.query_start_loc.tolist() == [0, 2, 5]
    assert batch.attention.seq_lens.tolist() == [5, 3]
    assert batch.attention.slot_mapping.tolist() == [16 + 3, 16 + 4, 48, 49, 50]
    assert batch.logit_indices.tolist() == [1, 4]
    assert batch.logit_req_ids == ["a", "b"]


def test_decode_slots_of_the_worked_example(runner: PagedModelRunner) -> None:
    """Lengths 7, 3 and 5: the fed token stands at `len - 1` (Trap 29)."""
    prompts = {"a": [1] * 6, "b": [2] * 2, "c": [3] * 4}
    tables = {"a": [1, 2], "b": [3], "c": [4, 5]}
    runner.prepare(
        SchedulerOutput(
            scheduled_new_reqs=[new(r, p, tables[r]) for r, p in prompts.items()],
            num_scheduled_tokens={r: len(p) for r, p in prompts.items()},
        )
    )
    cached = CachedRequestData(
        ["a", "b", "c"], [[9], [10], [11]], [6, 2, 4], [1, 1, 1], [[], [], []]
    )
    output = SchedulerOutput(
        scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 1, "b": 1, "c": 1}
    )
    batch = runner.prepare(output)
    assert batch.input_ids.tolist() == [9, 10, 11]
    assert batch.positions.tolist() == [6, 2, 4]
    assert batch.attention.slot_mapping.tolist() == [16 + 6, 48 + 2, 64 + 4]
    assert batch.attention.max_query_len == 1


def test_a_prompt_in_pieces_gives_logits_with_its_last_piece_only(runner: PagedModelRunner) -> None:
    """Trap 31: a piece in the middle must not yield a token."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
    pieces = (5, 11, 2)
    output = SchedulerOutput([new("a", prompt, [7, 2])], num_scheduled_tokens={"a": pieces[0]})
    computed = 0
    for i, piece in enumerate(pieces):
        batch = runner.prepare(output)
        logits = runner.forward(batch)
        assert batch.logit_req_ids == (["a"] if i == 2 else [])
        assert len(logits) == (1 if i == 2 else 0)
        computed += piece
        cached = CachedRequestData(["a"], [[]], [computed], [0], [[]])
        if i + 1 < len(pieces):
            output = SchedulerOutput(
                scheduled_cached_reqs=cached, num_scheduled_tokens={"a": pieces[i + 1]}
            )
    whole = SchedulerOutput([new("b", prompt, [4, 9])], num_scheduled_tokens={"b": 18})
    expected = runner.forward(runner.prepare(whole))
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


def test_a_resumed_request_is_taken_over_whole(runner: PagedModelRunner) -> None:
    """Trap 24: outputs from before the preemption are recomputed with the prompt."""
    runner.prepare(SchedulerOutput([new("a", [1, 2, 3], [1])], num_scheduled_tokens={"a": 3}))
    cached = CachedRequestData(["a"], [[5]], [3], [1], [[]])
    runner.prepare(SchedulerOutput(scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 1}))
    resumed = CachedRequestData(["a"], [[1, 2, 3, 5, 6]], [0], [2], [[4]], {"a"})
    output = SchedulerOutput(scheduled_cached_reqs=resumed, num_scheduled_tokens={"a": 5})
    batch = runner.prepare(output)
    assert batch.input_ids.tolist() == [1, 2, 3, 5, 6]
    assert batch.attention.slot_mapping.tolist() == [64, 65, 66, 67, 68]
    assert batch.sampling.output_token_ids == [[5, 6]]


def test_block_copy_moves_content_and_patches_the_table(runner: PagedModelRunner) -> None:
    prompt = [1, 2, 3, 4]
    batch = runner.prepare(SchedulerOutput([new("a", prompt, [1])], num_scheduled_tokens={"a": 4}))
    expected = runner.forward(batch)
    output = SchedulerOutput(
        [new("b", prompt, [1], computed=3)],
        num_scheduled_tokens={"b": 1},
        block_copies=[BlockCopy("b", 0, 1, 6)],
    )
    batch = runner.prepare(output)
    assert batch.attention.block_tables.tolist() == [[6]]
    runner.kv_cache.key_cache[0][1] = torch.nan  # the child no longer reads the parent's block
    torch.testing.assert_close(runner.forward(batch), expected, rtol=1e-9, atol=1e-9)


def test_garbage_in_every_other_slot_does_not_reach_the_logits(runner: PagedModelRunner) -> None:
    """Trap 35."""
    output = SchedulerOutput([new("a", [1, 2, 3], [5])], num_scheduled_tokens={"a": 3})
    clean = runner.forward(runner.prepare(output))
    for cache in (*runner.kv_cache.key_cache, *runner.kv_cache.value_cache):
        cache.fill_(torch.nan)
    output = SchedulerOutput([new("b", [1, 2, 3], [5])], num_scheduled_tokens={"b": 3})
    torch.testing.assert_close(runner.forward(runner.prepare(output)), clean, rtol=0, atol=0)
