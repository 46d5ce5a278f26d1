"""The shared frame of the chapters' plot scripts: measure, keep, draw, write tables.

    python -m workshop.plot_TOPIC                        draw NN_chapter/figures/ from records/
    python -m workshop.plot_TOPIC --tables               and the tables of the chapter's pages
    python -m workshop.plot_TOPIC --record PART ...      measure first
    python -m workshop.plot_TOPIC --record PART --tiny   almost no work, into build/

A part is one measurement with its record, figures and tables. The script defines what is measured,
drawn and tabulated, and `run_lab` does everything else. A table's place in a page is between
`<!-- table:NAME -->` and `<!-- /table:NAME -->`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import matplotlib

matplotlib.use("svg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop.book.drawings import is_shown
from workshop.book.figure_file import save
from workshop.book.figure_words import Words
from workshop.measure.bench.bench_record import (
    ROOT,
    describe_environment,
    made_on,
    markdown_table,
    percentiles,
    read_record,
    replace_between_markers,
    write_record,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measurement:
    """The arguments of a part's `measure`."""

    tiny: bool  # almost no work: to see that everything runs
    records: dict[str, dict] = field(default_factory=dict)  # of the parts measured before

    def of(self, few: T, many: T) -> T:
        """Return an amount of work."""
        return few if self.tiny else many


@dataclass(frozen=True, slots=True)
class Part:
    """`measure` returns a record with its "config"; machine, command and `clock` are added.
    `measure` raises `ValueError` where another part is missing."""

    measure: Callable[[Measurement], dict]
    figures: Mapping[str, Callable[[dict], Figure]] = field(default_factory=dict)
    tables: Callable[[dict], dict[str, str]] = lambda record: {}
    clock: str | None = None  # of a part that times


def table(first: str, rows: Mapping[str, Any], columns: Mapping[str, Callable[..., object]]) -> str:
    """Return a table: a row for each of `rows`, after its name a cell for each of `columns`."""
    lines = [[name, *(cell(row) for cell in columns.values())] for name, row in rows.items()]
    return markdown_table([first, *columns], lines)


def plot_band(
    axis: Axes,
    xs: Sequence[float],
    runs: Iterable[Sequence[float]],
    color: str,
    form: str = "o-",
    low: float = 0,
    high: float = 100,
) -> list[float]:
    """Draw the median of each of `runs` over an area between two percentiles. Returns the
    medians."""
    lows, middles, highs = zip(*(percentiles(run, [low, 50, high]) for run in runs))
    axis.fill_between(xs, lows, highs, color=color, alpha=0.2, linewidth=0)
    axis.plot(xs, middles, form, color=color)
    return list(middles)


def run_lab(
    script: str,
    chapter: str,
    parts: Mapping[str, Part],
    arguments: Sequence[str] | None = None,
) -> None:
    """Run a plot script as its `main`. `script` is its `__file__`, `chapter` the folder of its
    figures and pages.

    The record of `plot_TOPIC.py`'s part PART is `records/TOPIC_PART.json`, that of a part TOPIC
    `records/TOPIC.json`."""
    path = Path(script).resolve()
    topic = path.stem.removeprefix("plot_")
    options = _parse(topic, parts, arguments)
    smoke = ROOT / "build" / f"{topic}-smoke"
    kept, pages = (smoke, smoke) if options.tiny else (path.parent, ROOT / chapter)
    names = {part: topic if part == topic else f"{topic}_{part}" for part in parts}
    paths = {part: kept / "records" / f"{name}.json" for part, name in names.items()}
    records = {part: read_record(path) for part, path in paths.items() if path.exists()}
    for part in options.record:
        environment = describe_environment()  # before measuring: other programs' load average
        try:
            measured = parts[part].measure(Measurement(options.tiny, records))
        except ValueError as error:
            raise SystemExit(f"--record {part}: {error}") from error
        command = f"python -m workshop.{path.stem} --record {part}"
        head = {"command": command, "environment": environment}
        if (clock := parts[part].clock) is not None:
            measured["config"]["clock"] = clock
        records[part] = {**head, **measured}  # a record may describe its command in more detail
        write_record(paths[part], records[part])
    for part, record in records.items():
        for name, draw in parts[part].figures.items():
            is_twice = is_shown(f"{name}.zh.svg") and not options.tiny
            figure = {name: partial(draw, record)}
            save(figure, pages / "figures", Words() if is_twice else None)
    if options.tables:
        write_tables(make_tables(parts, records), None if options.tiny else pages)


def _parse(
    topic: str, parts: Mapping[str, Part], arguments: Sequence[str] | None
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"Measure, draw and tabulate: {topic}.")
    add = parser.add_argument
    add("--record", nargs="+", choices=parts, default=[], metavar="PART", help="|".join(parts))
    add("--tables", action="store_true", help="put the tables into the pages")
    add("--tiny", action="store_true", help="almost no work, into build/")
    return parser.parse_args(arguments)


def make_tables(parts: Mapping[str, Part], records: Mapping[str, dict]) -> dict[str, str]:
    """Return all tables by name; `made_on_PART` is the line under those of a part."""
    tables: dict[str, str] = {}
    for part, record in records.items():
        tables |= {**parts[part].tables(record), f"made_on_{part}": made_on(record)}
    return tables


def write_tables(tables: Mapping[str, str], chapter: Path | None) -> None:
    """Put each table into the chapter's pages that have a place for it; `make sync` copies the
    numbers into the Chinese pages. Without a chapter, print all."""
    pages = [] if chapter is None else sorted(chapter.rglob("*.md"))
    pages = [page for page in pages if not page.name.endswith(".zh.md")]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    for name, content in tables.items():
        places = [page for page, text in texts.items() if f"<!-- table:{name} -->" in text]
        for page in places:
            texts[page] = replace_between_markers(texts[page], name, content)
        if chapter is None:
            print(f"{name}\n{content}\n")
        elif not places:
            print(f"no page of {chapter.name} has a place for table {name}")
    for page, text in texts.items():
        page.write_text(text, encoding="utf-8")
