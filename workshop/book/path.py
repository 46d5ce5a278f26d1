"""How much of this repository is on the way:
`python -m workshop.path`.

    loaded   the modules of ours that `LLM()` imports, with its default configuration
    run      the lines of ours that `LLM()` and a default `generate` of one prompt run: each line
             once, however often; and the total length of the functions that contain them

Empty modules, tests and demos are not counted. The first two are measured in a separate process, so
that no module is loaded before `LLM`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MEASURE = """
import inspect, json, sys
from pathlib import Path

root = Path(sys.argv[1])
ran = set()
codes = set()

def local(frame, event, arg):
    if event == "line":
        ran.add((frame.f_code.co_filename, frame.f_lineno))
    return local

def trace(frame, event, arg):
    if frame.f_code.co_filename not in ours:
        return None
    codes.add(frame.f_code)
    return local

def lines_of_functions():
    spans = set()
    for code in codes:
        if not code.co_name.startswith("<"):  # a comprehension stands in its function
            source, first = inspect.getsourcelines(code)
            spans.update((code.co_filename, first + i) for i in range(len(source)))
    return len(spans)

def modules():
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {f for f in files if f and Path(f).is_relative_to(root) and "site-packages" not in f}

from common.llm import LLM
LLM()
loaded = modules()
ours = loaded
sys.settrace(trace)
llm = LLM()
num_made = len(ran)
ran.clear(), codes.clear()
llm.generate("def f(x):", use_tqdm=False)
sys.settrace(None)
num_lines = lines_of_functions()
print(json.dumps({"loaded": sorted(loaded), "counts": [num_made, len(ran), num_lines]}))
"""


@dataclass(frozen=True, slots=True)
class DefaultPath:
    """The modules that a default `LLM()` loads, and the lines that `LLM()` and `generate` run."""

    loaded: list[str]  # paths within the repository
    num_lines: int  # in them
    num_lines_made: int
    num_lines_run: int
    num_lines_of_functions: int  # of those that `generate` runs, from `def` to their last line


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@cache
def measure_default(root: Path = ROOT) -> DefaultPath:
    """Measure in a separate process, without a GPU; takes seconds, once."""
    found = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(root)],
        cwd=root,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(found.stdout.splitlines()[-1])
    paths = [path for name in result["loaded"] if count_lines(path := Path(name))]
    return DefaultPath(
        [str(path.relative_to(root)) for path in paths],
        sum(map(count_lines, paths)),
        *result["counts"],
    )


def modules_in(folder: Path) -> list[Path]:
    """The modules of a folder, without its tests, demos and fixtures."""
    return [
        path
        for path in sorted(folder.glob("*.py"))
        if not path.name.startswith("test_")
        and not path.name.endswith("_demo.py")
        and path.name != "conftest.py"
    ]


def main() -> None:
    default = measure_default()
    print(f"LLM() loads        {len(default.loaded)} modules, {default.num_lines:,} lines")
    print(f"LLM() runs         {default.num_lines_made:,} lines")
    print(f"generate() runs    {default.num_lines_run:,} lines", end="")
    print(f" of functions with {default.num_lines_of_functions:,}")


if __name__ == "__main__":
    main()
