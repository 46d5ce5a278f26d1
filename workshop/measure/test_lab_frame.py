from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from workshop.measure import lab_frame
from workshop.measure.bench.bench_record import read_record
from workshop.measure.lab_frame import Measurement, Part, run_lab


def draw(record: dict) -> plt.Figure:
    figure, axis = plt.subplots()
    axis.set_title(f"seen {record['seen']}")
    return figure


def measure_first(measurement: Measurement) -> dict:
    return {"config": {}, "seen": 1 if measurement.tiny else 100}


def measure_second(measurement: Measurement) -> dict:
    if "first" not in measurement.records:
        raise ValueError("record first, first")
    return {"config": {}, "seen": measurement.records["first"]["seen"] + 1}


PARTS = {
    "first": Part(measure_first, {"picture": draw}, lambda r: {"one": f"{r['seen']} seen"}),
    "second": Part(measure_second),
}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(lab_frame, "ROOT", tmp_path)
    chapter = tmp_path / "01_a"
    (chapter / "beyond").mkdir(parents=True)
    (chapter / "README.md").write_text("text\n")
    place = "before\n<!-- table:one -->\nold\n<!-- /table:one -->\nbehind\n"
    for name in ("README.md", "README.zh.md"):
        (chapter / "beyond" / name).write_text(place)
    return str(tmp_path / "workshop" / "measure" / "plot_topic.py")


def test_a_part_is_measured_kept_drawn_and_tabulated(script: str, capsys) -> None:
    run_lab(script, "01_a", PARTS, ["--record", "first", "second", "--tables"])
    chapter, records = lab_frame.ROOT / "01_a", Path(script).parent / "records"
    record = read_record(records / "topic_first.json")
    assert record["command"] == "python -m workshop.plot_topic --record first"
    assert record["seen"] == 100
    assert read_record(records / "topic_second.json")["seen"] == 101
    assert "seen 100" in (chapter / "figures" / "picture.svg").read_text()
    page = (chapter / "beyond" / "README.md").read_text()
    assert page == "before\n<!-- table:one -->\n100 seen\n<!-- /table:one -->\nbehind\n"
    assert (chapter / "README.md").read_text() == "text\n"
    assert "\nold\n" in (chapter / "beyond" / "README.zh.md").read_text(), "its words are Chinese"
    assert "no page of 01_a has a place for table made_on_first" in capsys.readouterr().out
