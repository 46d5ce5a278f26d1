"""Tables say what records hold, and the texts show the tables."""

from __future__ import annotations

import re
import statistics

import pytest

from workshop.measure.bench import bench, bench_table, ladder_bench, ladder_table
from workshop.measure.bench.bench_command import Driver, places_of
from workshop.measure.bench.bench_record import ROOT, read_record, replace_between_markers
from workshop.practice.museum.exhibits import EXHIBITS
from workshop.practice.tasks.course import TASKS

RECORDS = bench.DRIVER.committed


def test_a_missing_run_has_its_reason_and_uncommitted_code_is_marked() -> None:
    """The committed records, which the pages show, have none."""
    record = read_record(RECORDS / "bench_tiny.json")
    systems, num_runs = record["systems"], record["config"]["repeats"]
    assert num_runs == len(systems["chunked"]["runs"]) == 3
    record["environment"] |= {"commit": "0123456789ab", "is_dirty": True}
    for name, num_kept, error in (
        ("static", 0, None),
        ("padded", 0, "no manager"),
        ("paged", 1, None),
        ("speculative", 2, "no memory"),
    ):
        systems[name] |= {"title": name, "error": error, "runs": systems[name]["runs"][:num_kept]}
    lines = bench_table.render(record).splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
    assert rows["static"] == "| static | not measured: the time budget was used up | | | | | |"
    assert rows["padded"] == "| padded | no manager | | | | | |"
    assert rows["paged"].split(" | ")[2] == "1 run"
    assert rows["speculative (then failed: no memory)"].split(" | ")[2].endswith(" (2 runs)")
    assert "commit 012345678* with uncommitted changes" in lines[-1]
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    record = read_record(ladder_bench.RECORD)
    record["environment"]["is_dirty"] = True
    for render in (ladder_table.render, ladder_table.render_short):
        assert "with uncommitted changes" in render(record).splitlines()[-1]


def test_a_table_replaces_what_stands_between_its_markers_and_nothing_else() -> None:
    text = "a\n<!-- table:bench -->\nold\n<!-- /table:bench -->\nb <!-- /table:other -->\n"
    once = replace_between_markers(text, "bench", "| new |")
    assert once == text.replace("old", "| new |")
    assert replace_between_markers(once, "bench", "| new |") == once
    for broken in ("", text + text, text.replace("<!-- /table:bench -->", "")):
        with pytest.raises(ValueError, match="markers"):
            replace_between_markers(broken, "bench", "x")


def test_the_first_screen_has_the_digits_of_the_record_and_of_the_folders() -> None:
    """In words, which no script writes: the loss, the number of tasks and that of bugs."""
    many = read_record(ladder_bench.DRIVER.committed)["regimes"]["many"]["rungs"].values()
    gaps = [[run["inter_token_ms_p99"] for run in config["runs"]] for config in many]
    first, *_, last = (f"{statistics.median(gap):.0f}" for gap in gaps)
    for page in ("README.md", "README.zh.md"):
        screen = (ROOT / page).read_text(encoding="utf-8").partition("<details>")[0]
        (loss,) = (part for part in screen.split("\n\n") if "n-gram" in part)
        assert re.findall(r"\d+", loss.replace("p99", "")) == ["1", "5", first, last]
        assert f" {len(TASKS)} " in screen and f" {len(EXHIBITS)} " in screen


@pytest.mark.parametrize("driver", [bench.DRIVER, ladder_bench.DRIVER], ids=lambda d: d.name)
def test_the_texts_show_the_committed_records(driver: Driver) -> None:
    for place, part, table in places_of(driver.name, driver.tables(driver.committed)):
        text = (ROOT / place).read_text(encoding="utf-8")
        assert replace_between_markers(text, part, table) == text, (
            f"python -m workshop.{driver.name} --write-readme writes {place}"
        )
