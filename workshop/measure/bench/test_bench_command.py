"""What the two drivers have in common: arguments, tables into texts, and how memory is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from workshop.measure.bench import bench, bench_command, ladder_bench
from workshop.measure.bench.bench_command import Driver, Tables

DRIVERS = [bench.DRIVER, ladder_bench.DRIVER]


@pytest.mark.parametrize(
    ("driver", "argv", "named"),
    [
        (bench.DRIVER, ["--systems", "magic"], "magic"),
        (bench.DRIVER, ["--models", "gpt-9"], "gpt-9"),
        (bench.DRIVER, ["--repeats", "0"], "--repeats must"),
        (bench.DRIVER, ["--systems", ","], "at least one name"),
        (bench.DRIVER, ["--models", ""], "at least one name"),
        (ladder_bench.DRIVER, ["--seeds", "0"], "--seeds"),
        (ladder_bench.DRIVER, ["--nonsense"], "--nonsense"),
    ],
)
def test_an_argument_that_makes_no_sense_is_named(
    driver: Driver, argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        driver.main(argv)
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("driver", DRIVERS, ids=lambda driver: driver.name)
def test_a_smoke_run_is_short_and_leaves_the_committed_record_alone(driver: Driver) -> None:
    args = driver.parse([])
    assert (args.rounds, args.record) == (3, driver.committed)
    args = driver.parse(["--smoke"])
    assert args.rounds == 1
    assert bench_command.ROOT / "build" in args.record.parents
    args = driver.parse(["--smoke", driver.rounds, "5", driver.record, "elsewhere"])
    assert (args.rounds, args.record) == (5, Path("elsewhere"))


def test_tables_are_printed_or_written_without_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_command, "ROOT", tmp_path)
    driver = replace(bench.DRIVER, tables=lambda path: Tables(f"all of {path}", f"some of {path}"))
    texts = [tmp_path / "README.md", tmp_path / "workshop" / "measure" / "bench" / "README.md"]
    texts[1].parent.mkdir(parents=True)
    for text in texts:
        text.write_text("x\n<!-- table:bench -->\nold\n<!-- /table:bench -->\ny\n")
    assert driver.main(["--table"]) == 0
    assert capsys.readouterr().out == f"all of {driver.committed}\n"
    assert "old" in texts[0].read_text()
    assert driver.main(["--write-readme", "--records", "r"]) == 0
    for text, shown in zip(texts, ["some of r", "all of r"], strict=True):
        assert text.read_text() == f"x\n<!-- table:bench -->\n{shown}\n<!-- /table:bench -->\ny\n"
