"""Pages show the tables of the committed records, and nothing in them is hidden."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator

import pytest

from workshop.measure.bench import bench, gpu, ladder_bench
from workshop.measure.bench.bench_record import ROOT, read_record, replace_between_markers
from workshop.practice.museum.exhibits import EXHIBITS
from workshop.practice.tasks.course import TASKS


def shown() -> Iterator[tuple[str, str, str]]:
    """Yield each page, the name of a table on it, and the table's text."""
    for driver in (bench.DRIVER, ladder_bench.DRIVER):
        for place, table in driver.tables(driver.committed).items():
            page, name = place.split()
            yield page, name, table
    records = [read_record(path) for path in sorted(gpu.RECORDS.glob("gpu_record_*.json"))]
    texts = gpu.texts_of(records)  # without a record they say so, in two languages
    yield from ((page, name, texts[name]) for page, name in gpu.PAGES.items())


@pytest.mark.parametrize(
    ("page", "name", "table"), [pytest.param(*one, id=one[1]) for one in shown()]
)
def test_a_page_shows_the_committed_record(page: str, name: str, table: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert replace_between_markers(text, name, table) == text, f"{page}: {name}"


def test_a_table_replaces_what_stands_between_its_markers_and_nothing_else() -> None:
    text = "a\n<!-- table:bench -->\nold\n<!-- /table:bench -->\nb <!-- /table:other -->\n"
    assert replace_between_markers(text, "bench", "| new |") == text.replace("old", "| new |")
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
