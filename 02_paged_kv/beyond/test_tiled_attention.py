"""Long queries by tiles against the oracle of `test_paged_attention.py`, and the plans that use
them."""

from __future__ import annotations

import pytest
import torch

import tiled_attention as module
from test_compiled_attention import attend, make_backend, make_head_major_case
from tiled_attention import attend_in_tiles, is_for_tiles

LENGTHS = [(17, 17), (20, 41), (1, 9), (33, 33), (48, 50), (17, 70)]


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Query and key lengths of each call."""
    calls: list[tuple[int, int]] = []
    real = module.attend_in_tiles

    def spy(query, keys, values, scale):
        calls.append((query.shape[2], len(keys)))
        return real(query, keys, values, scale)

    monkeypatch.setattr("compiled_attention.attend_in_tiles", spy)
    monkeypatch.setattr(module, "QUERY_TILE", 16)
    return calls


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_every_query_sees_what_it_should(block_size, dtype, tiles, monkeypatch):
    """Unused slots are NaN. Tiles end within, at and after the ends of the queries."""
    monkeypatch.setattr(module, "DTYPE", dtype)
    case = make_head_major_case(LENGTHS, block_size, dtype, num_padding_tokens=2, seed=block_size)
    case.check(attend(case, make_backend(case)))
    assert sorted(tiles) == sorted(pair for pair in LENGTHS if pair[0] > 16)


def test_other_dtypes_and_very_long_ones_go_the_usual_way(tiles):
    case = make_head_major_case([(20, 30)], 4, torch.float32)
    case.check(attend(case, make_backend(case)))
    assert not tiles
    query = torch.zeros(2, 2, 20, 8, dtype=torch.bfloat16)
    assert is_for_tiles(query, module.MAX_KEYS) and not is_for_tiles(query, module.MAX_KEYS + 1)


def test_in_bfloat16_it_is_as_exact_as_its_inputs():
    """Against float64 on the same bfloat16 numbers: an error of the size of bfloat16's steps."""
    torch.manual_seed(0)
    query = torch.randn(2, 2, 300, 64).bfloat16()
    keys, values = torch.randn(2, 333, 2, 64).bfloat16()
    exact = [t.double() for t in (query, keys, values)]
    expected = attend_in_tiles(*exact, 64**-0.5)
    found = attend_in_tiles(query, keys, values, 64**-0.5)
    error = (found.double() - expected).abs()
    assert found.dtype == torch.bfloat16
    assert error.max() < 0.04 and error.mean() < 0.0015
