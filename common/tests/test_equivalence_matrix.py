"""The equivalence matrix: every two settings of the engine meet in at least one run, and no greedy
token differs from those of `transformers`, in float64. `make matrix` runs the full product."""

from __future__ import annotations

import itertools
import os
import random
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.assembly.scheduler_assembly import SchedulerParts, check_windows
from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.models.layer_groups import deal_layers
from common.tests.engine_oracle import paged_runner
from common.tests.equivalence import (
    WINDOWS,
    lengths_of,
    make_config,
    make_engine,
    run_matrix,
    serve_combination,
)
from common.tests.equivalence_axes import AXES, Combination, Value, why_not
from common.tests.equivalence_rows import covering_array, num_valid, shuffled_product
from conftest import is_found
from request import Request
from step_plan import PreemptiveSchedulerOutput

ROWS = covering_array()
NUM_CHECKED = 20  # of `make check`
# These models take longer: so many rows in the normal run, else a random one in their place.
QUICK = {"shipped": 1, "gemma3": 3}
LATE = [
    row
    for name, most in QUICK.items()
    for row in [row for row in ROWS if row.as_dict()["model"] == name][most:]
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
    # Token by token, few tokens are decoded, and those within a grammar repeat nothing.
    has_drafts = settings["preempt_every"] not in (1, 2)
    has_drafts &= settings["grammars"] is None or str(settings["chunked_prefill"]) != "1"
    if settings["speculative"] in ("ngram", "draft") and has_drafts:
        assert summary.num_drafted_tokens > 0
    if settings["chunked_prefill"] in (1, 3) and settings["chunked_prefill"] is not True:
        assert summary.num_cut > 0
    # Token by token, the prompts that have an adapter in common share less than a block.
    can_hit = settings["adapters"] is None or str(settings["chunked_prefill"]) != "1"
    if settings["prefix_cache"] is not None and settings["block_size"] <= 3 and can_hit:
        assert summary.num_cached_tokens > 0
    is_drained = settings["speculative"] is not None or settings["target_step_ms"] is not None
    assert (summary.num_overlapped > 0) == (settings["overlap_scheduling"] and not is_drained)
    assert settings["emulate_graphs"] or summary.num_replays == 0
    # Guesses are no decode steps, and who is preempted in each step may have none.
    has_decodes = settings["speculative"] is None and settings["preempt_every"] != 1
    assert summary.is_compiled == (settings["compile"] and is_found("C++ compiler"))
    if settings["emulate_graphs"] and has_decodes and not settings["compile"]:
        assert summary.num_replays > 0
    # Even with whole prompts, what a preempted request brings back may be cut.
    if settings["chunked_prefill"] is False and settings["preempt_every"] is None:
        assert summary.num_cut == 0


@pytest.mark.slow
def test_as_much_of_the_full_product_as_there_is_time() -> None:
    assert run_matrix(float(os.environ.get("MATRIX_SECONDS", 600))) > 0


# -- what the runs cover


def handle_of(config: EngineConfig) -> Any:
    """Return the fields of a `RunnerHandle` that the scheduler's side reads."""
    model = SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(layer_windows=()))
    return SimpleNamespace(
        model=model,
        kv_cache=SimpleNamespace(num_blocks=config.num_blocks),
        max_model_len=2048,
        num_lookahead_tokens=None if config.speculation is None else 0,
        adapters=None,
        runner=None,
        is_queued=True,
    )


def refused_by_the_engine(settings: dict[str, Value]) -> str | None:
    """By the engine's own word: its configuration, or its scheduler when the longest prompt
    comes."""
    try:
        config = make_config(Combination.of(settings))
        if windows := WINDOWS.get(str(settings["model"])):
            check_windows(config, deal_layers(windows, 256))
        scheduler = SchedulerParts(config, handle_of(config)).scheduler
        scheduler.add_request(Request.from_tokens("0", [1] * max(lengths_of(settings)), 4))
    except ValueError as error:
        return str(error)
    return None


FREE = {"model": "random", "prefix_cache": "hash", "block_size": 33, "pool": "just"}
FREE |= {"overlap_scheduling": False, "emulate_graphs": False}
FREE |= {"adapters": None, "grammars": None, "compile": False}
TIED = {axis: values for axis, values in AXES.items() if axis not in FREE}
WITH_WINDOWS = {**FREE, "model": "olmo3"}  # FREE, but for what this refuses


PRODUCT = [dict(zip(TIED, values)) for values in itertools.product(*TIED.values())]


@pytest.fixture(scope="module", params=[3, pytest.param(1, marks=pytest.mark.slow)])
def product(request: pytest.FixtureRequest) -> list[dict[str, Value]]:
    """The settings of the axes that are not free: one in so many, in which every pair occurs."""
    return PRODUCT[:: request.param]


