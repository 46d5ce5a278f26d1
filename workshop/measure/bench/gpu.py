"""`make gpu ARGS=look`: a check of this code on this machine's GPU, in minutes.

    look        what breaks, which numbers are wrong, where the time goes
    record      the tests of the kernels, then the record that README's table is made from
    tune        decode attention with other tiles, stages and splits
    rehearse    every part of the three on a CPU, tiny and interpreted; the times mean nothing

Each part is a process with a separate time limit, so an error of the device or a hang ends one part
only. The record, written after every step of a part, is in `build/gpu` (`$OUT/gpu` if OUT is set)
with the output of the parts; a copy goes to `records/`. The exit status is 1 if a part failed.
No network, `.venv` or `.git` is needed. This process imports no torch, which would take memory."""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from workshop.measure.bench.bench_record import ROOT, describe_commit, read_record, write_record

HERE, RECORDS = "workshop.measure.bench", Path(__file__).parent / "records"
PARTS = {  # the functions that each calls
    "here": "gpu_lab.describe_here",
    "prewarm": "gpu_kernels.prewarm",
    "tests": "gpu_kernels.run_tests",
    "right": "gpu_engine.check_tokens",
    "engine": "gpu_engine.time_engine",
    "profile": "gpu_engine.profile",
    "tune": "gpu_kernels.tune",
}
COMMANDS = {  # seconds of each part, process start included
    "look": {"here": 20, "prewarm": 45, "right": 70, "tests": 45, "engine": 65, "profile": 45},
    "record": {"here": 15, "prewarm": 40, "tests": 60, "right": 60, "engine": 95, "profile": 45},
    "tune": {"here": 15, "tune": 90},
    "rehearse": dict.fromkeys(PARTS, 900),
}
NEEDED = "torch triton numpy transformers tokenizers safetensors psutil sortedcontainers msgpack"
NEEDED_BY_TESTS = "pytest hypothesis pytest_timeout xdist scipy"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    how = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser("make gpu", description=__doc__, formatter_class=how)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--commit", help="of this code, in 40 digits, where there is no .git")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="no copy goes to records/")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="of all inputs")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # this process runs one part
    args = parser.parse_args(argv)
    args.plan, args.is_rehearsal = COMMANDS[args.command], args.command == "rehearse"
    wanted = ["here", *(args.only or PARTS)]
    args.plan = {name: limit_s for name, limit_s in args.plan.items() if name in wanted}
    folder = Path(os.environ.get("OUT") or ROOT / "build")
    args.out = folder / ("gpu-rehearsal" if args.is_rehearsal else "gpu")
    args.record = args.out / f"{args.command}.json"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.part:
        return run_here(args)
    try:
        commit = checked_commit(args)
    except (RuntimeError, ValueError) as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 1
    record: dict[str, Any] = {"command": f"make gpu ARGS={args.command}", "seed": args.seed}
    record |= {"date": time.strftime("%Y-%m-%d", time.gmtime()), "is_rehearsal": args.is_rehearsal}
    write_record(args.record, record | {"environment": commit, "parts": {}})
    for name in args.plan:
        record = run_part(args, name)
        device = record["environment"].get("device", {}).get("name")
        if device is None:
            return 1  # `here` has printed the reason
        if not args.is_rehearsal and not args.only:
            slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
            write_record(RECORDS / f"gpu_{args.command}_{slug}.json", record)
    from workshop.measure.bench.gpu_table import render

    print(f"\n{render(record)}")
    return int(any(part["errors"] for part in record["parts"].values()))


