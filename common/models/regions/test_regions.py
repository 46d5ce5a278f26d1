"""Operations between the matrices, as machine code and as kernels, against the plain ones in
float64. Kernels run on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from common.assembly.assembly import set_regions
from common.engine_config import SHIPPED_CHECKPOINT
from common.models.linear import Linear
from common.models.loader import load_model
from common.models.regions import compiled_regions
from common.models.regions.compiled_regions import CompiledRegions, compile_regions
from common.models.regions.kernel_regions import CHANNELS_AT_ONCE, KernelRegions
from common.models.regions.regions import Regions
from common.models.rotary import RopeParameters, rotary_table
from compiled_attention import HeadMajorKVCache
from paged_attention import AttentionPlan, PagedKVCache

# Of a result of size 1, or relative to its size where it is larger.
TOLERANCE = {torch.float64: 5e-7, torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
EPS = 1e-6
CPU = torch.device("cpu")


class Writer(AttentionPlan):
    """The part of a plan that these tests need."""

    def __init__(self, slot_mapping: torch.Tensor) -> None:
        self.slot_mapping = slot_mapping


class Kind(NamedTuple):
    dtype: torch.dtype
    norm_dtype: torch.dtype
    head_dim: int


class Version(NamedTuple):
    regions: Regions
    kind: Kind
    device: torch.device

    def draw(self, *shape: int, seed: int = 0, norm: bool = False) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(self.device, self.kind.norm_dtype if norm else self.kind.dtype)

    def must_be(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Contiguous, of this dtype, NaN where the other is, and as close as it can be."""
        assert found.dtype == self.kind.dtype and found.shape == expected.shape
        assert found.is_contiguous() and torch.equal(found.isnan(), expected.isnan())
        found, expected = found.nan_to_num().double(), expected.nan_to_num().double()
        error = (found - expected).abs() / expected.abs().clamp(min=1)
        assert (error <= TOLERANCE[self.kind.dtype]).all(), error.max()


COMPILED = pytest.mark.needs("C++ compiler")
f64 = torch.float64
f32 = torch.float32
f16 = torch.float16
bf16 = torch.bfloat16
VERSIONS = [
    *(
        pytest.param((CompiledRegions, Kind(*kind)), marks=COMPILED, id=f"compiled-{kind}")
        for kind in (
            *((f64, f64, 16), (f32, f32, 128), (bf16, bf16, 16), (bf16, f32, 80), (f16, f32, 6)),
        )
    ),
    *(
        pytest.param((KernelRegions, Kind(*kind)), marks=pytest.mark.needs("triton"), id=f"{kind}")
        for kind in ((f32, f32, 16), (bf16, f32, 80), (f16, f16, 2))
    ),
]


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest, device: torch.device) -> Version:
    make, kind = request.param
    if make is CompiledRegions:
        return Version(CompiledRegions(*kind), kind, CPU)
    return Version(KernelRegions(), kind, device)


def added(version: Version, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor):
    """The matrix is 1, so that `delta` is added."""
    one = torch.eye(delta.shape[1], dtype=delta.dtype, device=delta.device)
    return version.regions.add_and_norm(Linear(nn.Parameter(one)), hidden, delta, weight, EPS)


@pytest.mark.net
def test_sums_are_normed_and_gates_are_multiplied(version: Version) -> None:
    """Sizes that vectors divide and do not divide, of no token to many: one thread and more. The
    norm reads the sum as it is stored, rounded."""
    plain = Regions()
    is_compiled = isinstance(version.regions, CompiledRegions)
    for size in (1, 24, 61, *([1000] if is_compiled else [])):
        weight = version.draw(size, seed=1, norm=True)
        for num_tokens in (0, 1, 5, *([400] if is_compiled else [])):
            hidden, delta = (version.draw(num_tokens, size, seed=i) for i in (2, 3))
            expected = hidden.double() + delta.double()
            alone = added(version, hidden[1:2].clone(), delta[1:2], weight)
            total, normed = added(version, hidden, delta, weight)
            version.must_be(total, expected)
            assert torch.equal(alone[1], normed[1:2]), "a row depends on the others"
            version.must_be(normed, plain.rms_norm(total.double(), weight.double(), EPS))
            part = version.draw(num_tokens, 2 * size)[:, ::2]
            found = version.regions.rms_norm(part, weight, EPS)
            version.must_be(found, plain.rms_norm(part.double(), weight.double(), EPS))
    for size in (1, 24, CHANNELS_AT_ONCE, CHANNELS_AT_ONCE + 7):
        for num_tokens in (0, 2):
            gate_up = 3 * version.draw(num_tokens, 2 * size)
            expected = plain.activate_and_multiply(gate_up.double(), F.silu)
            version.must_be(version.regions.activate_and_multiply(gate_up, F.silu), expected)
            expected = plain.activate_and_multiply(gate_up.clone(), torch.relu)
            found = version.regions.activate_and_multiply(gate_up, torch.relu)
            assert torch.equal(found, expected), "another activation is the plain one"


