"""One command on any CUDA machine: the GPU report.

    python -m common.workshop.gpu_report                 measure, write the record, print the report
    python -m common.workshop.gpu_report --rehearse      the same on a CPU, tiny; measures nothing
    python -m common.workshop.gpu_report --sections A,B  only these, in place of the record's
    python -m common.workshop.gpu_report --table         print the report of the records there are
    python -m common.workshop.gpu_report --write-readme  put it into common/workshop/bench/README.md

It takes less than eight minutes: sections have shares of `--budget` and are cut where they exceed
them, and at the end of all patience the process ends itself. The record, in `records/` and named
after the GPU, is written after each section. The exit status is 1 if a section failed.

This file imports nothing heavy at its top: Triton decides when it is imported whether it compiles
or interprets."""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.workshop.bench.bench_record import (
    ROOT,
    read_record,
    record_head,
    write_between_markers,
    write_record,
)
from common.workshop.bench.gpu_table import readme_text, render

RECORDS = ROOT / "common" / "workshop" / "bench" / "records"
REHEARSAL = ROOT / "build" / "gpu-report-rehearsal.json"
PAGE = ROOT / "common" / "workshop" / "bench" / "README.md"
BUDGET_S = 430.0
PATIENCE_S = 40.0  # beyond the budget: then whatever hangs is ended


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m common.workshop.gpu_report", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--rehearse", action="store_true", help="on a CPU, tiny: does every line of it run?")
    add("--sections", type=lambda text: text.split(","), help="only these, separated by commas")
    add("--budget", type=float, default=BUDGET_S, help=f"seconds (default {BUDGET_S:g})")
    add("--seed", type=int, help="of all inputs (default: another in each run)")
    add("--record", type=Path, help="where the record is (default: records/, named by the GPU)")
    add("--table", action="store_true", help="only print the report of the records")
    add("--write-readme", action="store_true", help="only write it into the page of the benches")
    add("--page", type=Path, default=PAGE, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.argv = list(argv)
    if args.budget <= 0:
        parser.error(f"--budget is {args.budget}: it must be > 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        if args.table or args.write_readme:
            return show(args)
        choose_interpreter(args.rehearse)
        return measure(args)
    except (ImportError, RuntimeError, ValueError, FileNotFoundError) as error:
        print(f"gpu_report: {error}", file=sys.stderr)
        return 1


def show(args: argparse.Namespace) -> int:
    """Records that are there."""
    paths = [args.record] if args.record else sorted(RECORDS.glob("gpu_report_*.json"))
    records = [read_record(path) for path in paths]
    if args.table:
        print("\n\n".join(map(render, records)) or readme_text([]))
    if args.write_readme:
        write_between_markers(args.page, "gpu", readme_text(records))
    return 0


# -- measuring


def choose_interpreter(is_rehearsal: bool) -> None:
    """Raises `RuntimeError` if Triton has been imported and decided otherwise."""
    if not is_rehearsal:
        if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
            raise RuntimeError(
                "TRITON_INTERPRET is set: kernels would not run on the GPU; unset it"
            )
        return
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("a rehearsal interprets kernels, and Triton is imported already")
    os.environ["TRITON_INTERPRET"] = "1"


def record_path(args: argparse.Namespace, device_name: str) -> Path:
    """Raises `ValueError` where a rehearsal's record would lie among results."""
    if args.rehearse:
        path = args.record or REHEARSAL
        if path.resolve().parent == RECORDS.resolve():
            raise ValueError(f"--record is {path.name} among the results: a rehearsal is none")
        return path
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return args.record or RECORDS / f"gpu_report_{slug}.json"


def new_record(args: argparse.Namespace, device: dict[str, Any]) -> dict[str, Any]:
    head = record_head("common.workshop.gpu_report", args.argv)
    return {
        **head,
        "is_rehearsal": args.rehearse,
        "environment": head["environment"] | {"device": device},
        "config": {
            "seed": secrets.randbits(31) if args.seed is None else args.seed,
            "budget_s": args.budget,
            "dtype": "bfloat16",
            "model": "Qwen3-0.6B's shape, random weights",
        },
        "sections": {},
    }


def sections_of_now(old: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Those of `old`. Raises `ValueError` if they were measured elsewhere, or with other code."""
    for name in set(old["environment"]) - {"load_average"}:
        was, now = old["environment"][name], record["environment"].get(name)
        if was != now:
            raise ValueError(f"--sections: the record's {name} is {was!r}, and now it is {now!r}")
    return old["sections"]


def measure(args: argparse.Namespace) -> int:
    from common.collector import spare_what_is_loaded
    from common.workshop.bench import gpu_inputs
    from common.workshop.bench.gpu_budget import run_sections
    from common.workshop.bench.gpu_device import describe_device, open_device
    from common.workshop.bench.gpu_sections import plan_sections

    device = open_device(args.rehearse)
    described = describe_device(device)
    path = record_path(args, described["name"])
    record = new_record(args, described)
    if args.sections and path.exists():
        record["sections"] = sections_of_now(read_record(path), record)
    sizes = gpu_inputs.REHEARSAL if args.rehearse else gpu_inputs.FULL
    lab = gpu_inputs.Lab(device, sizes, record["config"]["seed"], record["sections"])
    plan = plan_sections(lab)
    if unknown := set(args.sections or ()) - set(plan):
        raise ValueError(f"--sections has {unknown.pop()!r}: there are {', '.join(plan)}")
    plan = {name: plan[name] for name in plan if not args.sections or name in args.sections}
    if not args.rehearse:
        spare_what_is_loaded()
    print(f"gpu_report: {path.name}, at most {args.budget + PATIENCE_S:.0f} s", flush=True)
    patience_s = args.budget + PATIENCE_S
    faulthandler.dump_traceback_later(patience_s, exit=True, file=sys.__stderr__ or 2)
    try:
        run_sections(plan, record, lambda: write_record(path, record), args.budget)
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(f"\n{render(record)}")
    return int(any(record["sections"][name]["status"] == "failed" for name in plan))
