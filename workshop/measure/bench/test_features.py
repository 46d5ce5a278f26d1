"""Each feature's work runs, and its table has a row for each setting."""

from __future__ import annotations

import pytest

from workshop.measure.bench.features import main

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [
        ("overlap", 3),
        pytest.param("serve", 3, marks=pytest.mark.slow),
    ],
)
def test_a_feature_is_measured_and_shown(
    name: str, num_rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    main([name, "--tiny"])
    assert capsys.readouterr().out.count("\n") == 2 + num_rows
