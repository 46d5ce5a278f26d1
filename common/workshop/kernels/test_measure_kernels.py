"""The measurement of the kernels runs, and its table says what the record holds."""

from __future__ import annotations

import pytest

from common.workshop.kernels import measure_kernels
from test_decode_attention import needs_compiler


def test_the_table_shows_medians() -> None:
    cells = [{"kernel": "norm", "tokens": 2048, "us": {"plain": [3, 30, 9000], "fast": [20, 10]}}]
    assert measure_kernels.table({"cells": cells}).splitlines()[-1] == (
        "| norm | 2,048 | 30 us | 15 us | 2.00 |"
    )


def test_the_two_of_a_pair_take_turns_to_begin() -> None:
    calls: list[str] = []
    pair = (lambda: calls.append("plain"), lambda: calls.append("fast"))
    times = measure_kernels.time_pair(pair, 2, lambda: 1.0)
    assert calls == ["plain", "fast", "plain", "fast", "fast", "plain"]
    assert times == {"plain": [0.0, 0.0], "fast": [0.0, 0.0]}


@pytest.mark.slow
@needs_compiler
def test_everything_is_measured() -> None:
    record = measure_kernels.measure(1, 2, [3], [20])
    kernels = [cell["kernel"] for cell in record["cells"]]
    assert kernels == ["rms_norm", "norm_and_rotate", "silu", "attention of a prompt"]
    assert all(len(cell["us"]["fast"]) >= 2 for cell in record["cells"])
