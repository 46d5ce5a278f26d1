"""Every record that a page shows: its command, its minutes, and its age. `make records`.

    python -m workshop.records             measure again what is old, three hours at most
    python -m workshop.records --list      only list them

A record's age is the number of commits that have changed what it measures since its own. A record
without such a commit is kept, so an interrupted run goes on where it was. Records with vLLM, a real
model or a GPU have no minutes: they stay as they are and grow old. `make sync`
then writes the tables, and the site says the age of each number (`with_ages`)."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workshop.measure.bench.bench_record import ROOT, describe_commit, git, read_record

MAX_MINUTES = 180
COMMIT = re.compile(r"commit `?([0-9a-f]{7,40})")
WORDS = {  # English, and Chinese; None: this is no complete clone
    False: " {} commits have changed what it measures since.",
    True: "此后有 {} 次提交改过它所测的文件。",
}
CHAPTERS = "0*/*.py"


@dataclass(frozen=True, slots=True)
class Row:
    record: str  # in this folder
    command: str  # `python -m workshop.COMMAND`, as pages name it
    minutes: int  # about, on two cores; 0: is not measured here
    files: str  # what it measures: patterns of git, without tests


ROWS = (
    Row("records/batching", "plot_batching --record batching", 10, "01_batching/*.py"),
    Row("records/paged_kv", "plot_paged_kv --record paged_kv", 2, "02_paged_kv/*.py"),
    Row("records/prefix_cache_engine", "plot_prefix_cache --record engine", 15, CHAPTERS),
    Row("records/scheduler_fit", "plot_scheduler --record fit", 3, CHAPTERS),
    Row("records/scheduler_lab", "plot_scheduler --record lab", 10, "04_scheduler/**/*.py"),
    Row("records/scheduler_memory", "plot_scheduler --record memory", 1, "04_scheduler/*.py"),
    Row("records/spec_decode_engine", "plot_spec_decode --record engine", 40, CHAPTERS),
    Row("records/chunked_prefill_stall", "plot_chunked_prefill --record stall", 5, CHAPTERS),
    Row("records/chunked_prefill_sweep", "plot_chunked_prefill --record sweep", 6, CHAPTERS),
    Row("bench/records/ladder", "ladder", 15, CHAPTERS),
    Row(
        "bench/records/bench_tiny",
        "bench --models tiny --repeats 3 --time-budget 300",
        6,
        CHAPTERS,
    ),
    Row(
        "bench/records/bench_qwen3-0.6b",
        "bench --models qwen3-0.6b --systems paged,vllm,transformers-generate,one-at-a-time "
        "--repeats 3 --time-budget 560",
        0,
        CHAPTERS,
    ),
    Row(
        "bench/records/bench_qwen3-0.6b-avx2",
        "bench --models qwen3-0.6b --systems paged,vllm --repeats 3 --time-budget 640 "
        "--dtype float32",
        0,
        CHAPTERS,
    ),
)


@cache
def age_of(commit: str, files: str) -> int | None:
    """Return how many commits have changed `files` since `commit`; None where git has not all."""
    of = [f":(glob){pattern}" for pattern in files.split()]
    aside = [f":(exclude,glob)**/{name}" for name in ("test_*.py", "conftest.py")]
    number = git("rev-list", "--count", f"{commit}..HEAD", "--", *of, *aside)
    return None if number is None else int(number)


def with_ages(text: str, is_chinese: bool = False) -> str:
    """Return a page in which each line with a record's commit and command says its age."""
    lines = text.split("\n")
    for place, line in enumerate(lines):
        found = COMMIT.search(line)
        rows = [r for r in ROWS if f"workshop.{r.command}`" in line or f"make {r.command}`" in line]
        if found is None or not rows:
            continue
        if (age := age_of(found[1], rows[0].files)) is not None:
            kept, end = line.removesuffix("</sub>"), "</sub>" * line.endswith("</sub>")
            lines[place] = f"{kept}{WORDS[is_chinese].format(f'{age:,}')}{end}"
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="measure nothing")
    is_listed = parser.parse_args(arguments).list
    if not is_listed and describe_commit()["is_dirty"]:
        sys.exit("records: modules differ from the last commit. Commit them first")
    start, status = time.monotonic(), 0
    for row in ROWS:
        record = read_record(Path(__file__).parent / f"{row.record}.json")
        commit = record["environment"]["commit"]
        age = age_of(commit, row.files)
        shown = f"{row.minutes} min" if row.minutes else "kept"
        print(f"{row.record:34}{commit[:10]:12}{age!s:>6} commits  {shown:8}{row.command}")
        if is_listed or not row.minutes or age == 0:
            continue
        if (time.monotonic() - start) / 60 + row.minutes > MAX_MINUTES:
            print("    no time is left: start the same command again")
            continue
        command = [sys.executable, "-m", *shlex.split(f"workshop.{row.command}")]
        status |= subprocess.run(command, cwd=ROOT).returncode
    if not is_listed:
        print("make sync writes the tables")
    return status


if __name__ == "__main__":
    sys.exit(main())