@pytest.fixture(scope="module")
def accepted(product: list[dict[str, Value]]) -> list[dict[str, Value]]:
    """Combinations that the engine accepts, with one setting of the free axes."""
    return [tied for tied in product if refused_by_the_engine({**tied, **FREE}) is None]


def test_what_is_left_out_is_what_the_engine_refuses(product, accepted) -> None:
    assert [tied for tied in product if why_not(tied) is None] == accepted
    with_windows = [why_not(tied | {"model": "olmo3"}) is None for tied in PRODUCT].count(True)
    others = [why_not(tied) is None for tied in PRODUCT].count(True)
    assert num_valid() == (others * 4 * 3 + with_windows * 2) * 4 * 2**6


def test_free_axes_are_never_the_reason() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        settings = {axis: rng.choice(values) for axis, values in AXES.items()}
        told = refused_by_the_engine(settings)
        assert (told is None) == (why_not(settings) is None), f"{settings}: {told}"


def test_every_pair_that_can_meet_meets(accepted: list[dict[str, Value]]) -> None:
    """From the definition: what the engine takes, and no word of the generator's."""

    def pairs(settings: dict[str, Value]) -> set[frozenset]:
        named = [(axis, repr(value)) for axis, value in settings.items()]
        return {frozenset(pair) for pair in itertools.combinations(named, 2)}

    wanted: set[frozenset] = set()
    for tied in accepted:
        wanted |= pairs(tied)
    tied_settings = {setting for pair in wanted for setting in pair}
    free_settings = {(axis, repr(value)) for axis in FREE for value in AXES[axis]}
    wanted |= {frozenset(pair) for pair in itertools.product(tied_settings, free_settings)}
    wanted |= {
        frozenset((a, b)) for a, b in itertools.combinations(free_settings, 2) if a[0] != b[0]
    }
    taken = [{**tied, **WITH_WINDOWS, "prefix_cache": None} for tied in accepted]
    taken = [settings for settings in taken if refused_by_the_engine(settings) is None]
    taken += [{**taken[0], "prefix_cache": cache} for cache in AXES["prefix_cache"]]
    taken = [settings for settings in taken if refused_by_the_engine(settings) is None]
    can_meet = {(axis, repr(value)) for settings in taken for axis, value in settings.items()}
    of_these = {s for s in tied_settings | free_settings if s[0] in (*TIED, "prefix_cache")}
    wanted -= {frozenset((("model", "'olmo3'"), other)) for other in of_these - can_meet}
    seen = set().union(*(pairs(row.as_dict()) for row in ROWS))
    assert seen == wanted  # nothing is missing, and nothing is there that cannot be
    assert len(wanted) > 700
    assert len(ROWS) <= 70


def test_the_order_of_the_full_product() -> None:
    first = list(itertools.islice(shuffled_product(1), 3000))
    assert first == list(itertools.islice(shuffled_product(1), 3000))
    assert len({row.settings + tuple(map(type, row.settings)) for row in first}) == 3000
    assert first[:10] != list(itertools.islice(shuffled_product(2), 10))
    assert covering_array.__wrapped__() == ROWS


# -- what a failure says

ONE = Combination.parse(["chunked_prefill=3", "speculative=draft", "seed=5", "policy=dfs-weight"])


def test_the_command_means_the_same_combination() -> None:
    for row in (ONE, *ROWS, *itertools.islice(shuffled_product(), 200)):
        make, target, arguments = shlex.split(row.command)
        assert (make, target) == ("make", "matrix")
        parsed = Combination.parse(arguments.removeprefix("ARGS=").split())
        assert (parsed.seed, repr(parsed.settings)) == (row.seed, repr(row.settings))


@pytest.mark.parametrize("argument", ["model=big", "modle=random", "model", "seed=x", "seed"])
def test_an_argument_that_means_nothing_is_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        Combination.parse([argument])


def wrong_token(engine: LLMEngine) -> None:
    forward, calls = paged_runner(engine).forward, itertools.count()
    # From the tenth step on: who brings rules is kept to them, but not everybody does.
    paged_runner(engine).forward = lambda b: forward(b) * (-1 if next(calls) >= 9 else 1)


def exception(engine: LLMEngine) -> None:
    paged_runner(engine).forward = lambda batch: 1 / 0


def nothing_planned(engine: LLMEngine) -> None:
    engine.scheduler.schedule = PreemptiveSchedulerOutput


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (wrong_token, "prompt"),
        (exception, "ZeroDivisionError"),
        (nothing_planned, "hangs|no progress"),
    ],
)
def test_what_goes_wrong_is_reported_with_the_command(spoil, said) -> None:
    engine = make_engine(ONE)
    spoil(engine)
    with pytest.raises(AssertionError, match=said) as failure:
        serve_combination(ONE, engine)
    assert str(failure.value).endswith(f"\n{ONE.command}")
