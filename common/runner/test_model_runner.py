"""Steps of the runner; plans of every kind: `test_batch_state.py`."""

from __future__ import annotations

import pytest
import torch

from batch_layout import compose_in_order
from common.runner.batch_state import BatchState
from common.runner.kv_sizing import allocate_kv_cache
from common.runner.model_runner import PagedModelRunner
from common.sampling.sampler import Sampler
from common.sampling.sampling_columns import SamplingColumns
from paged_attention import TorchAttentionBackend
from request import SamplingParams
from scheduler_interface import CachedRequestData, NewRequestData, SchedulerOutput

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def runner(random_loaded) -> PagedModelRunner:
    state = BatchState(4, 4, SamplingColumns(), [])
    cache = allocate_kv_cache(random_loaded, 12, 16)
    parts = random_loaded.model, cache, TorchAttentionBackend(), state, Sampler(97)
    return PagedModelRunner(*parts, compose=compose_in_order)


def new(req_id: str, tokens: list[int], blocks: list[int], computed: int = 0) -> NewRequestData:
    return NewRequestData(req_id, tokens, GREEDY, computed, (blocks,))


def test_a_prompt_in_pieces_gives_logits_with_its_last_piece_only(runner: PagedModelRunner) -> None:
    """Trap 31: a chunk in the middle must not yield a token."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
    output = SchedulerOutput([new("a", prompt, [7, 2])], num_scheduled_tokens={"a": 5})
    for start, num_tokens in ((0, 5), (5, 11), (16, 2)):
        if start:
            cached = CachedRequestData(["a"], [[]], [start], [0], [()])
            output = SchedulerOutput([], cached, num_scheduled_tokens={"a": num_tokens})
        batch = runner.prepare(output)
        logits = runner.forward(batch)
        assert batch.sampling.req_ids == ["a"] * len(logits) == ["a"] * (start == 16)
    whole = SchedulerOutput([new("b", prompt, [4, 9])], num_scheduled_tokens={"b": 18})
    expected = runner.forward(runner.prepare(whole))
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
