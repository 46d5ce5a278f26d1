"""Chapter 6 in the engine: where chunks end, and who goes on beside them. Preemptions and aborts
between two chunks, and what a chunk may not do (Traps 24, 31), are the array's (`equivalence.py`).
Greedy tokens are those of `transformers`, in float64."""

from __future__ import annotations

import itertools

import pytest

from common.engine import LLMEngine
from common.tests.engine_oracle import MAX_TOKENS, checked_engine, finish, greedy_params, serve
from step_record import StepRecord

SHORT, LONG = 0, 1  # prompts of 16 and 33 tokens that share nothing


def watch(loaded, **config) -> tuple[LLMEngine, list[StepRecord]]:
    defaults = {"block_size": 4, "num_blocks": 200, "shuffle_batch": True}
    engine = checked_engine(loaded, **(defaults | config))
    records = []
    engine.on_step = records.append
    return engine, records


def add(engine: LLMEngine, oracle, *indices: int) -> None:
    for i in indices:
        engine.add_request(str(i), oracle.prompts[i], greedy_params(MAX_TOKENS))


def chunks_of(name: str, records: list[StepRecord]) -> list[int]:
    """Pieces of a request that end with no token, and the one that does."""
    found = []
    for record in records:
        if name in record.num_scheduled_tokens:
            found.append(record.num_scheduled_tokens[name])
            if record.new_token_ids[name]:
                return found
    return found


@pytest.mark.parametrize("scheduler", ["two_phase", "prefill_first"])
@pytest.mark.parametrize("size", [1, 3, 16, 33])
def test_where_chunks_end(size, scheduler, oracle, loaded):
    """The second time what they have written is read from the cache; 16 tokens are whole blocks and
    whole chunks (Traps 25, 30)."""
    engine, records = watch(loaded, scheduler=scheduler, chunked_prefill=size)
    serve(engine, oracle, [LONG, SHORT], 4)
    for name, num_tokens in (("request-0", 33), ("request-1", 16)):
        chunks = chunks_of(name, records)
        assert sum(chunks) == num_tokens
        if scheduler == "two_phase":  # each prompt has a limit of its own
            assert len(chunks) == -(-num_tokens // size) and {*chunks[:-1]} <= {size}
        else:  # all share one, and a cut is at the end of a block, if there is one
            assert len(chunks) == 1 or max(chunks) <= size
            assert size < 4 or all(n % 4 == 0 for n in chunks[:-1])
    serve(engine, oracle, [LONG, SHORT, 3, 6], 4)
    assert engine.stats().cached_tokens >= 32 + 12


@pytest.mark.parametrize(
    ("scheduler", "options", "longest_pause"),
    [("two_phase", {}, 1), ("prefill_first", {"mixing": True}, 1), ("prefill_first", {}, 9)],
)
def test_those_who_decode_go_on_beside_chunks(scheduler, options, longest_pause, oracle, loaded):
    """In every step with mixing and with the two phases. Without, at least in every ninth."""
    how = dict(scheduler=scheduler, chunked_prefill=8, prefix_cache=None)
    engine, records = watch(loaded, **how, **options)
    add(engine, oracle, SHORT)
    for _ in range(6):
        engine.step()
    add(engine, oracle, LONG, 12)
    for name, output in finish(engine).items():
        assert output.outputs[0].token_ids == oracle.expected(int(name), MAX_TOKENS)
    got = [k for k, r in enumerate(records) if r.new_token_ids.get(str(SHORT))]
    assert max(b - a for a, b in itertools.pairwise(got)) == longest_pause
    if options:  # of the chunk, those who decode have their share
        assert max(sum(r.num_scheduled_tokens.values()) for r in records[6:]) <= 8


@pytest.mark.parametrize(
    ("settings", "num_admitted"),
    [({}, 4), ({"watermark": 0.5}, 2), ({"max_long_partial_prefills": 1, "chunked_prefill": 4}, 1)],
    ids=str,
)
def test_settings_of_the_scheduler_reach_it(settings, num_admitted, loaded):
    """Four prompts fill the memory."""
    engine, records = watch(loaded, num_blocks=1 + 16, prefix_cache=None, **settings)
    for i in range(4):
        engine.add_request(str(i), [i] * 16, greedy_params(1))
    engine.step()
    assert len(records[0].num_scheduled_tokens) == num_admitted
