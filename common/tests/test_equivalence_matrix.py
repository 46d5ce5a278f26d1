"""The array of engine runs: every two settings of the engine meet in at least one, no greedy token
differs from those of `transformers` in float64, and each row's settings had an effect. `make
matrix` runs the full product."""

from __future__ import annotations

import itertools
import os

import pytest

from common.tests.engine_oracle import checked_engine, greedy_params
from common.tests.equivalence import engine_of, lengths_of, run_matrix, serve_combination
from common.tests.equivalence_axes import (
    AXES,
    IN_THREADS,
    Combination,
    covering_array,
    pairs_of,
    pairs_that_can_meet,
    why_not,
)
from common.tests.every_kind import everything_said, must_say_the_same
from common.tests.small_models import subject
from conftest import is_found

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = covering_array()
NUM_CHECKED = 20  # of `make check`
# These models take longer: so many rows in the normal run, else a random one in their place; with
# adapters or grammars, `transformers` takes longer than the engine.
QUICK = {"shipped": 0, "gemma3": 1, "olmo3": 3, "windows": 4}


def is_slow(row: Combination) -> bool:
    return any(row.as_dict()[axis] for axis in ("adapters", "grammars"))


OF_MODELS = [[row for row in ROWS if row.as_dict()["model"] == name] for name in QUICK]
LATE = [sorted(rows, key=is_slow)[n:] for rows, n in zip(OF_MODELS, QUICK.values())]
SLOW = [row for rows in LATE for row in rows]
CASES = [row for row in ROWS if row not in SLOW]
CASES += [Combination.of(row.as_dict() | {"model": "random"}, row.seed) for row in SLOW]
CASES[:NUM_CHECKED] = [pytest.param(row, marks=pytest.mark.check) for row in CASES[:NUM_CHECKED]]
CASES += [pytest.param(row, marks=pytest.mark.slow) for row in SLOW]


@pytest.mark.parametrize("combination", CASES, ids=str)
def test_every_token_is_right(combination: Combination) -> None:
    found, settings = serve_combination(combination), combination.as_dict()
    chunk, has_stages = str(settings["chunked_prefill"]), settings["pipeline_parallel_size"] > 1
    drafts = settings["speculative"]
    # Without an effect, a setting would prove nothing.
    assert found.num_preemptions > 0 or settings["preempt_every"] is None
    assert found.num_cut > 0 or chunk not in ("1", "3")
    assert found.num_replays == 0 or settings["emulate_graphs"]
    # Token by token, few tokens are decoded, and prompts that have an adapter in common share less
    # than a block; texts of a grammar repeat nothing; who is preempted in each step has no decodes.
    may_draft = chunk != "1" and settings["preempt_every"] not in (1, 2)
    if drafts in ("ngram", "draft") and may_draft and settings["grammars"] is None:
        assert found.num_drafted_tokens > 0
    can_hit = not has_stages and (settings["adapters"] is None or chunk != "1")
    if settings["prefix_cache"] is not None and settings["block_size"] <= 3 and can_hit:
        assert found.num_cached_tokens > 0
    is_compiled = settings["compile"] and is_found("C++ compiler") and not has_stages
    assert (found.is_pipelined, found.is_compiled) == (has_stages, is_compiled)
    is_drained = drafts is not None or settings["target_step_ms"] is not None
    is_ahead = has_stages or (settings["overlap_scheduling"] and not is_drained)
    assert (found.num_overlapped > 0) == is_ahead
    if settings["emulate_graphs"] and not (settings["compile"] or has_stages or drafts):
        assert found.num_replays > 0 or settings["preempt_every"] == 1


@pytest.mark.slow
def test_as_much_of_the_full_product_as_there_is_time() -> None:
    assert run_matrix(float(os.environ.get("MATRIX_SECONDS", 600))) > 0


@pytest.mark.parametrize(
    "settings",
    [
        dict(scheduler="prefill_first", preempt_every=3),
        dict(emulate_graphs=True, max_model_len=100),
    ],
    ids=["prefill-first, preempted", "graphs"],
)
def test_requests_of_every_kind_say_what_they_say_step_by_step(settings) -> None:
    """Penalties count tokens that the host has not seen, seeds draw for them, and they are sampled
    from logits that the next replay overwrites: tokens, text, reasons and log-probabilities."""
    which = subject("draft's texts")
    sizes = dict(max_num_seqs=4, shuffle_batch=True, block_size=4, num_blocks=400, seed=1)
    said = []
    for more in ({}, settings | {"overlap_scheduling": True}):
        engine = checked_engine(which.loaded, tokenizer=which.tokenizer, **sizes | more)
        said.append(everything_said(engine, 1))
        assert (engine.stats().discarded_tokens > 0) == bool(more)
        engine.close()
    must_say_the_same(said[1], said[0])


# -- what the runs cover


def test_what_is_left_out_is_what_the_engine_refuses() -> None:
    """Two settings of each pair that never meets, with others that go with both."""
    can_meet, num_left_out = pairs_that_can_meet(), 0
    every = [f"{axis}={value}" for axis, values in AXES.items() for value in values]
    for pair in itertools.combinations(every, 2):
        axis, other = (each.partition("=")[0] for each in pair)
        two = Combination.parse([*pair]).as_dict()
        one, another = {axis: two[axis]}, {other: two[other]}
        if axis == other or pair in can_meet or why_not(one | another) == IN_THREADS:
            continue
        for each in AXES.keys() - {axis, other}:
            fits = [v for v in AXES[each] if why_not(one | {each: v}) is None]
            fits = [v for v in fits if why_not(another | {each: v}) is None]
            two[each] = (fits or AXES[each])[0]
        with pytest.raises(ValueError), engine_of(Combination.of(two)) as engine:
            engine.add_request("0", [1] * max(lengths_of(two)), greedy_params(4))
        num_left_out += 1
    assert num_left_out > 30


def test_every_pair_that_can_meet_meets() -> None:
    met = {pair for row in ROWS for pair in pairs_of(row.as_dict())}
    assert met == pairs_that_can_meet().keys() and len(met) > 1000 and len(ROWS) <= 90
