"""Steps of the runner; plans of every kind: `test_batch_state.py`."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from batch_layout import compose_in_order
from common.runner.batch_state import BatchState
from common.runner.kv_sizing import allocate_kv_cache
from common.runner.model_runner import PagedModelRunner
from common.runner.trimming_runner import TrimmingRunner
from common.sampling.sampler import Sampler
from common.sampling.sampling_columns import SamplingColumns
from paged_attention import TorchAttentionBackend
from request import SamplingParams
from scheduler_interface import (
    CachedRequestData,
    FinishedStep,
    NewRequestData,
    SchedulerOutput,
    StepOutput,
)

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
    chunk_sizes = (5, 11, 2)
    output = SchedulerOutput([new("a", prompt, [7, 2])], num_scheduled_tokens={"a": chunk_sizes[0]})
    computed = 0
    for i, chunk_size in enumerate(chunk_sizes):
        batch = runner.prepare(output)
        logits = runner.forward(batch)
        assert batch.sampling.req_ids == (["a"] if i == 2 else [])
        assert len(logits) == (1 if i == 2 else 0)
        computed += chunk_size
        cached = CachedRequestData(["a"], [[]], [computed], [0], [()])
        if i + 1 < len(chunk_sizes):
            output = SchedulerOutput(
                scheduled_cached_reqs=cached, num_scheduled_tokens={"a": chunk_sizes[i + 1]}
            )
    whole = SchedulerOutput([new("b", prompt, [4, 9])], num_scheduled_tokens={"b": 18})
    expected = runner.forward(runner.prepare(whole))
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


def test_tokens_after_a_stop_string_are_cut_with_their_logprobs() -> None:
    class Runs:
        def execute(self, plan: SchedulerOutput) -> FinishedStep:
            tokens = {"a": [1, 2, 3], "b": [4, 5], "c": [6]}
            return FinishedStep(StepOutput(tokens, {"a": ["x", "y", "z"]}))

    lookups = []

    class Member(NamedTuple):
        name: str

        def num_wanted(self, tokens: list[int]) -> int:
            lookups.append((self.name, list(tokens)))
            return 2

    processors = {name: Member(name) for name in "abc"}
    plan = SchedulerOutput(scheduled_draft_token_ids={"a": [2, 3], "b": [5]})
    step = TrimmingRunner(Runs(), processors).execute(plan)
    processors["b"] = Member("the next request of this name")  # trap 82
    output = step.wait()
    assert output.token_ids == {"a": [1, 2], "b": [4, 5], "c": [6]}
    assert output.logprobs == {"a": ["x", "y"]}
    assert lookups == [("a", [1, 2, 3]), ("b", [4, 5])], "a single token is wanted in any case"
