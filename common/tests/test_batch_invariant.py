"""`batch_invariant=True`: every token and every bit of its log-probabilities is that of the request
alone, in float32 and bfloat16, whatever the settings: those of the array's rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, SHIPPED_DRAFT, EngineConfig
from common.models.linear import OneDnnProduct, linear_layers, reason_not_packed
from common.models.loader import LoadedModel, load_model
from common.requests.output_processor import RequestOutput
from common.tests.engine_oracle import paged_runner
from common.tests.equivalence import make_config
from common.tests.equivalence_axes import Combination, covering_array
from common.tests.small_models import CPU
from invariant_attention import InvariantAttentionBackend
from request import SamplingParams
from tiered_cache import KVTierConfig

DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(reason is not None, reason=str(reason)))
    for dtype in (torch.float32, torch.bfloat16)
    for reason in [reason_not_packed(dtype, CPU)]
]
# One process. In the normal run nothing is computed token by token or again, which takes long.
ROWS = [row for row in covering_array() if row.as_dict()["pipeline_parallel_size"] == 1]
SAMPLE = [row for row in ROWS if not {"chunked_prefill=1", "preempt_every=1"} & {*row.arguments}]
SAMPLE = SAMPLE[::3]
# The longest ones fill a span of keys, and leave it with their outputs.
PROMPT_LENGTHS = (1, 5, 16, 33, 70, 112, 127, 128)
NUM_OUTPUTS = 10
Seen = list[tuple[int, float, dict[int, float]]]  # token, its log-probability, the likeliest ones


@cache
def models(dtype: torch.dtype, batch_invariant: bool) -> list[LoadedModel]:
    """And a draft model. One that was made batch-invariant stays it: those without are others."""
    return [load_model(path, dtype, CPU) for path in (SHIPPED_CHECKPOINT, SHIPPED_DRAFT)]


@cache
def prompts() -> list[list[int]]:
    rng = random.Random(11)
    phrase = [rng.randrange(2, 4000) for _ in range(6)]
    trunk: list[int] = []
    while len(trunk) < max(PROMPT_LENGTHS):  # half of it returns: a look-up finds something
        trunk += [*phrase, *(rng.randrange(2, 4000) for _ in range(6))]
    tails = [[rng.randrange(2, 4000) for _ in range(n // 3)] for n in PROMPT_LENGTHS]
    return [trunk[: n - len(tail)] + tail for n, tail in zip(PROMPT_LENGTHS, tails, strict=True)]


def params_of(index: int) -> SamplingParams:
    """Every second request is greedy, the others have a seed and each its own constraints."""
    options: dict = {"temperature": 0} if index % 2 == 0 else {"temperature": 0.9, "seed": index}
    options |= {"top_k": (0, 20, 50)[index % 3], "top_p": (1.0, 0.9)[index // 2 % 2]}
    options |= {"repetition_penalty": 1.2} if index % 4 == 3 else {}
    return SamplingParams(**options, max_tokens=NUM_OUTPUTS, logprobs=3, ignore_eos=True)


def seen(output: RequestOutput) -> Seen:
    (completion,) = output.outputs
    entries = [(e.token_id, e.logprob, e.top) for e in completion.logprobs or ()]
    assert [token for token, _, _ in entries] == completion.token_ids
    return entries


def make_engine(dtype: torch.dtype, config: EngineConfig) -> LLMEngine:
    loaded, draft = models(dtype, config.batch_invariant)
    return LLMEngine(config, loaded=loaded, draft=draft)


@cache
def alone(dtype: torch.dtype, batch_invariant: bool) -> list[Seen]:
    """Nobody else, no cache, whole prompts."""
    how = dict(num_blocks=30, prefix_cache=None, chunked_prefill=False, max_num_seqs=1)
    engine = make_engine(dtype, EngineConfig(**how, batch_invariant=batch_invariant))
    assert isinstance(paged_runner(engine).backend, InvariantAttentionBackend) == batch_invariant
    every = enumerate(prompts())
    return [seen(*engine.generate_batch([prompt], params_of(i)).values()) for i, prompt in every]


def config_of(combination: Combination, batch_invariant: bool) -> EngineConfig:
    """The combination's, with memory for these prompts and steps that the longest one fits. What
    is not to be had with it is left out."""
    settings = combination.as_dict() | {"model": "random", "kv_tiers": None, "adapters": None}
    settings |= {"compile": False, "emulate_graphs": False, "grammars": None}
    config = make_config(Combination.of(settings, combination.seed))
    longest = max(PROMPT_LENGTHS) + NUM_OUTPUTS
    size = config.block_size
    num_positions = 1500 if settings["pool"] == "ample" else longest + size
    num_blocks = 1 + -(-num_positions // size)
    return replace(config, num_blocks=num_blocks, batch_invariant=batch_invariant)


def serve(
    dtype: torch.dtype,
    config: EngineConfig,
    seed: int,
    only: Sequence[int] = range(len(PROMPT_LENGTHS)),
) -> list[Seen]:
    """The prompts, arriving over some steps in an order of `seed`."""
    rng = random.Random(seed)
    engine = make_engine(dtype, config)
    arrivals = [(rng.randrange(6), i) for i in rng.sample(only, len(only))]
    finished: dict[int, Seen] = {}
    for step in range(20_000):
        for when, i in arrivals:
            if when == step:
                engine.add_request(str(i), prompts()[i], params_of(i), priority=rng.randint(0, 2))
        finished |= {int(o.request_id): seen(o) for o in engine.step() if o.finished}
        if len(finished) == len(only):
            return [found for _, found in sorted(finished.items())]
    raise AssertionError("the engine hangs")


@pytest.mark.parametrize(
    "combination",
    [row if row in SAMPLE else pytest.param(row, marks=pytest.mark.slow) for row in ROWS],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_is_that_of_the_request_alone(dtype, combination):
    found = serve(dtype, config_of(combination, True), combination.seed)
    for i, (wanted, own) in enumerate(zip(alone(dtype, True), found, strict=True)):
        assert own == wanted, f"request {i} of {combination.command}"


def test_where_bits_depend_on_the_rows_of_a_call_every_call_has_one_tile(monkeypatch):
    """A processor whose products depend on the number of rows in a call, whichever it is (Trap 88).
    Emulated: float32, one bit more or less."""

    def depends_on_rows(product):
        return lambda *rows: product(*rows) * (1 + 2**-20 * (len(rows[-1]).bit_count() % 2))

    for name in ("__call__", "add_to"):
        product = getattr(OneDnnProduct, name)
        monkeypatch.setattr(OneDnnProduct, name, depends_on_rows(product))
    for function in (models, alone):  # those of this processor stay as they are
        monkeypatch.setitem(globals(), function.__name__, cache(function.__wrapped__))
    combination = Combination.parse(["chunked_prefill=16", "block_size=16", "speculative=draft"])
    only = (1, 4)
    for is_invariant in (True, False):  # without it other bits are found
        found = serve(torch.float32, config_of(combination, is_invariant), 5, only)
        wanted = [alone(torch.float32, is_invariant)[i] for i in only]
        assert (found == wanted) == is_invariant
    model = models(torch.float32, True)[0].model
    assert all(matrix.product.one_tile_a_call for matrix in linear_layers(model))


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_matter(dtype):
    combination = Combination.parse(["chunked_prefill=True", "block_size=16", "prefix_cache=hash"])
    config = replace(config_of(combination, True), num_threads=2)
    before = torch.get_num_threads()
    try:
        found = serve(dtype, config, 3, only=(3, 7))
        assert found == [alone(dtype, True)[i] for i in (3, 7)]
    finally:
        torch.set_num_threads(before)


# -- where it is refused


REFUSED = [
    ({"pack_weights": False}, "pack_weights must .*batch_invariant.*, got False"),
    ({"compile": True}, "compile must .*batch_invariant.*, got True"),
    ({"attention_backend": "triton"}, "attention_backend must .*batch_invar.*, got 'triton'"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size must .*batch_invariant.*, got 2"),
    ({"batch_invariant": 1}, "batch_invariant must .*boolean, got 1"),
]


def test_where_it_can_not_be_had_it_is_refused():
    for options, sentence in REFUSED:
        with pytest.raises(ValueError, match=sentence):
            EngineConfig(**{"batch_invariant": True, **options})
        EngineConfig(**{**options, "batch_invariant": False})
    loaded = load_model(SHIPPED_DRAFT, torch.float64, CPU)
    before = torch.get_num_threads()
    config = EngineConfig(num_blocks=20, batch_invariant=True, num_threads=before + 1)
    with pytest.raises(ValueError, match=r"batch_invariant must .*the dtype is torch\.float64"):
        LLMEngine(config, loaded=loaded)
    assert torch.get_num_threads() == before


def test_shared_keys_and_values_are_kept_apart_from_those_with_other_bits(tmp_path):
    """Engines over one disk, with it and without: neither loads what the other computed."""
    prompt = list(range(2, 100))
    cached = []
    for batch_invariant in (False, True, True):
        tiers = KVTierConfig(0, 500, tmp_path / "kv")
        config = EngineConfig(num_blocks=20, batch_invariant=batch_invariant, kv_tiers=tiers)
        engine = make_engine(torch.float32, config)
        params = SamplingParams(temperature=0, max_tokens=2)
        (output,) = engine.generate_batch([prompt], params).values()
        cached.append(output.num_cached_tokens)
        engine.reset_prefix_cache()  # everything is evicted
        engine.close()
    assert cached == [0, 0, 96]
