"""`n > 1`: samples are requests of their own, and share their prompt through the prefix cache."""

from __future__ import annotations

from collections import Counter

import pytest

from common.engine import EngineConfig, LLMEngine
from common.tests.engine_oracle import Oracle, greedy_params
from request import SamplingParams
from step_record import StepRecord

SCHEDULERS = ("two_phase", "prefill_first", "fcfs")


def count_positions(
    oracle: Oracle, loaded, prompt: list[int], n: int, **config
) -> tuple[LLMEngine, Counter[int]]:
    """How often each position of the prompt is scheduled, over all samples."""
    counts: Counter[int] = Counter()

    def count(record: StepRecord) -> None:
        for req_id, num_tokens in record.num_scheduled_tokens.items():
            start = record.start_positions[req_id]
            counts.update(p for p in range(start, start + num_tokens) if p < len(prompt))

    settings = EngineConfig(block_size=4, num_blocks=200, check_invariants=True, **config)
    engine = LLMEngine(settings, loaded=loaded, on_step=count)
    (output,) = engine.generate_batch([prompt], greedy_params(6, n)).values()
    expected = oracle.expected(oracle.prompts.index(prompt), 6)
    assert [c.token_ids for c in output.outputs] == [expected] * n
    assert engine.kv_manager.num_blocks_in_use == 0
    return engine, counts


def prompt_of(oracle: Oracle, remainder: int) -> list[int]:
    """A prompt whose last block of 4 holds so many tokens; 0: it is full."""
    return next(p for p in oracle.prompts if len(p) > 20 and len(p) % 4 == remainder)


@pytest.mark.sample
@pytest.mark.parametrize("remainder", [1, 3])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_full_blocks_of_a_prompt_are_scheduled_once_for_all_samples(
    cache, scheduler, remainder, random_oracle, random_loaded
) -> None:
    prompt = prompt_of(random_oracle, remainder)
    engine, counts = count_positions(
        random_oracle, random_loaded, prompt, 4, prefix_cache=cache, scheduler=scheduler
    )
    full = len(prompt) - remainder
    assert [counts[p] for p in range(len(prompt))] == [1] * full + [4] * remainder
    assert engine.stats().cached_tokens == 3 * full


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_a_prompt_that_ends_with_its_block_leaves_that_block_to_each_sample(
    cache, scheduler, random_oracle, random_loaded
) -> None:
    """Each needs the logits of the last token (Trap 3), and what is found is whole blocks."""
    prompt = prompt_of(random_oracle, 0)
    _, counts = count_positions(
        random_oracle, random_loaded, prompt, 4, prefix_cache=cache, scheduler=scheduler
    )
    assert [counts[p] for p in range(len(prompt))] == [1] * (len(prompt) - 4) + [4] * 4


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_without_a_cache_each_sample_computes_its_own(
    scheduler, random_oracle, random_loaded
) -> None:
    prompt = prompt_of(random_oracle, 1)
    _, counts = count_positions(
        random_oracle, random_loaded, prompt, 4, prefix_cache=None, scheduler=scheduler
    )
    assert [counts[p] for p in range(len(prompt))] == [4] * len(prompt)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_samples_are_what_their_seeds_give_alone_with_and_without_a_cache(
    scheduler, random_oracle, random_loaded
) -> None:
    prompt = prompt_of(random_oracle, 1)

    def run(cache, params) -> list[list[int]]:
        config = EngineConfig(block_size=4, num_blocks=200, prefix_cache=cache, scheduler=scheduler)
        engine = LLMEngine(config, loaded=random_loaded)
        (output,) = engine.generate_batch([prompt], params).values()
        return [completion.token_ids for completion in output.outputs]

    several = SamplingParams(n=4, seed=5, max_tokens=8, ignore_eos=True)
    alone = [
        run("hash", SamplingParams(seed=5 + i, max_tokens=8, ignore_eos=True))[0] for i in range(4)
    ]
    assert run("hash", several) == run("radix", several) == run(None, several) == alone
    assert len(set(map(tuple, alone))) == 4
