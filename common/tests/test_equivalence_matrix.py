"""The array of engine runs: every two settings of the engine meet in at least one, no greedy token
differs from those of `transformers` in float64, and each row's settings had an effect. `make
matrix` runs the full product."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from common.assembly.scheduler_assembly import RunnerHandle, SchedulerParts, check_windows
from common.engine_config import EngineConfig
from common.models.layer_groups import deal_layers
from common.tests.engine_oracle import checked_engine
from common.tests.equivalence import (
    lengths_of,
    make_config,
    run_matrix,
    serve_combination,
)
from common.tests.equivalence_axes import (
    AXES,
    IN_THREADS,
    WINDOWED,
    Combination,
    Value,
    covering_array,
    pairs_of,
    pairs_that_can_meet,
    why_not,
)
from common.tests.every_kind import everything_said, must_say_the_same
from common.tests.small_models import subject
from conftest import is_found
from request import Request

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = covering_array()
NUM_CHECKED = 20  # of `make check`
# These models take longer: so many rows in the normal run, else a random one in their place.
QUICK = {"shipped": 0, "gemma3": 3}


def seconds_of(row: Combination) -> int:
    """PEFT's tokens take longer than the engine's."""
    settings = row.as_dict()
    return bool(settings["adapters"]) + bool(settings["grammars"])


LATE = [
    row
    for name, most in QUICK.items()
    for row in sorted((row for row in ROWS if row.as_dict()["model"] == name), key=seconds_of)[
        most:
    ]
]
CASES = [row for row in ROWS if row not in LATE]
CASES += [Combination.of(row.as_dict() | {"model": "random"}, row.seed) for row in LATE]
CASES[:NUM_CHECKED] = [pytest.param(row, marks=pytest.mark.check) for row in CASES[:NUM_CHECKED]]
CASES += [pytest.param(row, marks=pytest.mark.slow) for row in LATE]


@pytest.mark.parametrize("combination", CASES, ids=str)
def test_every_token_is_right(combination: Combination) -> None:
    summary = serve_combination(combination)
    settings = combination.as_dict()
    # Without an effect, a setting would prove nothing.
    if settings["preempt_every"] is not None:
        assert summary.num_preemptions > 0
    is_token_by_token = str(settings["chunked_prefill"]) == "1"
    # Token by token, few tokens are decoded, and those within a grammar repeat nothing.
    has_drafts = settings["preempt_every"] not in (1, 2) and settings["grammars"] is None
    has_drafts &= not is_token_by_token
    if settings["speculative"] in ("ngram", "draft") and has_drafts:
        assert summary.num_drafted_tokens > 0
    if settings["chunked_prefill"] in (1, 3) and settings["chunked_prefill"] is not True:
        assert summary.num_cut > 0
    # Token by token, the prompts that have an adapter in common share less than a block; and from
    # stages, a prefix may come too late.
    has_stages = settings["pipeline_parallel_size"] > 1
    can_hit = not has_stages and (settings["adapters"] is None or not is_token_by_token)
    if settings["prefix_cache"] is not None and settings["block_size"] <= 3 and can_hit:
        assert summary.num_cached_tokens > 0
    assert summary.is_pipelined == has_stages
    is_drained = settings["speculative"] is not None or settings["target_step_ms"] is not None
    is_ahead = has_stages or (settings["overlap_scheduling"] and not is_drained)
    assert (summary.num_overlapped > 0) == is_ahead
    assert settings["emulate_graphs"] or summary.num_replays == 0
    # Guesses are no decode steps, and who is preempted in each step may have none.
    has_decodes = settings["speculative"] is None and settings["preempt_every"] != 1
    is_compiled = settings["compile"] and is_found("C++ compiler") and not has_stages
    assert summary.is_compiled == is_compiled
    if settings["emulate_graphs"] and has_decodes and not settings["compile"] and not has_stages:
        assert summary.num_replays > 0
    # Even with whole prompts, what a preempted request brings back may be cut, and who is aborted
    # (with an odd seed) has no token of a step that was under way.
    is_whole = settings["chunked_prefill"] is False and settings["preempt_every"] is None
    if is_whole and combination.seed % 2 == 0:
        assert summary.num_cut == 0


@pytest.mark.slow
def test_as_much_of_the_full_product_as_there_is_time() -> None:
    assert run_matrix(float(os.environ.get("MATRIX_SECONDS", 600))) > 0


GRAPHS = dict(overlap_scheduling=True, emulate_graphs=True, max_model_len=100)


@pytest.mark.parametrize(
    "settings",
    [
        dict(overlap_scheduling=True),
        dict(overlap_scheduling=True, scheduler="prefill_first", preempt_every=3),
        GRAPHS,
    ],
    ids=["ahead", "prefill-first, preempted", "graphs"],
)
def test_requests_of_every_kind_say_what_they_say_step_by_step(settings) -> None:
    """Penalties count tokens that the host has not seen, seeds draw for them, and they are sampled
    from logits that the next replay overwrites: tokens, text, reasons and log-probabilities."""
    which = subject("draft's texts")
    sizes = dict(max_num_seqs=4, shuffle_batch=True, block_size=4, num_blocks=400, seed=1)
    said = []
    for more in ({}, settings):
        engine = checked_engine(which.loaded, tokenizer=which.tokenizer, **sizes | more)
        said.append(everything_said(engine, 1))
        assert (engine.stats().discarded_tokens > 0) == bool(more)
        engine.close()
    must_say_the_same(said[1], said[0])


# -- what the runs cover


def refused_by_the_engine(settings: dict[str, Value]) -> str | None:
    """By the engine's own word: its configuration, or its scheduler when the longest prompt
    comes."""
    try:
        config = make_config(Combination.of(settings))
        if settings["model"] in WINDOWED:
            windows = subject(settings["model"]).loaded.config.layer_windows
            check_windows(config, deal_layers(windows, config.max_model_len or 256))
        if config.kv_tiers is not None:
            config = replace(config, kv_tiers=None)
        scheduler = SchedulerParts(config, handle_of(config)).scheduler
        scheduler.add_request(Request.from_tokens("0", [1] * max(lengths_of(settings)), 4))
    except ValueError as error:
        return str(error)
    return None


def handle_of(config: EngineConfig) -> RunnerHandle:
    """What the scheduler's side reads."""
    model = SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(layer_windows=()))
    sizes = SimpleNamespace(num_blocks=config.num_blocks)
    lookahead = None if config.speculation is None else 0
    return SimpleNamespace(  # type: ignore
        **dict(model=model, kv_cache=sizes, max_model_len=2048, num_lookahead_tokens=lookahead),
        **dict(adapters=None, runner=None, is_queued=True),
    )


def test_what_is_left_out_is_what_the_engine_refuses() -> None:
    rng, num_taken = random.Random(0), 0
    for _ in range(1000):
        settings = {axis: rng.choice(values) for axis, values in AXES.items()}
        for axis in rng.sample([*AXES], 12):  # else nearly all are refused
            settings[axis] = AXES[axis][0]
        settings["pool"] = "ample"  # the memory is that of the model's layers
        if why_not(settings) == IN_THREADS:
            continue
        told = refused_by_the_engine(settings)
        assert (told is None) == (why_not(settings) is None), f"{settings}: {told}"
        num_taken += told is None
    assert 100 < num_taken < 900


def test_every_pair_that_can_meet_meets() -> None:
    met = {pair for row in ROWS for pair in pairs_of(row.as_dict())}
    assert met == pairs_that_can_meet().keys() and len(met) > 1000
    assert len(ROWS) <= 90 and covering_array.__wrapped__() == ROWS
