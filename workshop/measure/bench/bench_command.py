"""The command line of two drivers, `python -m workshop.bench` and `workshop.ladder`.

Both measure, write a record and print its tables, or only show the existing record:

    --smoke                  almost no work, to see that it runs; the record goes to build/
    --table                  print the tables
    --write-readme           put them between the markers `<!-- table:NAME -->`: all of them into
                             workshop/measure/bench/README.md, the gains of the ladder into
                             README.md, and a chapter's own row into its README.md

A measurement starts as a new process, because the C library reads its memory settings once, when a
process starts.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
BENCH = ROOT / "workshop" / "measure" / "bench"
Tables = dict[str, str]  # the text of each table by "PAGE NAME"; the first is the longest


@dataclass(frozen=True, slots=True)
class Driver:
    """The measurement of one of the two commands, and the rendering of its record.

    `rounds` and `record` name the options for the number of repeats and the record's path:
    `args.rounds` and `args.record` afterwards."""

    name: str  # in `python -m workshop.NAME`
    rounds: str
    record: str
    committed: Path
    announce: Callable[[argparse.Namespace], str]  # the measurement in words
    measure: Callable[[argparse.Namespace], int]  # returns the exit status
    tables: Callable[[Path], Tables]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        parser = argparse.ArgumentParser(prog=f"python -m workshop.{self.name}")
        self.add_arguments(parser)
        add = parser.add_argument
        add(self.rounds, type=int, dest="rounds", help="how often (default 3)")
        add("--smoke", action="store_true", help="almost no work, to see that it runs")
        add(self.record, type=Path, dest="record", help="where the record is")
        add("--table", action="store_true", help="only print the tables")
        add("--write-readme", action="store_true", help="only write them into the pages")
        args = parser.parse_args(argv)
        args.rounds = args.rounds if args.rounds is not None else 1 if args.smoke else 3
        if args.rounds < 1:
            parser.error(f"{self.rounds} must be >= 1, got {args.rounds}")
        smoke = ROOT / "build" / f"{self.name}-smoke" / self.committed.name
        args.record = args.record or (smoke if args.smoke else self.committed)
        args.argv = list(argv)
        return args

    def main(self, argv: Sequence[str] | None = None) -> int:
        args = self.parse(sys.argv[1:] if argv is None else argv)
        if args.table or args.write_readme:
            tables = self.tables(args.record)
            if args.table:
                print(next(iter(tables.values())))
            for place, table in tables.items() if args.write_readme else ():
                page, name = place.split()
                write_between_markers(ROOT / page, name, table)
            return 0
        is_glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
        is_tuned = describe_malloc()["mode"] == "tuned"
        if argv is None and is_glibc and not is_tuned:
            command = [sys.executable, *sys.orig_argv[1:]]
            os.execve(sys.executable, command, {**os.environ, **TUNED_MALLOC})
        print(f"{self.name}: measures {self.announce(args)}", flush=True)
        return self.measure(args)


def describe_malloc() -> dict[str, Any]:
    set_now = {name: os.environ[name] for name in TUNED_MALLOC if name in os.environ}
    return {"mode": "tuned" if set_now == TUNED_MALLOC else "default", "environment": set_now}
