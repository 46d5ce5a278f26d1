"""The array of engine runs: every two settings of the engine meet in at least one, no greedy token
differs from those of `transformers` in float64, and each row's settings had an effect. `make
matrix` runs the full product."""

from __future__ import annotations

import os

import pytest

from common.tests.engine_oracle import checked_engine
from common.tests.equivalence import run_matrix, serve_combination
from common.tests.equivalence_axes import WINDOWED, Combination, covering_array
from common.tests.every_kind import everything_said, must_say_the_same
from common.tests.small_models import subject
from conftest import is_found

pytestmark = pytest.mark.usefixtures("one_thread")
CASES: list = covering_array()
CASES[:10] = [pytest.param(row, marks=pytest.mark.check) for row in CASES[:10]]  # of `make check`
CASES[20:] = [pytest.param(row, marks=pytest.mark.slow) for row in CASES[20:]]


@pytest.mark.parametrize("combination", CASES, ids=str)
def test_every_token_is_right(combination: Combination) -> None:
    found = serve_combination(combination)
    settings = combination.as_dict()
    chunk = str(settings["chunked_prefill"])
    has_stages = settings["pipeline_parallel_size"] > 1
    drafts = settings["speculative"]
    # Without an effect, a setting would prove nothing.
    assert found.num_preemptions > 0 or settings["preempt_every"] is None
    assert found.num_cut > 0 or chunk not in ("1", "3")
    assert found.num_replays == 0 or settings["emulate_graphs"]
    # Token by token and from little memory, few are decoded; texts of a grammar repeat nothing.
    may_draft = chunk != "1" and settings["preempt_every"] != 1 and settings["pool"] == "ample"
    if drafts in ("ngram", "draft") and may_draft and settings["grammars"] is None:
        assert found.num_drafted_tokens > 0
    # Prompts that have an adapter in common may share less than a block, or than a window.
    can_hit = not has_stages and settings["adapters"] is None and settings["model"] not in WINDOWED
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
    ids=str,
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
