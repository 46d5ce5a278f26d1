"""Norms, rotary embedding and SiLU in machine code against the plain form."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from common.assembly.assembly import set_regions
from common.models.loader import LoadedModel
from common.models.regions import compiled_regions
from common.models.regions.compiled_regions import CompiledRegions, compile_regions
from common.models.regions.regions import Regions
from common.models.rotary import RopeParameters, rotary_table
from compiled_attention import HeadMajorKVCache, write_kv_anywhere
from paged_attention import PagedKVCache

# Tolerance relative to the largest value. bfloat16: the plain functions round in between, several
# times.
TOLERANCE = {
    torch.float64: 5e-7,
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
EPS = 1e-6


HEADS, KV_HEADS = 4, 2


class Writer(SimpleNamespace):
    """The part of a plan that these tests need."""

    def write_kv(self, *tensors: torch.Tensor) -> None:
        write_kv_anywhere(*tensors, self.slot_mapping)


@pytest.fixture(
    params=[
        (torch.float64, torch.float64, 16),
        (torch.float32, torch.float32, 128),
        (torch.bfloat16, torch.bfloat16, 16),
        (torch.bfloat16, torch.float32, 80),
        (torch.float16, torch.float32, 6),
        (torch.float32, torch.float32, 2),
    ],
    ids=str,
)
def kind(request: pytest.FixtureRequest) -> tuple[torch.dtype, torch.dtype, int]:
    return request.param


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert found.is_contiguous()
    error = (found.double() - expected.double()).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[found.dtype], float(error)


@pytest.mark.needs("C++ compiler")
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 400])
def test_norms_and_the_gate(kind, num_tokens: int) -> None:
    """Sizes that vectors divide and do not divide, with one thread and more."""
    (dtype, norm_dtype, _), plain = kind, Regions()
    compiled = CompiledRegions(*kind)
    for size in (48, 61, 1):
        x, weight = draw(num_tokens, size, dtype=dtype), draw(size, dtype=norm_dtype, seed=1)
        before = x.clone()
        check(compiled.rms_norm(x, weight, EPS), plain.rms_norm(x, weight, EPS))
        part = draw(num_tokens, 2 * size, dtype=dtype)[:, ::2]
        check(compiled.rms_norm(part, weight, EPS), plain.rms_norm(part, weight, EPS))
        gate_up = 5 * draw(num_tokens, 2 * size, dtype=dtype, seed=2)
        found = compiled.activate_and_multiply(gate_up, F.silu)
        check(found, plain.activate_and_multiply(gate_up.clone(), F.silu))
        assert torch.equal(x, before)


@pytest.mark.needs("C++ compiler")
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("cache_kind", [HeadMajorKVCache, PagedKVCache])
def test_heads_are_normed_turned_and_written(kind, has_norm: bool, cache_kind: type) -> None:
    """In memory of either order. Padding is not written: block 0 stays as it was."""
    dtype, norm_dtype, head_dim = kind
    table, block_size = rotary_table(RopeParameters(), head_dim, 90, dtype), 3
    weight = draw(HEADS + KV_HEADS, head_dim, dtype=norm_dtype, seed=1) if has_norm else None
    for num_tokens in (1, 7, 60):
        qkv = draw(num_tokens, HEADS + 2 * KV_HEADS, head_dim, dtype=dtype, seed=num_tokens)
        generator = torch.Generator().manual_seed(num_tokens)
        positions = torch.randint(0, 90, (num_tokens,), generator=generator)
        slots = block_size + torch.randperm(3 * num_tokens, generator=generator)[:num_tokens]
        slots[2::5] = -1
        results = []
        for regions in (CompiledRegions(*kind), Regions()):
            cache = cache_kind(1, num_tokens + 2, block_size, KV_HEADS, head_dim, dtype)
            caches = cache.key_cache[0], cache.value_cache[0]
            rotary = regions.rotary(table, positions)
            step = rotary, *caches, Writer(slot_mapping=slots)
            query = regions.rotate_and_write(qkv.clone(), weight, EPS, *step)
            results.append((query, *(part.contiguous() for part in caches)))
        for found, expected in zip(*results, strict=True):
            check(found.contiguous(), expected.contiguous())
        assert not results[0][1][0].any()
        assert torch.equal(results[0][2], results[1][2]), "values are copied"


@pytest.mark.needs("C++ compiler")
def test_nan_stays_nan() -> None:
    compiled = CompiledRegions(torch.bfloat16, torch.float32, 16)
    gate_up = torch.full((2, 32), 3.0, dtype=torch.bfloat16)
    gate_up[0, 5], gate_up[0, 7], gate_up[0, 9] = math.nan, -math.inf, math.inf
    found = compiled.activate_and_multiply(gate_up, F.silu)
    assert found[0, 5].isnan() and found[0, 9] == math.inf
    hidden = torch.ones(2, 16, dtype=torch.bfloat16)
    hidden[1, 3] = math.nan
    assert compiled.rms_norm(hidden, torch.ones(16), EPS).isnan().all(1).tolist() == [False, True]


@pytest.mark.needs("C++ compiler")
def test_a_row_does_not_depend_on_the_others_nor_on_the_threads() -> None:
    compiled, threads = CompiledRegions(torch.float32, torch.float32, 128), torch.get_num_threads()
    x, weight = draw(300, 1000, dtype=torch.float32), torch.ones(1000)
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for function in (
                lambda x: compiled.rms_norm(x, weight, EPS),
                lambda x: compiled.activate_and_multiply(x, F.silu),
            ):
                together = function(x)
                for row in (0, 7, 299):
                    assert torch.equal(function(x[row : row + 1])[0], together[row])
    finally:
        torch.set_num_threads(threads)


def test_another_activation_is_the_plain_one() -> None:
    compiled = CompiledRegions.__new__(CompiledRegions)
    gate_up = draw(3, 8, dtype=torch.float32)
    found = compiled.activate_and_multiply(gate_up.clone(), torch.relu)
    assert torch.equal(found, Regions().activate_and_multiply(gate_up, torch.relu))


def test_the_regions_set_last_apply(
    random_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions = Regions()
    monkeypatch.setattr(compiled_regions, "compile_regions", lambda model: regions)
    model = random_loaded.model
    set_regions(model, True)
    assert model.regions is regions
    set_regions(model, False)
    assert type(model.regions) is Regions and model.regions is not regions


def test_without_a_compiler_it_says_so(random_loaded: LoadedModel, monkeypatch, caplog) -> None:
    def fail(*arguments):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(compiled_regions, "load_library", fail)
    with caplog.at_level(logging.WARNING):
        assert type(compile_regions(random_loaded.model)) is Regions
    assert "are not compiled: no C++ compiler" in caplog.text
