"""`batch_invariant=True`: every token and every bit of its log-probabilities is that of the request
alone, in float32 and bfloat16, whatever the settings: those of the equivalence matrix's rows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.llm import SamplingParams
from common.models.linear import Linear, linear_layers, reason_not_packed
from common.models.loader import load_model
from common.tests import batch_invariant_case as case
from common.tests.batch_invariant_case import alone, config_of, make_engine, serve
from common.tests.equivalence_axes import Combination
from common.tests.equivalence_rows import covering_array
from tiered_cache import KVTierConfig

CPU = torch.device("cpu")
DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(reason is not None, reason=str(reason)))
    for dtype in (torch.float32, torch.bfloat16)
    for reason in [reason_not_packed(dtype, CPU)]
]
ROWS = covering_array()
# One token of a prompt in a step takes long.
SAMPLE = [row for row in ROWS if str(row.as_dict()["chunked_prefill"]) != "1"][::15]
PLAIN = Combination.parse(["chunked_prefill=True", "block_size=16", "prefix_cache=hash"])


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


@pytest.fixture
def with_amx(monkeypatch) -> None:
    """A processor whose products depend on the number of rows in a call, whichever it is (Trap 88).
    Emulated: float32, one bit more or less."""

    def depends_on_rows(product):
        return lambda *rows: product(*rows) * (1 + 2**-20 * (len(rows[-1]).bit_count() % 2))

    for name in ("_packed_product", "_packed_sum"):
        monkeypatch.setattr(Linear, name, depends_on_rows(getattr(Linear, name)))
    for name in ("models", "alone"):  # those of this processor stay as they are
        monkeypatch.setattr(case, name, cache(getattr(case, name).__wrapped__))


@pytest.mark.usefixtures("with_amx")
def test_where_bits_depend_on_the_rows_of_a_call_every_call_has_one_tile():
    combination = Combination.parse(["chunked_prefill=16", "block_size=16", "speculative=draft"])
    only = (1, 4, 5)
    found = serve(torch.float32, config_of(combination, True), 5, only)
    assert found == [case.alone(torch.float32, True)[i] for i in only]
    model = case.models(torch.float32, True).loaded.model
    assert all(matrix.one_tile_a_call for matrix in linear_layers(model))
    # Without it other bits are found, or this would prove nothing.
    found = serve(torch.float32, config_of(combination, False), 5, only)
    assert found != [case.alone(torch.float32, False)[i] for i in only]


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_matter(dtype):
    config = replace(config_of(PLAIN, True), num_threads=2)
    before = torch.get_num_threads()
    try:
        found = serve(dtype, config, 3, only=(3, 7))
        assert found == [alone(dtype, True)[i] for i in (3, 7)]
    finally:
        torch.set_num_threads(before)


# -- what it is made of, and where it is refused


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"pack_weights": False}, "pack_weights must .*batch_invariant.*, got False"),
        ({"compile": True}, "compile must .*batch_invariant.*, got True"),
        (
            {"attention_backend": "triton"},
            "attention_backend must .*batch_invariant.*, got 'triton'",
        ),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size must .*batch_invariant.*, got 2"),
        ({"batch_invariant": 1}, "batch_invariant must .*False, True, got 1"),
    ],
)
def test_settings_that_contradict_it_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        EngineConfig(**{"batch_invariant": True, **options})
    EngineConfig(**{**options, "batch_invariant": False})


@pytest.mark.parametrize("reason", ["the dtype is torch.float64", "the device is cuda"])
def test_where_nothing_is_packed_it_is_refused(reason, monkeypatch):
    dtype = torch.float64 if "float64" in reason else torch.float32
    loaded = load_model(SHIPPED_CHECKPOINT, dtype, CPU)
    if dtype == torch.float32:
        monkeypatch.setattr("common.assembly.assembly.reason_not_packed", lambda *where: reason)
    with pytest.raises(ValueError, match=f"batch_invariant must .*{reason}"):
        LLMEngine(EngineConfig(num_blocks=20, batch_invariant=True), loaded=loaded)


def test_shared_keys_and_values_are_kept_apart_from_those_with_other_bits(tmp_path):
    """Engines over one disk, with it and without: neither loads what the other computed."""
    prompt, cached = list(range(2, 100)), []
    for batch_invariant in (False, True, True):
        tiers = KVTierConfig(0, 500, tmp_path / "kv", write_policy="write_through")
        config = EngineConfig(num_blocks=20, batch_invariant=batch_invariant, kv_tiers=tiers)
        engine = make_engine(torch.float32, config)
        params = SamplingParams(temperature=0, max_tokens=2)
        (output,) = engine.generate_batch([prompt], params).values()
        cached.append(output.num_cached_tokens)
        engine.close()
    assert cached == [0, 0, 96]
