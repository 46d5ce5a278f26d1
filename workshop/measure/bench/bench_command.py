"""The command line of two drivers, `python -m workshop.bench` and `workshop.ladder`.

Both measure, write a record and print its tables, or only show the existing record:

    --smoke                  almost no work, to see that it runs; the record goes to build/
    --table                  print the tables
    --write-readme           put them between the markers `<!-- table:NAME -->`: all of them into
                             workshop/measure/bench/README.md, the gains of the ladder into
                             README.md, and a chapter's own row into its README.md

A measurement may have to start as a new process (`restart_with`), because the C library reads its
memory settings once, when a process starts.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workshop.measure.bench.bench_record import ROOT, write_between_markers

# glibc returns large tensors to the kernel when they are freed and takes fresh pages, one fault per
# 4 KiB, for the next tensor. With these settings it keeps and reuses them, in large pages.
TUNED_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(8 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a record, as markdown."""

    full: str  # for workshop/measure/bench/README.md
    gains: str = ""  # for README.md, if there is one
    rows: Mapping[str, str] = field(default_factory=dict)  # chapter -> its own row


@dataclass(frozen=True, slots=True)
class Driver:
    """The measurement of one of the two commands, and the rendering of its record.

    `rounds` and `record` name the options for the number of repeats and the record's path:
    `args.rounds` and `args.record` afterwards."""

    name: str  # in `python -m workshop.NAME` and in the markers
    description: str
    rounds: str
    record: str
    committed: Path
    smoke: Path
    announce: Callable[[argparse.Namespace], str]  # the measurement in words
    measure: Callable[[argparse.Namespace], int]  # returns the exit status
    tables: Callable[[Path], Tables]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            prog=f"python -m workshop.{self.name}", description=self.description.partition("\n")[0]
        )
        self.add_arguments(parser)
        add = parser.add_argument
        add(self.rounds, type=int, dest="rounds", help="how often (default 3)")
        add("--smoke", action="store_true", help="almost no work, to see that it runs")
        add("--malloc", choices=("tuned", "default"), default="tuned",
            help="tuned: on glibc, start again with settings that keep freed memory, for all "
            "systems alike")  # fmt: skip
        add(self.record, type=Path, dest="record", help="where the record is")
        add("--table", action="store_true", help="only print the tables")
        add("--write-readme", action="store_true", help="only write them into the pages")
        args = parser.parse_args(argv)
        args.rounds = args.rounds if args.rounds is not None else 1 if args.smoke else 3
        if args.rounds < 1:
            parser.error(f"{self.rounds} must be >= 1, got {args.rounds}")
        args.record = args.record or (self.smoke if args.smoke else self.committed)
        args.argv = list(argv)
        return args

    def main(self, argv: Sequence[str] | None = None) -> int:
        args = self.parse(sys.argv[1:] if argv is None else argv)
        if args.table or args.write_readme:
            tables = self.tables(args.record)
            if args.table:
                print(tables.full)
            if args.write_readme:
                for place, part, table in places_of(self.name, tables):
                    write_between_markers(ROOT / place, part, table)
            return 0
        environment = restart_with(args)
        if environment is not None and argv is None:
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
        print(f"{self.name}: measures {self.announce(args)}", flush=True)
        return self.measure(args)


def places_of(name: str, tables: Tables) -> list[tuple[str, str, str]]:
    """Return page, name of the markers, and the text between them, for each place."""
    places = [("workshop/measure/bench/README.md", name, tables.full)]
    places += [("README.md", f"{name}_gains", tables.gains)] if tables.gains else []
    return places + [(f"{c}/README.md", f"{name}_row", row) for c, row in tables.rows.items()]


def restart_with(args: argparse.Namespace) -> dict[str, str] | None:
    """The environment in which this process must be restarted, or None if it is already right."""
    if args.malloc != "tuned" or sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return None
    if all(os.environ.get(name) == value for name, value in TUNED_MALLOC.items()):
        return None
    return dict(os.environ) | TUNED_MALLOC


def describe_malloc() -> dict[str, Any]:
    set_now = {name: os.environ[name] for name in TUNED_MALLOC if name in os.environ}
    return {"mode": "tuned" if set_now == TUNED_MALLOC else "default", "environment": set_now}
