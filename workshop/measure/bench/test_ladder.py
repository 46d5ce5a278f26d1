"""The ladder's workload, its arithmetic, and every rung once: same users, same tokens."""

from __future__ import annotations

import pytest
import torch

from common.engine_config import SHIPPED_CHECKPOINT
from common.requests.tokenizer import load_tokenizer
from workshop.measure.bench import ladder_bench as ladder
from workshop.measure.bench.bench_models import load_models
from workshop.measure.bench.bench_record import read_record
from workshop.measure.bench.bench_systems import CHUNK, serve_timed
from workshop.measure.bench.bench_work import BenchRequest, Limits, Served
from workshop.measure.bench.ladder_bench import RUNGS, describe
from workshop.measure.bench.ladder_workload import (
    LONG_PROMPT_LEN,
    OUTPUT_LENS,
    QUESTIONS,
    REGIMES,
    make_workload,
    min_prompt_tokens,
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SHIPPED_CHECKPOINT)


@pytest.mark.parametrize("regime", [*REGIMES.values(), *QUESTIONS.values()], ids=lambda r: r.title)
def test_the_workload_is_what_its_text_says(regime, tokenizer):
    requests = make_workload(tokenizer, regime, seed=3)
    assert make_workload(tokenizer, regime, seed=3) == requests
    assert requests != make_workload(tokenizer, regime, seed=4)
    assert len(requests) == regime.num_requests
    lengths = [len(request.prompt_token_ids) - regime.system_len for request in requests]
    assert lengths.count(LONG_PROMPT_LEN) == regime.num_long
    assert len({tuple(r.prompt_token_ids[: regime.system_len]) for r in requests}) == 1
    assert all(OUTPUT_LENS[0] <= r.num_outputs <= OUTPUT_LENS[1] for r in requests)
    times = [request.arrival_time for request in requests]
    assert times == sorted(times) and times[0] > 0


def test_the_least_is_each_prefix_once(tokenizer):
    assert min_prompt_tokens([[1, 2, 3], [1, 2, 3, 4], [1, 3], [1, 2]]) == 3 + 1 + 1 + 1
    for name in ("prefix-cache", "preempting"):
        recorded = read_record(ladder.RECORD)["questions"][name]
        prompts = [r.prompt_token_ids for r in make_workload(tokenizer, QUESTIONS[name], seed=0)]
        assert [len(prompt) for prompt in prompts] == recorded["prompt_tokens"][0]
        assert min_prompt_tokens(prompts) == recorded["min_prompt_tokens"][0]


def test_the_numbers_of_a_run():
    requests = [BenchRequest([1] * 5, 3, 9, 0.5), BenchRequest([2] * 5, 2, 9, 1.0)]
    times = [[1.5, 2.0, 2.0], [2.0, 3.0]]  # two at once: a draft token was right
    numbers = describe(Served([[7, 8, 9], [7, 7]], times, {"num_steps": 4}), requests)
    assert numbers["output_tokens_per_s"] == 5 / 2.5  # from the first arrival on
    assert numbers["ttft_ms_p50"] == 1000
    assert numbers["inter_token_ms_p50"] == 500  # of 500, 0 and 1,000
    assert numbers["inter_token_ms_p99"] == pytest.approx(990)
    assert numbers["num_steps"] == 4


def test_every_rung_serves_the_same_users_the_same_tokens():
    models = load_models("tiny", torch.float64)
    prompts = [[5, 6, 7] * 8, [5, 6, 7] * 8 + [9], [11] * 150]
    requests = [BenchRequest(p, 6, 256, 0.02 * i) for i, p in enumerate(prompts)]
    limits = Limits(longest=420, num_positions=840, max_num_batched_tokens=256)
    assert limits.num_contiguous == 2
    outcomes = {
        name: serve_timed(system, models, limits, ladder.WARM_UP, requests)
        for name, (_, system) in RUNGS.items()
    }
    for name, outcome in outcomes.items():
        assert outcome.token_ids == outcomes["one-at-a-time"].token_ids, name
        for times, request in zip(outcome.token_times, requests):
            assert times == sorted(times) and times[0] > request.arrival_time and len(times) == 6
        assert 0 <= describe(outcome, requests)["kv_waste"] < 1
    assert outcomes["one-at-a-time"].details["num_steps"] < 60  # an answer ends where it is read to
    assert outcomes["chunked"].details["most_tokens_of_one"] == CHUNK
    assert outcomes["speculative"].details["most_tokens_of_one"] == 150
