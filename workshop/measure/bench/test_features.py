"""One program measures every feature: the runs in turn, the record, and its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from workshop.measure.bench import features
from workshop.measure.bench.bench_record import read_record
from workshop.measure.bench.features import FEATURES

pytestmark = pytest.mark.usefixtures("one_thread")
WITH_SERVERS = ("hostile", "serve")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in WITH_SERVERS else n for n in FEATURES],
)
def test_a_feature_is_measured_recorded_and_shown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(features, "ROOT", tmp_path)
    features.main([name, "--tiny"])
    record = read_record(tmp_path / "build" / "features-smoke" / f"{name}.json")
    assert record["command"] == f"python -m workshop.bench.features {name}"
    tables = "\n\n".join(FEATURES[name].tables(record))
    assert capsys.readouterr().out == tables + "\n"
    for part, cases in record["runs"].items():
        for settings in cases.values():
            num_runs = 4 if part == "stops" else 1
            assert settings and {len(runs) for runs in settings.values()} == {num_runs}
