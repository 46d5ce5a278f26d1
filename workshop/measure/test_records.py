"""Each number's age, and what `make records` would measure."""

from __future__ import annotations

import pytest

from workshop.measure import records
from workshop.measure.bench.bench_record import ROOT


def test_every_record_has_a_row_and_all_take_three_hours_at_most() -> None:
    folder = ROOT / "workshop" / "measure"
    found = {p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.json")}
    assert found == {row.record for row in records.ROWS}
    assert sum(row.minutes for row in records.ROWS) <= records.MAX_MINUTES


def test_a_line_with_a_commit_and_a_records_command_says_its_age(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "age_of", lambda commit, files: 1234 if commit[0] == "a" else None)
    line = "<sub>At commit `abcdef1234`; `make ladder` measures it again.</sub>"
    others = ["commit `abcdef1234`", line.replace("abc", "bcd"), "`make ladder`"]
    text = records.with_ages("\n".join([line, *others]))
    said = "; `make ladder` measures it again. 1,234 commits have changed what it measures since."
    assert text.split("\n") == [f"<sub>At commit `abcdef1234`{said}</sub>", *others]
    chinese = "由 `python -m workshop.plot_batching --record batching` 生成，commit `a234567`。"
    assert records.with_ages(chinese, True) == chinese + records.WORDS[True].format("1,234")


def test_the_age_of_the_head_is_none() -> None:
    if (head := records.git("rev-parse", "HEAD")) is None:
        pytest.skip("there is no repository")
    assert records.age_of(head, records.CHAPTERS) == 0
    assert records.age_of("0" * 40, records.CHAPTERS) is None
