"""Records of measurements: the measured values, the machine and the version of the code.

A record is a JSON object in a `records/` folder. Text, tables and figures of the book are made from
records and from nothing else, so a record carries everything a reader needs to assess a number:
hardware, versions, commit, configuration, and every raw repeat.

    describe_environment    machine and versions
    record_head             command, time and machine
    write_record            to a file, atomically
    read_record
    percentile, percentiles
    replace_between_markers `<!-- table:NAME -->` ... `<!-- /table:NAME -->` in a markdown text
    write_between_markers   the same in a file
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
# Instructions that determine how fast a CPU multiplies matrices, as Linux names them.
CPU_FLAGS_THAT_MATTER = (
    "fma",
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "sve",
)
_PACKAGES = ("torch", "triton", "transformers", "numpy", "tokenizers", "safetensors")


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile, interpolated linearly between values. None for an empty sequence."""
    return percentiles(values, [percent])[0] if values else None


def percentiles(values: Sequence[float], percents: Sequence[float]) -> list[float]:
    """Return `percentile` for each of `percents`. Raises `ValueError` for an empty sequence."""
    if not len(values):
        raise ValueError("values must not be empty")
    return np.percentile(values, percents).tolist()


# -- machine and versions


def describe_environment() -> dict[str, Any]:
    """Return hardware, operating system, versions and commit. Names no path, user or host."""
    import psutil
    import torch

    from common.models.processor import is_bfloat16_fast

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_model(),
        "cpu_flags": _cpu_flags(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "multiplies_bf16_natively": is_bfloat16_fast(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "load_average": round(psutil.getloadavg()[0], 2),
        "os": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        **describe_commit(),
    }


def record_head(module: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return the beginning of a record: the command that made it, the time and the machine."""
    return {
        "command": shlex.join(["python", "-m", module, *argv]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "environment": describe_environment(),
    }


def describe_commit(root: Path = ROOT) -> dict[str, Any]:
    """Return `commit`, and whether modules (not records or text) differ from it (`is_dirty`).

    Both are None where there is no repository, as for an installed wheel.
    """
    head = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--", "*.py", "*.toml", "*.safetensors")
    is_known = head is not None and changed is not None
    return {"commit": head, "is_dirty": bool(changed) if is_known else None}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_info() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(errors="replace") if path.exists() else ""


def _cpu_model() -> str:
    found = re.search(r"^model name\s*: (.*)$", _cpu_info(), re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _cpu_flags() -> list[str]:
    found = re.search(r"^(?:flags|Features)\s*: (.*)$", _cpu_info(), re.MULTILINE)
    present = set(found.group(1).split()) if found else set()
    return [flag for flag in CPU_FLAGS_THAT_MATTER if flag in present]


# -- files


def rounded(values: Mapping[str, Any], digits: int = 4) -> dict[str, Any]:
    return {k: round(v, digits) if isinstance(v, float) else v for k, v in values.items()}


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Replace `path` by `record`, atomically: a reader sees the old record or the new one.

    Raises `ValueError` for numbers that JSON lacks (NaN, infinity), and leaves the file unchanged.
    """
    text = format_record(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def format_record(record: dict[str, Any]) -> str:
    """Indented JSON with each list of plain values on one line: raw repeats stay readable."""
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    string, plain = r'"(?:[^"\\]|\\.)*"', r"[-\w.+]+"
    item = f"(?:{string}|{plain})"
    one_line = re.compile(rf"({string})|\[\s+({item}(?:,\s+{item})*)\s+\]")

    def join(match: re.Match[str]) -> str:
        if match.group(1) is not None:
            return match.group(1)  # a string, not a list: keep its content
        return f"[{', '.join(re.findall(item, match.group(2)))}]"

    return one_line.sub(join, text) + "\n"


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[object]], others: str = "---:"
) -> str:
    """Return a table: first column left-aligned, the others, mostly numbers, right-aligned."""
    lines = [head, ["---", *[others] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def table_of(rows: Sequence[Mapping[str, object]]) -> str:
    """Return a table of rows that map heading to cell; the first row's keys are the head."""
    head = list(rows[0])
    return markdown_table(head, [[row[name] for name in head] for row in rows])


def replace_between_markers(text: str, name: str, content: str) -> str:
    """Return `text` with `content` between the markers of table `name`.

    Raises `ValueError` unless both markers are there exactly once and in order."""
    start, end = f"<!-- table:{name} -->", f"<!-- /table:{name} -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"markers {start} and {end} must each appear once, in this order")
    before, _, rest = text.partition(start)
    after = rest.partition(end)[2]
    return f"{before}{start}\n{content.strip()}\n{end}{after}"


def write_between_markers(page: Path, name: str, content: str) -> None:
    text = replace_between_markers(page.read_text(encoding="utf-8"), name, content)
    page.write_text(text, encoding="utf-8")


def made_on(record: dict[str, Any]) -> str:
    """Return the line under a chapter's table: its command, commit and machine."""
    where = record["environment"]
    dirty = " with uncommitted changes," if where["is_dirty"] else ""
    load = where["load_average"]
    is_timed = "clock" in record["config"]
    busy = " Other programs were running: the times are rough." if load > 1 and is_timed else ""
    return (
        f"Made by `{record['command']}` at commit `{(where['commit'] or 'unknown')[:10]}`{dirty} "
        f"on {where['cpu']}, {where['cores']} cores, Python {where['python']}, torch "
        f"{where['torch']}, load average {load:.1f} at the start.{busy}"
    )
