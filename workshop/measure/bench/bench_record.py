"""Records of measurements: the measured values, the machine and the version of the code.

A record is a JSON object in a `records/` folder. Text, tables and figures of the book are made from
records and from nothing else, so a record carries everything a reader needs to assess a number:
hardware, versions, commit, configuration, and every raw repeat. What a script writes into a page
stands between `<!-- table:NAME -->` and `<!-- /table:NAME -->`.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
_PACKAGES = ("torch", "triton", "transformers", "numpy", "tokenizers", "safetensors")


def percentiles(values: Sequence[float], percents: Sequence[float]) -> list[float]:
    """Return percentiles, interpolated linearly between values. Raises `ValueError` for an empty
    sequence."""
    if not len(values):
        raise ValueError("values must not be empty")
    return np.percentile(values, percents).tolist()


def describe_latency(token_times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return p50 and p99 in milliseconds, None if there are none, of the waits for a first token
    and between two. `token_times` are those of each request, in seconds after its arrival."""
    waits = {
        "ttft_ms": [times[0] for times in token_times if times],
        "inter_token_ms": [b - a for times in token_times for a, b in pairwise(times)],
    }
    return {
        name: {
            f"p{p}": round(1e3 * percentiles(seconds, [p])[0], 3) if seconds else None
            for p in (50, 99)
        }
        for name, seconds in waits.items()
    }


# -- machine and versions


def describe_environment() -> dict[str, Any]:
    """Return hardware, operating system, versions and commit. Names no path, user or host."""
    import psutil
    import torch

    from common.models.processor import is_bfloat16_fast

    return {
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "multiplies_bf16_natively": is_bfloat16_fast(),
        "cores": psutil.cpu_count(logical=False),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
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
    head = git("rev-parse", "HEAD", root=root)
    changed = git("status", "--porcelain", "--", "*.py", "*.toml", "*.safetensors", root=root)
    is_known = head is not None and changed is not None
    return {"commit": head, "is_dirty": bool(changed) if is_known else None}


def git(*arguments: str, root: Path = ROOT) -> str | None:
    """Return what git says, or None if it cannot."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(errors="replace") if info.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


# -- files


def rounded(values: Mapping[str, Any], digits: int = 4) -> dict[str, Any]:
    return {k: round(v, digits) if isinstance(v, float) else v for k, v in values.items()}


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Replace `path` by `record`, atomically. Lists of numbers have one line each.

    Raises `ValueError` for numbers that JSON lacks (NaN, infinity), and leaves the file unchanged.
    """
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    text = re.sub(r'\[\n([^\[\]{}"]*)\n *\]', lambda list: f"[{' '.join(list[1].split())}]", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text + "\n", encoding="utf-8")
    os.replace(draft, path)


def read_record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[object]], others: str = "---:"
) -> str:
    """Return a table: first column left-aligned, the others, mostly numbers, right-aligned."""
    lines = [head, ["---", *[others] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


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
