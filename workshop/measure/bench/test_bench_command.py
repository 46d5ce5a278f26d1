"""What the two drivers have in common: arguments, tables into texts, and how memory is kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workshop.measure.bench import bench, bench_command, ladder_bench
from workshop.measure.bench.bench_command import Driver, Tables

DRIVERS = [bench.DRIVER, ladder_bench.DRIVER]


def test_malloc_is_tuned_by_starting_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_command.sys, "platform", "linux")
    monkeypatch.setattr(bench_command.platform, "libc_ver", lambda: ("glibc", "2.36"))
    for name in bench_command.TUNED_MALLOC:
        monkeypatch.delenv(name, raising=False)
    environment = bench_command.restart_with(bench.DRIVER.parse([]))
    assert environment is not None and environment["PATH"] == os.environ["PATH"]
    assert bench_command.restart_with(bench.DRIVER.parse(["--malloc", "default"])) is None
    assert bench_command.describe_malloc()["mode"] == "default"
    for name, value in bench_command.TUNED_MALLOC.items():
        assert environment[name] == value
        monkeypatch.setenv(name, value)
    assert bench_command.restart_with(bench.DRIVER.parse([])) is None
    assert bench_command.describe_malloc()["mode"] == "tuned"
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    assert bench_command.restart_with(bench.DRIVER.parse([])) is not None
    monkeypatch.setattr(bench_command.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.delenv("GLIBC_TUNABLES")
    assert bench_command.restart_with(bench.DRIVER.parse([])) is None, (
        "musl and others have no such settings"
    )


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


def a_driver(measured: list[str]) -> Driver:
    return Driver(
        name="sundial",
        description="",
        rounds="--days",
        record="--record",
        committed=Path("committed"),
        smoke=Path("smoke"),
        announce=lambda args: f"{args.rounds} days",
        measure=lambda args: measured.append(str(args.record)) or 7,
        tables=lambda path: Tables(full=f"all of {path}", short=f"some of {path}"),
    )


def test_tables_are_printed_or_written_without_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []
    driver = a_driver(measured)
    texts = [tmp_path / "README.md", tmp_path / "workshop" / "measure" / "bench" / "README.md"]
    texts[1].parent.mkdir(parents=True)
    for text in texts:
        text.write_text("x\n<!-- table:sundial -->\nold\n<!-- /table:sundial -->\ny\n")
    assert driver.main(["--table"]) == 0
    assert capsys.readouterr().out == "all of committed\n"
    assert "old" in texts[0].read_text()
    assert driver.main(["--write-readme", "--record", "r", "--root", str(tmp_path)]) == 0
    for text, shown in zip(texts, ["some of r", "all of r"], strict=True):
        assert text.read_text() == (
            f"x\n<!-- table:sundial -->\n{shown}\n<!-- /table:sundial -->\ny\n"
        )
    assert not measured


def test_measuring_is_announced_and_its_status_returned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured: list[str] = []
    assert a_driver(measured).main(["--days", "2", "--malloc", "default"]) == 7
    assert capsys.readouterr().out == "sundial: measures 2 days\n"
    assert measured == ["committed"]
