"""The notebooks of the book: each is a script, `NN_*/*_demo.py`, and its executed twin.

    python -m workshop.notebooks                   execute every script and write its .ipynb
    python -m workshop.notebooks 01_batching/x_demo.py only this one
    python -m workshop.notebooks --check           say which twins are missing or out of step

The script, in jupytext's `py:percent` form, is edited; the notebook is made from it and never
edited. It gets one more cell, which installs the chapters where they are missing or says how to
(`setup_cell`). A notebook is executed where only the project's wheel is, as it is for a reader who
has no checkout. Meaningless differences between runs (cell ids, time stamps, memory addresses,
versions) are removed, so that running a script again changes only the results of changed code.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import os
import re
import sys
import tempfile
import time
import zipfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from workshop.book.repository import repository_address

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
TIME_BUDGET_S = 60.0
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
POINTER = re.compile(r"\bat 0x[0-9a-f]+")
# `static_batching` is in a `beyond/`: a notebook's own folder is importable, but not that one.
SETUP = """\
# {comment}
import importlib.util

if importlib.util.find_spec("static_batching") is None:
{otherwise}"""
ADVICE = """\
    raise SystemExit(
        "The modules of vllm-from-scratch are not installed. Clone its repository, run `make` "
        "in it, and open this notebook there, with the kernel of its .venv."
    )"""
INSTALLATION = """\
    import subprocess
    import sys

    print("installing vllm-from-scratch from {address}")
    packages = ["git+{address}", "matplotlib"]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *packages], check=True)
    importlib.invalidate_caches()"""


def demo_scripts(root: Path = ROOT) -> list[Path]:
    found = root.glob("[0-9][0-9]_*/**/*_demo.py")
    return sorted(path for path in found if not path.name.startswith("test_"))


def setup_cell(address: str) -> str:
    """Return the first code of a notebook, which does nothing where the chapters are importable.
    Elsewhere it installs them from the repository at `address`; if that is "", it raises
    `SystemExit`, whose message says how to get them."""
    if not address:
        return SETUP.format(comment="This notebook uses the book's modules.", otherwise=ADVICE)
    comment = "Installs the book's modules where they are missing."
    return SETUP.format(comment=comment, otherwise=INSTALLATION.format(address=address))


def read_script(script: Path) -> NotebookNode:
    """Read the script as a notebook without outputs, with fixed cell ids and metadata, and with the
    cell that it needs to run elsewhere."""
    import jupytext
    from nbformat.v4 import new_code_cell

    notebook = jupytext.read(script, fmt="py:percent")
    notebook.metadata = {"kernelspec": KERNELSPEC}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    address = repository_address()
    is_code = [cell.cell_type == "code" for cell in notebook.cells]
    notebook.cells.insert(is_code.index(True), new_code_cell(setup_cell(address)))
    for index, cell in enumerate(notebook.cells):
        cell.id = hashlib.sha256(f"{index}\n{cell.source}".encode()).hexdigest()[:8]
    return notebook


@cache
def wheel_folder() -> Path:
    """Build the project's wheel and unpack it to a temporary folder, once in this process."""
    from hatchling.builders.wheel import WheelBuilder

    temporary = tempfile.TemporaryDirectory()
    atexit.register(temporary.cleanup)
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=temporary.name, versions=["standard"])
    folder = Path(temporary.name) / "modules"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def wheel_environment() -> dict[str, str]:
    """The environment in which `python -S` finds installed packages and the wheel, but not the
    checkout, which is in a .pth file of an editable installation."""
    packages = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(wheel_folder()), *packages])}


def execute(script: Path, time_budget_s: float = TIME_BUDGET_S) -> NotebookNode:
    """Run the script's cells in a fresh kernel, in an empty folder, with the modules of the wheel,
    and return the notebook.

    Raises nbclient's `CellExecutionError` when a cell raises, and `CellTimeoutError` when the
    notebook as a whole takes longer than `time_budget_s`.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellTimeoutError

    notebook = read_script(script)
    environment = {**wheel_environment(), "TQDM_DISABLE": "1"}
    deadline = time.monotonic() + time_budget_s
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            kernel_name=KERNELSPEC["name"],
            resources={"metadata": {"path": folder}},
            timeout_func=lambda cell: max(1, int(deadline - time.monotonic())),
            record_timing=False,
            coalesce_streams=True,  # how output is cut into messages differs from run to run
        )
        kernel = client.create_kernel_manager().kernel_spec
        assert kernel is not None  # else `NoSuchKernel` was raised
        kernel.argv.insert(1, "-S")  # `wheel_environment` says why
        client.execute(env=environment)
    if time.monotonic() > deadline:  # a cell gets a second at least, which was one too many
        raise CellTimeoutError(f"{script.name} took longer than {time_budget_s:g} s")
    _remove_noise(notebook)
    return notebook


def _remove_noise(notebook: NotebookNode) -> None:
    notebook.metadata = {"kernelspec": KERNELSPEC, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = POINTER.sub("at 0x...", output.text)
            if "text/plain" in output.get("data", {}):
                output.data["text/plain"] = POINTER.sub("at 0x...", output.data["text/plain"])


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
