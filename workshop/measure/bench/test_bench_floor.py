"""The floor of a run, by a pencil."""

from __future__ import annotations

import pytest

from workshop.measure.bench.bench_floor import run_floor

# One row takes 10 ms, two take 12, four take 20; 100 rows of a prompt 200 ms; 2 GB a second.
ROOFLINE = {
    "linear_ms": {"1": [10.0, 11.0, 9.0], "2": [12.0], "4": [20.0, 20.0, 99.0]},
    "prefill": {"num_rows": 100, "ms": [200.0, 190.0, 300.0]},
    "kv_bytes_per_token": 1_000_000,
    "bandwidth": {"matvec_gb_per_s": [2.0, 2.0, 7.0]},
}
LENGTHS = [(10, 3), (20, 1), (30, 4), (40, 2)]


def test_the_floor_by_hand() -> None:
    floor = run_floor(LENGTHS, 4, ROOFLINE)
    assert (floor.num_prompt_tokens, floor.num_decode_steps, floor.num_decode_tokens) == (100, 3, 6)
    assert floor.prompts_s == pytest.approx(0.200)
    assert floor.decodes_s == pytest.approx(0.016 + 0.012 + 0.010)
    assert floor.kv_s == pytest.approx((83 + 44 + 33) * 1e6 / 2e9)
    assert floor.seconds == pytest.approx(0.200 + 0.038 + 0.080)
