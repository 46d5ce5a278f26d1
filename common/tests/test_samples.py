"""`n > 1`: samples are requests of their own, and share their prompt through the prefix cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from common.requests.input_processor import seed_of_sample
from common.tests.engine_oracle import Oracle, checked_engine, greedy_params
from request import SamplingParams
from step_record import StepRecord

SCHEDULERS = ("two_phase", "prefill_first", "fcfs")


def prompt_of(oracle: Oracle, remainder: int) -> list[int]:
    """A prompt whose last block of 4 holds so many tokens; 0: it is full."""
    return next(p for p in oracle.prompts if len(p) > 20 and len(p) % 4 == remainder)


@pytest.mark.sample
@pytest.mark.parametrize("how", [*SCHEDULERS, "two_phase in chunks", "prefill_first in chunks"])
@pytest.mark.parametrize("cache", ["hash", "radix", None])
@pytest.mark.parametrize("remainder", [0, 1, 3])
def test_full_blocks_of_a_prompt_are_scheduled_once_for_all_samples(
    remainder, cache, how, random_oracle, random_loaded
) -> None:
    """But for the block of the last token, whose logits each needs (Trap 3). Without a cache each
    sample computes its own."""
    prompt, counts = prompt_of(random_oracle, remainder), Counter[int]()

    def count(record: StepRecord) -> None:
        for req_id, num_tokens in record.num_scheduled_tokens.items():
            start = record.start_positions[req_id]
            counts.update(p for p in range(start, start + num_tokens) if p < len(prompt))

    config = {"scheduler": how.split()[0], "chunked_prefill": 5 if "chunks" in how else True}
    config |= {"block_size": 4, "num_blocks": 200, "prefix_cache": cache}
    engine = checked_engine(random_loaded, **config)
    engine.on_step = count
    (output,) = engine.generate_batch([prompt], greedy_params(6, 4)).values()
    expected = random_oracle.expected(random_oracle.prompts.index(prompt), 6)
    assert [c.token_ids for c in output.outputs] == [expected] * 4
    num_shared = 0 if cache is None else (len(prompt) - 1) // 4 * 4
    num_own = len(prompt) - num_shared
    assert [counts[p] for p in range(len(prompt))] == [1] * num_shared + [4] * num_own
    assert engine.stats().cached_tokens == 3 * num_shared


@pytest.mark.parametrize("cache", ["hash", "radix", None])
def test_samples_are_what_their_seeds_give_alone(cache, random_oracle, random_loaded) -> None:
    engine = checked_engine(random_loaded, block_size=4, num_blocks=200, prefix_cache=cache)
    prompt, several = prompt_of(random_oracle, 1), SamplingParams(n=4, seed=5, max_tokens=8)
    seeds = [seed_of_sample(5, i) for i in range(4)]
    assert seeds[0] == 5 and 6 not in seeds, "the second would be the text of the next seed"
    (output,) = engine.generate_batch([prompt], several).values()
    alone = [replace(several, n=1, seed=seed) for seed in seeds]
    outputs = engine.generate_batch([prompt] * 4, alone).values()
    found = [completion.token_ids for completion in output.outputs]
    assert found == [output.outputs[0].token_ids for output in outputs]
    assert len(set(map(tuple, found))) == 4
