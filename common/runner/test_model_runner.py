"""The runner's copy of the requests, and the layout of a step, by hand and against a plain
model."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from batch_layout import compose_in_order
from common.runner.batch_state import BatchState
from common.runner.model_runner import PagedModelRunner
from common.runner.trimming_runner import TrimmingRunner
from common.sampling.runner_plugin import RunnerPlugin, StepRows, UploadBuffer
from common.sampling.sampler import Sampler
from common.sampling.sampling_columns import SamplingColumns
from mixed_attention import MixedAttentionBackend
from mixed_batch import MixedMetadata, compose
from paged_attention import PagedKVCache, TorchAttentionBackend
from request import SamplingParams
from scheduler_interface import (
    CachedRequestData,
    FinishedStep,
    NewRequestData,
    SchedulerOutput,
    StepOutput,
)

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def make_runner(random_loaded, layout=compose_in_order, plugins=(), **options) -> PagedModelRunner:
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
    backend = MixedAttentionBackend() if layout is compose else TorchAttentionBackend()
    state = BatchState(4, 4, SamplingColumns(), plugins)
    return PagedModelRunner(
        random_loaded.model, cache, backend, state, Sampler(97), compose=layout, **options
    )


@pytest.fixture
def runner(random_loaded) -> PagedModelRunner:
    return make_runner(random_loaded)


def new(req_id: str, tokens: list[int], blocks: list[int], computed: int = 0) -> NewRequestData:
    return NewRequestData(req_id, tokens, GREEDY, computed, (blocks,))


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
    assert batch.attention[0].query_start_loc.tolist() == [0, 2, 5]
    assert batch.attention[0].seq_lens.tolist() == [5, 3]
    assert batch.attention[0].slot_mapping.tolist() == [16 + 3, 16 + 4, 48, 49, 50]
    assert batch.logit_indices.tolist() == [1, 4]
    assert batch.sampling.req_ids == ["a", "b"]


def test_decode_slots_of_the_worked_example(runner: PagedModelRunner) -> None:
    """Lengths 7, 3 and 5: the fed token is at `len - 1` (Trap 29)."""
    prompts = {"a": [1] * 6, "b": [2] * 2, "c": [3] * 4}
    tables = {"a": [1, 2], "b": [3], "c": [4, 5]}
    runner.prepare(
        SchedulerOutput(
            scheduled_new_reqs=[new(r, p, tables[r]) for r, p in prompts.items()],
            num_scheduled_tokens={r: len(p) for r, p in prompts.items()},
        )
    )
    cached = CachedRequestData(
        ["a", "b", "c"], [[9], [10], [11]], [6, 2, 4], [1, 1, 1], [(), (), ()]
    )
    output = SchedulerOutput(
        scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 1, "b": 1, "c": 1}
    )
    batch = runner.prepare(output)
    assert batch.input_ids.tolist() == [9, 10, 11]
    assert batch.positions.tolist() == [6, 2, 4]
    assert batch.attention[0].slot_mapping.tolist() == [16 + 6, 48 + 2, 64 + 4]
    assert batch.attention[0].max_query_len == 1


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


def test_plugins_work_between_the_forward_pass_and_sampling(random_loaded) -> None:
    """For whole steps on a device, see `common/tests/test_fake_decode.py`."""
    log: list[str] = []

    class Looks(RunnerPlugin):
        def before_sampling(self, step: StepRows, upload: UploadBuffer) -> None:
            log.append("before sampling")

    runner = make_runner(random_loaded, plugins=[Looks()])
    forward, raw_logits = runner.forward, runner.sampler.raw_logits
    runner.forward = lambda batch: (log.append("forward"), forward(batch))[1]
    runner.sampler.raw_logits = lambda logits: (log.append("sample"), raw_logits(logits))[1]
    runner.execute(SchedulerOutput([new("a", [1, 2], [1])], num_scheduled_tokens={"a": 2})).wait()
    assert log == ["forward", "before sampling", "sample"]


def test_a_resumed_request_is_taken_over_whole(runner: PagedModelRunner) -> None:
    """Trap 24: outputs from before the preemption are recomputed with the prompt."""
    runner.prepare(SchedulerOutput([new("a", [1, 2, 3], [1])], num_scheduled_tokens={"a": 3}))
    cached = CachedRequestData(["a"], [[5]], [3], [1], [()])
    runner.prepare(SchedulerOutput(scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 1}))
    resumed = CachedRequestData(["a"], [[1, 2, 3, 5, 6]], [0], [2], [([4],)], {"a"})
    output = SchedulerOutput(scheduled_cached_reqs=resumed, num_scheduled_tokens={"a": 5})
    batch = runner.prepare(output)
    assert batch.input_ids.tolist() == [1, 2, 3, 5, 6]
    assert batch.attention[0].slot_mapping.tolist() == [64, 65, 66, 67, 68]
    assert batch.sampling.num_outputs.tolist() == [2]


def mixed_plans() -> list[SchedulerOutput]:
    """A prompt in two chunks beside another that decodes, with two draft tokens in the second
    step."""
    first = SchedulerOutput(
        [new("a", [3, 1, 4, 1, 5, 9], [7]), new("b", [2, 6, 5], [2])],
        num_scheduled_tokens={"a": 4, "b": 3},
    )
    cached = CachedRequestData(["a", "b"], [[], [8]], [4, 3], [0, 1], [(), ()])
    second = SchedulerOutput(
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"a": 2, "b": 3},
        scheduled_draft_token_ids={"b": [9, 7]},
    )
    return [first, second]


def test_chapter_2s_layout_and_chapter_6s_give_the_same_logits_of_the_same_rows(
    random_loaded,
) -> None:
    plain = make_runner(random_loaded)
    mixed = make_runner(random_loaded, compose)
    for plan, rows in zip(mixed_plans(), (["b"], ["a", "b", "b", "b"]), strict=True):
        expected, batch = plain.prepare(plan), mixed.prepare(plan)
        assert not isinstance(expected.attention[0], MixedMetadata)
        assert isinstance(batch.attention[0], MixedMetadata)
        assert expected.sampling.req_ids == batch.sampling.req_ids == rows
        found = mixed.forward(batch)
        torch.testing.assert_close(found, plain.forward(expected), rtol=1e-9, atol=1e-9)
    assert batch.sampling.num_outputs.tolist() == [0, 1, 2, 3]
    assert batch.sampling.drafts == {"b": [9, 7]}
    assert batch.input_ids.tolist() == [5, 9, 8, 9, 7]


def test_a_step_answers_with_tokens_and_the_times_of_its_parts(runner: PagedModelRunner) -> None:
    plan = SchedulerOutput([new("a", [1, 2, 3], [5])], num_scheduled_tokens={"a": 3})
    output = runner.execute(plan).wait()
    logits = runner.forward(
        runner.prepare(SchedulerOutput([new("b", [1, 2, 3], [6])], num_scheduled_tokens={"b": 3}))
    )
    assert output.token_ids == {"a": [int(logits.argmax())]}
    assert output.times.keys() == {"prepare_ms", "forward_ms", "sample_ms"}
    assert all(ms > 0 for ms in output.times.values())
    empty = runner.execute(SchedulerOutput(finished_req_ids={"a"})).wait()
    assert empty.token_ids == {} and empty.times.keys() == {"prepare_ms"}
    assert "a" not in runner.state.requests, "who has ended is forgotten in an empty step too"


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
