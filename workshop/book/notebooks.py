"""The notebooks of the book: each is a script, `NN_*/*_demo.py`, and its executed twin.

    python -m workshop.notebooks                   execute every script and write its .ipynb
    python -m workshop.notebooks 01_batching/x_demo.py only this one
    python -m workshop.notebooks --check           say which twins are missing or out of step

The script, in jupytext's `py:percent` form, is edited; the notebook is made from it and never
edited. Meaningless differences between runs (cell ids, time stamps, memory addresses, versions) are
removed, so that running a script again changes only the results of changed code.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
TIME_BUDGET_S = 60.0
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")


def demo_scripts(root: Path = ROOT) -> list[Path]:
    found = root.glob("[0-9][0-9]_*/**/*_demo.py")
    return sorted(path for path in found if not path.name.startswith("test_"))


def read_script(script: Path) -> NotebookNode:
    """Read the script as a notebook without outputs, with fixed cell ids and metadata."""
    import jupytext

    notebook = jupytext.read(script, fmt="py:percent")
    pairing = {"formats": "ipynb,py:percent"}
    notebook.metadata = {"jupytext": pairing, "kernelspec": KERNELSPEC}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for index, cell in enumerate(notebook.cells):
        cell.id = hashlib.sha256(f"{index}\n{cell.source}".encode()).hexdigest()[:8]
    return notebook


def execute(script: Path, time_budget_s: float = TIME_BUDGET_S) -> NotebookNode:
    """Run the script's cells in a fresh kernel, in the script's folder, and return the notebook.

    Raises nbclient's `CellExecutionError` when a cell raises, and `CellTimeoutError` when the
    notebook as a whole takes longer than `time_budget_s`.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellTimeoutError

    deadline = time.monotonic() + time_budget_s
    notebook = read_script(script)
    client = NotebookClient(
        notebook,
        kernel_name=KERNELSPEC["name"],
        resources={"metadata": {"path": str(script.parent)}},
        timeout_func=lambda cell: max(1, int(deadline - time.monotonic())),
        record_timing=False,
        coalesce_streams=True,  # how output is cut into messages differs from run to run
    )
    # As in pytest, modules are found whether or not the project is installed.
    root = script.parent.parent
    rooms = [root.glob(f"[0-9][0-9]_*{room}") for room in ("", "/beyond", "/testing")]
    folders = [root, *sorted(folder for found in rooms for folder in found)]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    client.execute(env={**os.environ, "PYTHONPATH": path, "TQDM_DISABLE": "1"})
    if time.monotonic() > deadline:  # a cell gets a second at least, which was one too many
        raise CellTimeoutError(f"{script.name} took longer than {time_budget_s:g} s")
    _remove_noise(notebook)
    return notebook


def _remove_noise(notebook: NotebookNode) -> None:
    notebook.metadata = {
        **{key: notebook.metadata[key] for key in ("jupytext", "kernelspec")},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = ADDRESS.sub("at 0x...", output.text)
            if "text/plain" in output.get("data", {}):
                output.data["text/plain"] = ADDRESS.sub("at 0x...", output.data["text/plain"])


def write_twin(script: Path) -> bool:
    """Execute the script and write its notebook. Returns whether the file changed."""
    import nbformat

    text = nbformat.writes(execute(script)) + "\n"
    twin = script.with_suffix(".ipynb")
    if twin.exists() and twin.read_text(encoding="utf-8") == text:
        return False
    twin.write_text(text, encoding="utf-8")
    return True


def notebook_problems(script: Path) -> list[str]:
    """Return a sentence for each problem of the notebook; none if it is in step and executed."""
    import nbformat
    from jupytext.compare import NotebookDifference, compare_notebooks

    twin = script.with_suffix(".ipynb")
    if not twin.exists():
        return [f"{twin.name} is missing; run: make notebooks"]
    stored = nbformat.read(twin, as_version=4)
    problems = []
    try:
        compare_notebooks(stored, read_script(script), fmt="py:percent")
    except NotebookDifference as difference:
        problems.append(f"{twin.name} is out of step; run: make notebooks\n{difference}")
    code = [cell for cell in stored.cells if cell.cell_type == "code" and cell.source.strip()]
    for number, cell in enumerate(code, start=1):
        if cell.execution_count is None:
            problems.append(f"{twin.name}: code cell {number} was never executed")
        for output in cell.outputs:
            if output.output_type == "error":
                problems.append(f"{twin.name}: code cell {number} stores {output.ename}")
    return problems


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workshop.notebooks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("scripts", nargs="*", type=Path, help="demo scripts; all of them if none")
    parser.add_argument("--check", action="store_true", help="execute nothing, only compare")
    options = parser.parse_args(arguments)
    failed = False
    for script in [path.resolve() for path in options.scripts] or demo_scripts():
        if options.check:
            problems = notebook_problems(script)
            failed |= bool(problems)
            print(f"  {script.name}: {'; '.join(problems) or 'in step'}")
            continue
        start = time.monotonic()
        print(f"  {script.name}", end="", flush=True)
        changed = write_twin(script)
        seconds = time.monotonic() - start
        print(f": {seconds:.0f} s, {'written' if changed else 'unchanged'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
