"""Whatever the engine is told to do, greedy tokens are those of `transformers`, in float64.

Each case is one seeded random workload: which prompts, how many tokens, when they arrive, who is
aborted and when, which block size, how many run at once, how tight the token budget and the block
pool are. A failing case is one seed: `pytest -k 'workload and 17'`."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from common.engine import EngineConfig, LLMEngine
from common.tests.engine_oracle import MAX_TOKENS, Oracle, checked_engine
from request import SamplingParams

BLOCK_SIZES = (1, 4, 16, 33)
NUM_SEQS = (1, 3, 64)


def draw_config(rng: random.Random, oracle: Oracle, indices: list[int]) -> EngineConfig:
    """Budgets and pools between "the largest request barely fits" and "all fit at once"."""
    block_size = rng.choice(BLOCK_SIZES)
    longest = max(len(oracle.prompts[i]) for i in indices)
    largest = -(-(longest + MAX_TOKENS - 1) // block_size)
    return EngineConfig(
        block_size=block_size,
        num_blocks=1 + rng.choice([largest, largest + 1, 3 * largest, 64 * largest]),
        max_num_seqs=rng.choice(NUM_SEQS),
        max_num_batched_tokens=rng.choice([longest, longest + 1, 2 * longest, 4096]),
        check_invariants=True,
        shuffle_batch=rng.random() < 0.5,
        prefix_cache=rng.choice([None, "hash", "radix"]),
    )


def run_workload(seed: int, oracle: Oracle, loaded) -> None:
    rng = random.Random(seed)
    indices = [rng.randrange(len(oracle.prompts)) for _ in range(rng.randint(1, 12))]
    lengths = [rng.choice([1, 2, MAX_TOKENS, rng.randint(1, MAX_TOKENS)]) for _ in indices]
    eos = rng.sample([t for tokens in oracle.continuations for t in tokens], 2)
    loaded = replace(loaded, generation_eos_token_ids=tuple(eos))
    engine = LLMEngine(draw_config(rng, oracle, indices), loaded=loaded)
    arrivals = sorted(rng.choice([0, 0, rng.randint(0, 30)]) for _ in indices)
    aborts = {i: rng.randint(0, 40) for i in range(len(indices)) if rng.random() < 0.15}
    ignore_eos = [rng.random() < 0.5 for _ in indices]

    outputs, step = {}, 0
    while step <= max(arrivals) or engine.has_unfinished_requests():
        for i, arrival in enumerate(arrivals):
            if arrival == step:
                params = SamplingParams(
                    temperature=0, max_tokens=lengths[i], ignore_eos=ignore_eos[i]
                )
                engine.add_request(str(i), oracle.prompts[indices[i]], params)
        for i, when in aborts.items():
            if when == step and (output := engine.abort_request(str(i))) is not None:
                outputs[str(i)] = output
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
        step += 1
        assert step < 2000, f"seed {seed}: the engine does not come to an end"

    assert set(outputs) == {str(i) for i in range(len(indices))}, f"seed {seed}"
    for i, index in enumerate(indices):
        completion = outputs[str(i)].outputs[0]
        expected = oracle.expected(index, lengths[i], () if ignore_eos[i] else eos)
        if completion.finish_reason == "abort":
            assert i in aborts, f"seed {seed}"
            expected = expected[: len(completion.token_ids)]
        else:
            at_eos = not ignore_eos[i] and expected[-1] in eos
            assert completion.finish_reason == ("stop" if at_eos else "length"), f"seed {seed}"
        assert completion.token_ids == expected, f"seed {seed}, request {i}"
    stats = engine.stats()
    assert stats.kv_blocks_in_use == 0, f"seed {seed}: blocks leaked"
    if not aborts:
        num_prompt = sum(len(oracle.prompts[i]) for i in indices)
        num_output = sum(len(o.outputs[0].token_ids) for o in outputs.values())
        # The last token of each request is never fed back; what was cached is not computed.
        num_fed = num_prompt + num_output - len(indices)
        num_computed = num_fed - stats.cached_tokens + stats.recomputed_tokens
        assert stats.scheduled_tokens == num_computed, f"seed {seed}"


@pytest.mark.sample(seed=16)
@pytest.mark.parametrize("seed", range(200))
def test_random_workload_on_a_random_model(seed: int, random_oracle: Oracle, random_loaded) -> None:
    run_workload(seed, random_oracle, random_loaded)


@pytest.mark.sample(seed=3)
@pytest.mark.parametrize("seed", range(1000, 1024))
def test_random_workload_on_the_shipped_checkpoint(
    seed: int,
    shipped_oracle: Oracle,
    shipped_loaded,
) -> None:
    run_workload(seed, shipped_oracle, shipped_loaded)


@pytest.mark.sample
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("max_num_seqs", NUM_SEQS)
def test_every_block_size_and_batch_limit(
    block_size: int,
    max_num_seqs: int,
    random_oracle: Oracle,
    random_loaded,
) -> None:
    engine = checked_engine(
        random_loaded, block_size=block_size, num_blocks=600, max_num_seqs=max_num_seqs
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = engine.generate_batch(random_oracle.prompts, params)
    got = [output.outputs[0].token_ids for output in outputs.values()]
    assert got == random_oracle.continuations


@pytest.mark.parametrize("num_samples", [2, 3, 5])
def test_greedy_samples_of_one_prompt_are_all_the_greedy_continuation(
    num_samples: int,
    random_oracle: Oracle,
    random_loaded,
) -> None:
    """Requests of their own, which share the prompt's blocks through the cache."""
    for block_size in BLOCK_SIZES:
        engine = checked_engine(random_loaded, block_size=block_size, num_blocks=3000)
        params = SamplingParams(n=num_samples, temperature=0, max_tokens=12, ignore_eos=True)
        outputs = engine.generate_batch(random_oracle.prompts, params)
        for index, output in enumerate(outputs.values()):
            got = [completion.token_ids for completion in output.outputs]
            assert got == [random_oracle.expected(index, 12)] * num_samples, f"prompt {index}"
        stats = engine.stats()
        assert stats.num_preemptions == 0
        prompts = sum(len(p) for p in random_oracle.prompts) * num_samples
        outputs_computed = len(random_oracle.prompts) * num_samples * 11
        assert stats.scheduled_tokens == prompts + outputs_computed - stats.cached_tokens
