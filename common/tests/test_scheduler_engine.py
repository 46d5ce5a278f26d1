"""Chapter 4 in the engine: what a preemption must not change, and what its memory is for. Random
runs in pools that run out are rows of `claims.py`."""

from __future__ import annotations

import pytest

from common.engine import EngineConfig, LLMEngine
from common.requests.output_processor import RequestOutput
from common.tests.engine_oracle import MAX_TOKENS, checked_engine, serve
from common.tests.every_kind import must_say_the_same
from request import SamplingParams

SCHEDULERS = ("two_phase", "prefill_first")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_seeded_sampling_does_not_see_a_preemption(scheduler, loaded, oracle):
    """Seeds, penalties that count the outputs, and log-probabilities survive recomputation."""
    params = [
        SamplingParams(seed=i, temperature=1.0, presence_penalty=0.5, max_tokens=12, logprobs=2)
        for i in range(4)
    ]

    def run(**more) -> dict[str, RequestOutput]:
        engine = checked_engine(loaded, num_blocks=300, scheduler=scheduler, **more)
        outputs = engine.generate_batch(oracle.prompts[:4], params)
        num_preemptions = sum(output.metrics.num_preemptions for output in outputs.values())
        assert num_preemptions == engine.stats().num_preemptions
        assert (num_preemptions > 0) == ("preempt_every" in more)
        return outputs

    calm = run()
    for disturbed in (run(preempt_every=2), run(preempt_every=3, prefix_cache=None)):
        must_say_the_same(disturbed, calm)


def test_memory_is_filled_where_the_first_scheduler_reserves_it(loaded, oracle):
    def peak(scheduler: str) -> int:
        config = EngineConfig(block_size=4, num_blocks=61, scheduler=scheduler, prefix_cache=None)
        engine = LLMEngine(config, loaded=loaded)
        running = []
        engine.on_step = lambda record: running.append(record.num_running)
        serve(engine, oracle, [0, 1] * 8, MAX_TOKENS)
        return max(running)

    assert peak("two_phase") > peak("fcfs")
