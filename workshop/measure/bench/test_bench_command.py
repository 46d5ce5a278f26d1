"""What the two drivers have in common: arguments, tables into texts, and how memory is kept."""

from __future__ import annotations

import pytest

from workshop.measure.bench import bench, bench_command, ladder_bench
from workshop.measure.bench.bench_command import Driver


@pytest.mark.parametrize(
    ("driver", "argv", "named"),
    [
        (bench.DRIVER, ["--systems", "magic"], "magic"),
        (bench.DRIVER, ["--models", "gpt-9"], "gpt-9"),
        (bench.DRIVER, ["--repeats", "0"], "--repeats must"),
        (bench.DRIVER, ["--systems", ","], "got ''"),
        (ladder_bench.DRIVER, ["--seeds", "0"], "--seeds"),
    ],
)
def test_an_argument_that_makes_no_sense_is_named(
    driver: Driver, argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        driver.main(argv)
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("driver", [bench.DRIVER, ladder_bench.DRIVER])
def test_a_smoke_run_is_short_and_leaves_the_committed_record_alone(driver: Driver) -> None:
    args = driver.parse([])
    assert (args.rounds, args.record) == (3, driver.committed)
    args = driver.parse(["--smoke"])
    assert args.rounds == 1 and bench_command.ROOT / "build" in args.record.parents
