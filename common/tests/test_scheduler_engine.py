"""Chapter 4 in the engine: preempted, reordered, displaced, aborted: greedy tokens are those of
`transformers`, in float64."""

from __future__ import annotations

import random

import pytest

from common.engine import EngineConfig, LLMEngine
from common.tests.engine_oracle import MAX_TOKENS, checked_engine, scarce, serve, serve_a_crowd
from request import SamplingParams

SCHEDULERS = ("two_phase", "prefill_first")
CACHES = (None, "hash", "radix")


@pytest.mark.sample(seed=6)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("seed", range(16))
def test_random_runs_in_pools_that_run_out(seed, cache, scheduler, oracle, loaded):
    rng = random.Random(f"{seed} {cache} {scheduler}")
    block_size = rng.choice([1, 4, 16, 33])
    settings = scarce(rng, oracle, block_size)
    settings |= dict(scheduler=scheduler, prefix_cache=cache, seed=seed)
    engine = checked_engine(loaded, **settings)
    serve_a_crowd(engine, oracle, rng, seed)


@pytest.mark.sample
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("preempt_every", [1, 2, 3, 4, 5])
def test_forced_preemption_changes_no_token(preempt_every, cache, scheduler, oracle, loaded):
    engine = checked_engine(
        loaded,
        num_blocks=200,
        max_num_seqs=4,
        scheduler=scheduler,
        prefix_cache=cache,
        preempt_every=preempt_every,
    )
    outputs = serve(engine, oracle, [0, 3, 5, 6, 7], MAX_TOKENS)
    assert engine.stats().num_preemptions > 0
    assert sum(o.metrics.num_preemptions for o in outputs) == engine.stats().num_preemptions


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_seeded_sampling_does_not_see_a_preemption(scheduler, loaded, oracle):
    """Seeds, penalties that count the outputs, and log-probabilities survive recomputation."""
    params = [
        SamplingParams(seed=i, temperature=1.0, presence_penalty=0.5, max_tokens=12, logprobs=2)
        for i in range(4)
    ]
    prompts = oracle.prompts[:4]

    def run(**more) -> list:
        config = EngineConfig(num_blocks=300, scheduler=scheduler, **more)
        engine = LLMEngine(config, loaded=loaded)
        outputs = list(engine.generate_batch(prompts, params).values())
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    calm = run()
    for disturbed in (run(preempt_every=2), run(preempt_every=3, prefix_cache=None)):
        for (tokens, logprobs), (other_tokens, other_logprobs) in zip(calm, disturbed, strict=True):
            assert tokens == other_tokens
            for a, b in zip(logprobs, other_logprobs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-9)


def test_memory_is_filled_where_the_first_scheduler_reserves_it(loaded, oracle):
    def peak(scheduler: str) -> int:
        config = EngineConfig(block_size=4, num_blocks=61, scheduler=scheduler, prefix_cache=None)
        engine = LLMEngine(config, loaded=loaded)
        running = []
        engine.on_step = lambda record: running.append(record.num_running)
        serve(engine, oracle, [0, 1] * 8, MAX_TOKENS)
        return max(running)

    assert peak("two_phase") > peak("fcfs")


def test_what_the_configuration_refuses():
    for options in (
        {"policy": "fastest"},
        {"scheduler": "fcfs", "policy": "lpm"},
        {"scheduler": "fcfs", "preempt_every": 2},
        {"preempt_every": 0},
        {"watermark": 1.0},
        {"watermark": True},
    ):
        *_, name = options
        with pytest.raises(ValueError, match=name):
            EngineConfig(**options)