@pytest.mark.net
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("cache_kind", [HeadMajorKVCache, PagedKVCache])
def test_heads_are_normed_turned_and_written(version: Version, has_norm, cache_kind) -> None:
    """In memory of either order. NaN in every slot that is not written stays; -1 is nowhere."""
    head_dim = version.kind.head_dim
    block_size = 3
    table = rotary_table(RopeParameters(), head_dim, 300, version.kind.dtype).to(version.device)
    many = 60 if isinstance(version.regions, CompiledRegions) else 6  # the interpreter is slow
    for heads, kv_heads, num_tokens in ((4, 2, 3), (6, 1, 1), (2, 2, many), (4, 2, 0)):
        weight = version.draw(heads + kv_heads, head_dim, norm=True) if has_norm else None
        qkv = version.draw(num_tokens, heads + 2 * kv_heads, head_dim, seed=num_tokens)
        generator = torch.Generator().manual_seed(num_tokens)
        positions = torch.randint(0, 300, (num_tokens,), generator=generator)
        slots = block_size + torch.randperm(3 * num_tokens, generator=generator)[:num_tokens]
        slots[2::5] = -1
        positions, slots = positions.to(version.device), slots.to(version.device)
        results = []
        for regions, dtype in ((version.regions, version.kind.dtype), (Regions(), f64)):
            shape = 1, num_tokens + 2, block_size, kv_heads, head_dim
            cache = cache_kind(*shape, dtype, device=version.device)
            caches = [part[0].fill_(math.nan) for part in (cache.key_cache, cache.value_cache)]
            rotary = regions.rotary(table.to(dtype), positions)
            norm = weight if weight is None or dtype != f64 else weight.double()
            arguments = qkv.to(dtype, copy=True), norm, EPS, rotary, *caches
            query = regions.rotate_and_write(*arguments, Writer(slot_mapping=slots))
            others = [cache[1:] for cache in caches]  # no request owns the null block
            results.append([part.contiguous() for part in (query, *others)])
        for found, expected in zip(*results, strict=True):
            version.must_be(found, expected)
        assert torch.equal(results[0][2].double().nan_to_num(), results[1][2].nan_to_num())


def test_padding_stays_zero_and_large_gates_and_nan_are_what_they_are(version: Version) -> None:
    zeros = torch.zeros(2, 24, dtype=version.kind.dtype, device=version.device)
    weight = version.draw(24, norm=True)
    assert not added(version, zeros.clone(), zeros, weight)[1].any(), "eps keeps it from NaN"
    gates = zeros[:1, :8] + torch.tensor([-1e4, 2, 3, 4], device=version.device).repeat(2)
    gates[0, 1] = math.nan
    gates[0, 4] = 1e4
    found = version.regions.activate_and_multiply(gates.to(version.kind.dtype), F.silu)
    assert abs(found[0, 0].item()) < 1e-20
    assert found[0].isnan().nonzero().tolist() == [[1]]
    hidden = zeros.clone()
    hidden[1, 3] = math.nan
    assert added(version, hidden, zeros, weight)[1].isnan().all(1).tolist() == [False, True]


def test_which_regions_a_model_has(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """Kernels go with attention, and never with float64; the ones set last apply; without a
    compiler they are plain, and it says so."""
    for dtype, kind in ((f32, KernelRegions), (bf16, KernelRegions), (f64, Regions)):
        model = load_model(SHIPPED_CHECKPOINT, dtype, CPU).model
        set_regions(model, is_compiled=False, is_triton=True)
        assert type(model.regions) is kind
        set_regions(model, False)
        assert type(model.regions) is Regions

    def fail(*arguments):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(compiled_regions, "load_library", fail)
    with caplog.at_level(logging.WARNING):
        assert type(compile_regions(model)) is Regions
    assert "are not compiled: no C++ compiler" in caplog.text
