"""One command on any CUDA machine: the GPU report.

    python -m common.workshop.gpu_report                 measure, write the record, print the report
    python -m common.workshop.gpu_report --rehearse      the same on a CPU, tiny; measures nothing
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
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.workshop.bench.bench_record import (
    ROOT,
    describe_environment,
    read_record,
    replace_between_markers,
    write_record,
)
from common.workshop.bench.gpu_table import readme_text, render

if TYPE_CHECKING:
    from common.workshop.bench.gpu_device import Device

RECORDS = ROOT / "common" / "workshop" / "bench" / "records"
REHEARSAL = ROOT / "build" / "gpu-report-rehearsal.json"
PAGE = ROOT / "common" / "workshop" / "bench" / "README.md"
BUDGET_S = 430.0
PATIENCE_S = 40.0  # beyond the budget: then whatever hangs is ended
LEAST_TORCH, LEAST_TRITON = (2, 11), (3, 6)
MOST_RESTARTS = 4
Restart = Callable[[Sequence[str]], Any]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m common.workshop.gpu_report", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--rehearse", action="store_true", help="on a CPU, tiny: does every line of it run?")
    add("--budget", type=float, metavar="SECONDS", help=f"of all sections (default {BUDGET_S:g})")
    add("--seed", type=int, help="of all inputs (default: another in each run)")
    add("--record", type=Path, help="where the record is (default: records/, named by the GPU)")
    add("--commit", help="what is measured, where there is no repository to ask")
    add("--table", action="store_true", help="only print the report of the records")
    add(
        "--write-readme",
        action="store_true",
        help="only write it into common/workshop/bench/README.md",
    )
    add("--page", type=Path, default=PAGE, help=argparse.SUPPRESS)
    add("--resume", action="store_true", help="measure what the record of --record does not have")
    args = parser.parse_args(argv)
    args.argv = [one for one in argv if one != "--resume"]
    if args.budget is not None and args.budget <= 0:
        parser.error(f"--budget is {args.budget}: it must be > 0")
    if args.resume and args.record is None:
        parser.error("--resume needs --record")
    return args


def main(argv: Sequence[str] | None = None, restart: Restart | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        if args.table or args.write_readme:
            return show(args)
        choose_interpreter(args.rehearse)
        return measure(args, restart or start_again)
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        print(f"gpu_report: {error}", file=sys.stderr)
        return 1


# -- of records that are there


def show(args: argparse.Namespace) -> int:
    paths = [args.record] if args.record else sorted(RECORDS.glob("gpu_report_*.json"))
    records = [read_record(path) for path in paths]
    if args.table:
        print("\n\n".join(map(render, records)) or readme_text([]))
    if args.write_readme:
        text = args.page.read_text(encoding="utf-8")
        text = replace_between_markers(text, "gpu", readme_text(records))
        args.page.write_text(text, encoding="utf-8")
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


def check_versions() -> dict[str, str]:
    """Raises `RuntimeError` for what the report was not written for."""
    import torch

    try:
        import triton
    except ImportError as error:
        raise RuntimeError("the kernels need Triton: run `pip install triton`") from error
    found = {"torch": torch.__version__, "triton": triton.__version__}
    for name, least in (("torch", LEAST_TORCH), ("triton", LEAST_TRITON)):
        if version_of(found[name]) < least:
            raise RuntimeError(
                f"{name} is {found[name]}: the report needs {'.'.join(map(str, least))} or newer"
            )
    return found


def version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def record_path(args: argparse.Namespace, device_name: str) -> Path:
    """Raises `ValueError` where a rehearsal's record would lie among results."""
    if args.rehearse:
        path = args.record or REHEARSAL
        if path.resolve().parent == RECORDS.resolve():
            raise ValueError(f"--record is {path.name} among the results: a rehearsal is none")
        return path
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return args.record or RECORDS / f"gpu_report_{slug}.json"


def new_record(args: argparse.Namespace, device: Device, triton: str) -> dict[str, Any]:
    from common.workshop.bench.gpu_inputs import BLOCK_SIZE

    environment = describe_environment()
    if environment["commit"] is None and args.commit is not None:
        environment |= {"commit": args.commit, "is_dirty": False}
    seed = secrets.randbits(31) if args.seed is None else args.seed
    budget_s = args.budget or BUDGET_S
    return {
        "command": shlex.join(["python", "-m", "common.workshop.gpu_report", *args.argv]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "is_rehearsal": device.is_rehearsal,
        "num_restarts": 0,
        "environment": environment | {"triton": triton, "device": device.describe()},
        "config": {
            "seed": seed,
            "budget_s": budget_s,
            "dtype": "bfloat16",
            "model": "Qwen3-0.6B's shape, random weights",
            "block_size": BLOCK_SIZE,
        },
        "sections": {},
    }


def make_device(is_rehearsal: bool) -> Device:
    from common.workshop.bench.gpu_device import CudaDevice, RehearsedDevice

    return RehearsedDevice() if is_rehearsal else CudaDevice()


def measure(args: argparse.Namespace, restart: Restart) -> int:
    versions = check_versions()
    from common.workshop.bench import gpu_inputs
    from common.workshop.bench.gpu_budget import DeviceLostError, has_failed, run_sections
    from common.workshop.bench.gpu_inputs import Lab
    from common.workshop.bench.gpu_sections import plan_sections, restore

    device = make_device(args.rehearse)
    if args.resume:
        path, record = args.record, read_record(args.record)
        record["num_restarts"] += 1
    else:
        record = new_record(args, device, versions["triton"])
        path = record_path(args, record["environment"]["device"]["name"])
    sizes = gpu_inputs.REHEARSAL if args.rehearse else gpu_inputs.FULL
    lab = Lab(device, sizes, record["config"]["seed"])
    restore(lab, record)
    sections = plan_sections(lab)
    total_s = record["config"]["budget_s"]
    spent_s = sum(section["seconds"] for section in record["sections"].values())
    print(f"gpu_report: {path.name}, at most {total_s + PATIENCE_S:.0f} s", flush=True)
    patience_s = max(1.0, total_s + PATIENCE_S - spent_s)
    faulthandler.dump_traceback_later(patience_s, exit=True, file=sys.__stderr__ or 2)

    def write(now: dict[str, Any]) -> None:
        write_record(path, now)
        name, section = list(now["sections"].items())[-1]
        if section["status"] != "running":
            print(f"  {name}: {section['status']}, {section['seconds']:.1f} s", flush=True)

    try:
        run_sections(sections, record, device, write, time.monotonic() - spent_s, total_s)
    except DeviceLostError:
        if record["num_restarts"] >= MOST_RESTARTS:
            raise RuntimeError("the device is lost again and again; see the record") from None
        print("gpu_report: the device is lost in this process; another one goes on", flush=True)
        named = [] if args.record else ["--record", str(path)]
        return restart([*args.argv, *named, "--resume"])
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(f"\n{render(record)}")
    return int(has_failed(record, sections))


def start_again(argv: Sequence[str]) -> int:
    """In this process's place."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "common.workshop.gpu_report", *argv])