def checked_commit(args: argparse.Namespace, root: Path = ROOT) -> dict[str, Any]:
    """Return the record's `commit` and `is_dirty`. Raises `RuntimeError` if a package is missing,
    and `ValueError` if this code is not `--commit`."""
    names = f"{NEEDED} {NEEDED_BY_TESTS if 'tests' in args.plan else ''}".split()
    if missing := [name for name in names if find_spec(name) is None]:
        raise RuntimeError(f"{sys.executable} lacks {', '.join(missing)}. Install what is missing "
                           "(pip install -e '.[test]', with the PyTorch of your GPU), or name "
                           "another Python: make gpu PYTHON=.venv/bin/python")  # fmt: skip
    found, given = describe_commit(root), args.commit
    if given is None:
        return found
    if not re.fullmatch(r"[0-9a-f]{40}", given):
        raise ValueError(f"`--commit` must be 40 hexadecimal digits, got {given!r}")
    if found["commit"] not in (None, given):
        raise ValueError(f"`--commit` must be {found['commit']}, which is checked out, got {given}")
    if found["is_dirty"]:
        raise ValueError("cannot record `--commit`: modules differ from it. Commit them first")
    return {"commit": given, "is_dirty": False}


def environment_of(part: str, is_rehearsal: bool) -> dict[str, str]:
    """Return a part's environment variables. Triton reads at import whether to interpret kernels;
    those of a rehearsal's `prewarm` are compiled, for a GPU that is not there."""
    rooms = sorted([*ROOT.glob("[0-9][0-9]_*"), *ROOT.glob("[0-9][0-9]_*/beyond")])
    paths = [str(ROOT), *map(str, rooms), os.environ.get("PYTHONPATH", "")]
    cache = os.environ.get("TRITON_CACHE_DIR") or f"{tempfile.gettempdir()}/triton-of-make-gpu"
    return {
        **os.environ,
        **{"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TRITON_CACHE_DIR": cache},
        **{"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"},
        "TRITON_INTERPRET": "1" if is_rehearsal and part != "prewarm" else "0",
    }


def run_part(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Run a part in a new process. Returns the record after it."""
    limit_s, log, start = args.plan[name], args.out / f"{name}.log", time.monotonic()
    print(f"## {name}, at most {limit_s} s, {time.strftime('%T')}", flush=True)
    command = [sys.executable, "-m", f"{HERE}.gpu", args.command, "--part", name]
    how: dict[str, Any] = {"cwd": ROOT, "env": environment_of(name, args.is_rehearsal)}
    with log.open("wb") as out:
        how |= {"stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen([*command, "--seed", f"{args.seed}"], **how)
        try:
            ended = f"it ended with status {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            ended = f"it was ended after {limit_s} s"
        finally:
            with suppress(ProcessLookupError):  # with the processes it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    record, lines = read_record(args.record), log.read_text(errors="replace").splitlines()
    part = record["parts"].setdefault(name, {"errors": [], "notes": [], "results": {}})
    if not part.pop("is_over", False):
        part["errors"].append(f"{ended}: {' / '.join(lines[-4:])[-600:]}")
    part |= {"seconds": round(time.monotonic() - start, 1), "limit_s": limit_s}
    write_record(args.record, record)
    print(*(line[:170] for line in lines if line.startswith("--")), sep="\n")
    print(*(f"   !! {error[:400]}" for error in part["errors"]), sep="\n", flush=True)
    return record


def run_here(args: argparse.Namespace) -> int:
    """Run a part in this process, which gets some seconds to end by itself."""
    from workshop.measure.bench.gpu_lab import Lab, Part

    limit_s, start = args.plan[args.part], time.monotonic()
    faulthandler.dump_traceback_later(limit_s - 3, exit=True)
    part = Part(args.part, args.record, start + 0.9 * limit_s - 4)
    module, _, function = PARTS[args.part].partition(".")
    try:
        lab = Lab.of(args.is_rehearsal, args.seed)
        getattr(import_module(f"{HERE}.{module}"), function)(lab, part)
    except Exception as error:
        part.fail("the part", error)
    part.is_over = True
    part.keep()
    return int(bool(part.errors))


if __name__ == "__main__":
    sys.exit(main())
