"""The kernels against the specification in `common/sampling`: no number and no token differs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from common.sampling import counter_random, sampler_kernel
from common.sampling import sampling_constraints as spec
from common.sampling.sampler import Sampler
from common.sampling.sampler_kernel import KERNELS, TILE, sampling_launches
from common.tests.sampling_cases import RECIPES, as_plain, mixed_sampling, sampling_probs
from inverse_cdf import SCALE
from request import SamplingParams

pytestmark = pytest.mark.needs("triton")

NEG_INF = float("-inf")


@pytest.fixture
def more_ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limit the branches of a search, which suits the interpreter; small vocabularies have as many
    as before."""
    caches = sampler_kernel.shape_launch, sampler_kernel.top_p_launch
    monkeypatch.setattr(sampler_kernel, "WAYS", 64)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def adversarial_rows(vocab_size: int, device: torch.device) -> torch.Tensor:
    """float32, with ties of every kind. Every row has a finite maximum."""
    torch.manual_seed(vocab_size)
    x = 3 * torch.randn(8, vocab_size)
    x[1] = x[1].round()
    x[2] = 0.0
    x[3, vocab_size // 3 : -1] = NEG_INF
    x[4] = torch.where(x[4] > 0, 0.0, -0.0)  # equal, though their bits are not
    x[5, vocab_size // 2] = 1e30
    x[6] *= 1e30
    x[7] = 1 + torch.arange(vocab_size) % 3 * 2.0**-23  # neighbours
    return x.to(device)


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.usefixtures("more_ways")
@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(TILE + 77, torch.float32), (256, torch.float64)]
)
def test_top_p_and_the_draw_have_the_same_borders(vocab_size, dtype, device) -> None:
    """At the sum of the first tokens exactly, and next to it on either side."""
    rows = adversarial_rows(vocab_size, device)
    temperature = torch.full((len(rows),), 0.9, dtype=torch.float64, device=device)
    logits = spec.apply_temperature(rows.to(dtype), rows.amax(-1), temperature)
    probs = logits.softmax(-1)
    ordered = probs.gather(1, spec.ranked_ids(logits, vocab_size)).double()
    reached = (ordered * SCALE + 0.5).long().cumsum(-1)[:, vocab_size // 3].double() / SCALE
    mass = (counter_random.block_mass(probs).double() * SCALE).long().cumsum(-1).double()
    border = (mass[:, 0] / mass[:, -1]).clamp(max=1 - 2.0**-53)
    for away in (0.0, -(2.0**-53), 2.0**-53):
        top_p, u = reached + away, (border + away).clamp(0, 1 - 2.0**-53)
        expected = spec.apply_top_p(logits, top_p)
        assert equal(sampler_kernel.apply_top_p(logits.clone(), top_p), expected)
        expected = counter_random.sample_from_probs(probs, u)
        assert equal(sampler_kernel.sample_from_probs(probs, u), expected)
    for bad in (math.nan, NEG_INF):  # what a bad row draws on the way is an index
        tokens = sampler_kernel.sample_from_probs(torch.full_like(probs, bad), u)
        assert (tokens >= 0).all() and (tokens < vocab_size).all()


# -- the sampler

MIXED = list(RECIPES.values())
WAYS = [
    *(SamplingParams(temperature=1.3, top_k=k, min_p=0.01) for k in (1, 9, 16, 256)),
    *(SamplingParams(temperature=t, min_p=0.1) for t in (1e-300, 1e300, 0.7)),
    SamplingParams(temperature=0.7, top_k=300),
    SamplingParams(repetition_penalty=1 / 3, presence_penalty=-2.0, frequency_penalty=1 / 3),
    SamplingParams(repetition_penalty=9.0, presence_penalty=0.1, frequency_penalty=2.0),
    RECIPES["limits"],
    RECIPES["everything"],
]


def make_batch(num_rows: int, vocab_size: int, seed: int = 0) -> SimpleNamespace:
    return SimpleNamespace(sampling=mixed_sampling(MIXED, num_rows, vocab_size, seed))


@pytest.mark.net
@pytest.mark.usefixtures("more_ways")
@pytest.mark.sample(every=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [5, TILE + 77, 12_300])
def test_probabilities_are_those_of_the_specification(vocab_size, dtype, device) -> None:
    """Ties of every kind, in every recipe; a row that is not cut, the highest in one block, in 16
    and in blocks of blocks. Logits of 16 bits are converted where they are read."""
    rows = adversarial_rows(vocab_size, device)
    logits = rows.clamp(-6e4, 6e4).to(dtype) if dtype != torch.float32 else rows
    logits[3] = rows[3].to(dtype)  # with -inf
    for ways in (WAYS[:8], WAYS[-8:]):
        batch = mixed_sampling(ways, 8, vocab_size, 0)
        expected = sampling_probs(logits, batch)
        assert equal(sampling_probs(logits, batch, KERNELS), expected)
        logits = logits.roll(3, 0)


def make_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    """As a model in bfloat16 has them: full of ties, and with lanes after the vocabulary."""
    logits = torch.randn(num_rows, vocab_size + 5).mul(3).to(torch.bfloat16).float()
    logits[:, vocab_size:] = 100.0
    return logits


@pytest.mark.net
@pytest.mark.usefixtures("more_ways")
@pytest.mark.parametrize("vocab_size", [6, 400])
def test_the_kernel_sampler_agrees_with_the_other(vocab_size, device, launched) -> None:
    """Logits in float64 are sampled from by PyTorch."""
    torch.manual_seed(vocab_size)
    n = len(MIXED) + 1  # one recipe twice
    logits = make_logits(n, vocab_size).to(device)
    for row, value in ((3, math.nan), (9, math.inf), (13, -math.nan), (17, NEG_INF)):
        logits[row, : None if value == NEG_INF else 3] = value
    expected = as_plain(Sampler(vocab_size).sample(logits, make_batch(n, vocab_size)))
    assert not launched
    found = as_plain(Sampler(vocab_size, KERNELS).sample(logits, make_batch(n, vocab_size)))
    assert found == expected
    assert found[1].keys() == {"r3", "r9", "r13", "r17"}
    assert all(token < vocab_size for (token,) in found[0].values())
    known = {launch.kernel.__name__ for launch in sampling_launches(vocab_size)}
    assert set(launched) == known
    launched.clear()
    logits = logits.nan_to_num(0, 1, -1).double()
    expected = as_plain(Sampler(vocab_size).sample(logits, make_batch(n, vocab_size)))
    found = as_plain(Sampler(vocab_size, KERNELS).sample(logits, make_batch(n, vocab_size)))
    assert found == expected
    assert "_shape_kernel" not in launched and "_penalties_kernel" not in launched
