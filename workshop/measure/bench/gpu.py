"""`make gpu ARGS=look`: a check of this code on this machine's GPU, in minutes.

    look        greedy tokens beside transformers, speed
    record      the tests of the kernels too, then the record that the pages' table is made from
    rehearse    the same on a CPU, tiny and interpreted; the times mean nothing

Each part is a process with its own time limit, so an error of the device ends one part only. Record
and output of the parts are in `build/gpu` (`$OUT/gpu` if OUT is set); a copy of the record goes to
`records/`. The exit status is 1 if a part failed. No network, `.venv` or `.git` is needed."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from workshop.measure.bench.bench_record import (
    ROOT,
    describe_commit,
    describe_environment,
    markdown_table,
    read_record,
    write_between_markers,
    write_record,
)

RECORDS = Path(__file__).parent / "records"
LIMITS = {"tokens": 120, "speed": 120}  # seconds, process start included
COMMANDS = {"look": LIMITS, "record": {"tests": 120} | LIMITS}
COMMANDS["rehearse"] = dict.fromkeys(COMMANDS["record"], 900)
NEEDED = "torch triton numpy transformers tokenizers safetensors psutil sortedcontainers msgpack"
NEEDED_BY_TESTS = "pytest hypothesis pytest_timeout xdist scipy"
TESTS = (  # of kernels: those marked `gpu`
    "02_paged_kv/beyond/test_paged_attention_triton.py",
    "common/models/regions/test_regions.py",
    "05_spec_decode/beyond/test_rejection_sampler_triton.py",
    "common/runner/test_graphs.py",
    "common/models/test_model.py",
)
Record = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    how = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser("make gpu", description=__doc__, formatter_class=how)
    parser.add_argument("command", choices=[*COMMANDS, "pages"], help="pages: renew their tables")
    parser.add_argument("--commit", help="of this code, in 40 digits, where there is no .git")
    parser.add_argument("--only", nargs="+", choices=COMMANDS["record"], help="kept in build/")
    args = parser.parse_args(argv)
    if args.command == "pages":
        texts = texts_of([read_record(path) for path in sorted(RECORDS.glob("gpu_record_*.json"))])
        for page, name in PAGES.items():
            write_between_markers(ROOT / page, name, texts[name])
        return 0
    is_rehearsal = args.command == "rehearse"
    out = Path(os.environ.get("OUT") or ROOT / "build") / f"gpu{'-rehearsal' * is_rehearsal}"
    limits = COMMANDS[args.command]
    parts = [part for part in limits if part in (args.only or limits)]
    try:
        environment = describe_here(parts, args.commit, is_rehearsal)
    except (RuntimeError, ValueError) as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 1
    record: dict[str, Any] = {
        "command": f"make gpu ARGS={args.command}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "is_rehearsal": is_rehearsal,
        "environment": environment,
        "parts": {},
    }
    for part in parts:
        record["parts"][part] = run_part(part, out, limits[part], is_rehearsal)
        write_record(out / f"{args.command}.json", record)
    if not is_rehearsal and not args.only:
        slug = re.sub(r"[^a-z0-9]+", "-", environment["device"].lower()).strip("-")
        write_record(RECORDS / f"gpu_{args.command}_{slug}.json", record)
    print(f"\n{render(record)}")
    return int(any(part["errors"] for part in record["parts"].values()))


def describe_here(parts: list[str], commit: str | None, is_rehearsal: bool) -> dict[str, Any]:
    """Raises `RuntimeError` if a package or the device is missing, `ValueError` for a wrong
    `commit`."""
    names = f"{NEEDED} {NEEDED_BY_TESTS if 'tests' in parts else ''}".split()
    if missing := [name for name in names if find_spec(name) is None]:
        raise RuntimeError(f"{sys.executable} lacks {', '.join(missing)}. Install what is missing "
                           "(pip install -e '.[test]', with the PyTorch of your GPU), or name "
                           "another Python: make gpu PYTHON=.venv/bin/python")  # fmt: skip
    found = describe_environment() | checked_commit(commit)
    if not found["gpus"] and not is_rehearsal:
        raise RuntimeError(
            f"torch {found['torch']} finds no CUDA device; run this where there is one, or try it "
            "here: make gpu ARGS=rehearse"
        )
    return found | {"device": "rehearsal" if is_rehearsal else found["gpus"][0]}


def checked_commit(given: str | None, root: Path = ROOT) -> dict[str, Any]:
    """Return the record's `commit` and `is_dirty`. Raises `ValueError` if this code is not
    `given`."""
    found = describe_commit(root)
    if given is None:
        return found
    if not re.fullmatch(r"[0-9a-f]{40}", given):
        raise ValueError(f"`--commit` must be 40 hexadecimal digits, got {given!r}")
    if found["commit"] not in (None, given):
        raise ValueError(f"`--commit` must be {found['commit']}, which is checked out, got {given}")
    if found["is_dirty"]:
        raise ValueError("cannot record `--commit`: modules differ from it. Commit them first")
    return {"commit": given, "is_dirty": False}


# -- a part


def command_of(part: str, result: Path, is_rehearsal: bool) -> list[str]:
    if part == "tests":
        how = "--collect-only" if is_rehearsal else "-n 10 --timeout 100 --tb=short --maxfail 40"
        return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *how.split(), *TESTS]
    size = "rehearsal" if is_rehearsal else "full"
    return [sys.executable, "-m", "workshop.measure.bench.gpu_work", part, size, str(result)]


def environment_of(is_rehearsal: bool) -> dict[str, str]:
    """Triton reads at import whether to interpret kernels."""
    rooms = sorted([*ROOT.glob("[0-9][0-9]_*"), *ROOT.glob("[0-9][0-9]_*/beyond")])
    paths = [str(ROOT), *map(str, rooms), os.environ.get("PYTHONPATH", "")]
    cache = os.environ.get("TRITON_CACHE_DIR") or f"{tempfile.gettempdir()}/triton-of-make-gpu"
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TRITON_CACHE_DIR": cache,
        "TRITON_INTERPRET": str(int(is_rehearsal)),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def run_part(part: str, out: Path, limit_s: float, is_rehearsal: bool) -> dict[str, Any]:
    """Run a part in a new process. Returns its results and errors."""
    print(f"## {part}, at most {limit_s} s", flush=True)
    result, log, start = out / f"{part}.json", out / f"{part}.log", time.monotonic()
    write_record(result, {"results": {}, "errors": []})
    with log.open("wb") as output:
        process = subprocess.Popen(
            command_of(part, result, is_rehearsal),
            cwd=ROOT,
            env=environment_of(is_rehearsal),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
            ended = f"it ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            ended = f"it was ended after {limit_s} s"
        finally:
            with suppress(ProcessLookupError):  # with the processes it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = read_record(result)
    lines = log.read_text(errors="replace").splitlines()
    if ended:
        found["errors"].append(f"{ended}: {' / '.join(lines[-4:])[-600:]}")
    elif part == "tests":
        found["results"]["pytest"] = lines[-1].strip("= ")
    print(*(f"   !! {error}" for error in found["errors"]), sep="\n", end="", flush=True)
    return found | {"seconds": round(time.monotonic() - start, 1)}


# -- the table

NOTHING = (
    "No GPU has been measured yet. On a CPU, tests check the kernels in Triton's interpreter and "
    "the graphs in an emulator."
)
NOTHING_ZH = (
    "还没有在 GPU 上测过。测试在 CPU 上用 Triton 的解释器核对 kernel，用模拟器核对 CUDA graph。"
)
PAGES = {"README.md": "gpu", "06_chunked_prefill/README.md": "gpu"}
PAGES |= {"README.zh.md": "gpu_zh", "06_chunked_prefill/README.zh.md": "gpu_zh"}
PAGES |= {"common/README.md": "gpu_cells", "common/README.zh.md": "gpu_cells_zh"}


def render(record: Record) -> str:
    """Return the record as a table, a row for each thing that was compared or timed."""
    title = f"**{record['environment']['device']}**"
    if record["is_rehearsal"]:
        title = "**A rehearsal on a CPU: these numbers say nothing**"
    rows = [
        [part, name, spoken(found)]
        for part, one in record["parts"].items()
        for name, found in [*one["results"].items(), *(("error", e) for e in one["errors"])]
    ]
    where = record["environment"]
    versions = ", ".join(f"{name} {where.get(name)}" for name in ("torch", "triton", "python"))
    commit = (where["commit"] or "unknown")[:10] + " and changes" * bool(where["is_dirty"])
    how = f"`{record['command']}`, {record['date']}, commit {commit}, {versions}"
    table = markdown_table(["part", "what", "found"], rows, "---")
    return f"{title}\n\n{table}\n\n<sub>{how}. Medians; Qwen3-0.6B's shape, bfloat16.</sub>"


def spoken(found: object) -> str:
    if isinstance(found, Mapping):
        return ", ".join(f"{name} {value:,.4g}" for name, value in found.items())
    return str(found).replace("|", "/")


def texts_of(records: Sequence[Record]) -> dict[str, str]:
    """Return the text for each marker. Raises `ValueError` for a record that is not of a clean,
    known commit on a GPU."""
    english, chinese, fastest = NOTHING, NOTHING_ZH, 0.0
    for record in records:
        where = record["environment"]
        if record["is_rehearsal"] or where["is_dirty"] or where["commit"] is None:
            raise ValueError(
                f"cannot publish the record of {where['device']}: it is a rehearsal or of no known "
                "commit. Measure a clean checkout, or name the commit: --commit"
            )
        for name, found in record["parts"]["speed"]["results"].items():
            if found.get("tokens out/s", 0) > fastest:
                fastest = found["tokens out/s"]
                how = f"({name}; `{record['command']}`)"
                english = f"{fastest:,.0f} output tokens a second on {where['device']} with "
                english += f"Qwen3-0.6B's shape {how}."
                chinese = f"在 {where['device']} 上，Qwen3-0.6B 的形状每秒输出 {fastest:,.0f} 个 "
                chinese += f"token {how}。"
    tables = "\n\n".join(map(render, records))
    return {"gpu": english, "gpu_zh": chinese, "gpu_cells": tables or english,
            "gpu_cells_zh": tables or chinese}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
