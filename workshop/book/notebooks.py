"""The notebooks of the book: each is made from a script, `NN_*/*_demo.py`, and never edited.

    python -m workshop.notebooks     write every NN_*/*_demo.ipynb

The script is in jupytext's `py:percent` form. The notebook gets one more cell, which
says how to get the chapters where they are missing. It is committed without outputs: `make book`
executes it, and keeps the outputs until the code changes."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
# `static_batching` is in a `beyond/`: a notebook's own folder is importable, but not that one.
SETUP = """\
# This notebook uses the book's modules.
import importlib.util

if importlib.util.find_spec("static_batching") is None:
    raise SystemExit(
        "The modules of vllm-from-scratch are not installed. Clone its repository, run `make` "
        "in it, and open this notebook there, with the kernel of its .venv."
    )"""


def demo_scripts(root: Path = ROOT) -> list[Path]:
    found = root.glob("[0-9][0-9]_*/**/*_demo.py")
    return sorted(path for path in found if not path.name.startswith("test_"))


def notebook_text(script: Path) -> str:
    """Return the script's notebook, with the same cell ids for the same text."""
    import jupytext
    import nbformat

    notebook = jupytext.read(script, fmt="py:percent")
    notebook.metadata = {"kernelspec": KERNELSPEC, "language_info": {"name": "python"}}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    is_code = [cell.cell_type == "code" for cell in notebook.cells]
    setup = nbformat.v4.new_code_cell(SETUP)
    notebook.cells.insert(is_code.index(True), setup)
    for index, cell in enumerate(notebook.cells):
        cell.id = hashlib.sha256(f"{index}\n{cell.source}".encode()).hexdigest()[:8]
    return nbformat.writes(notebook) + "\n"


def notebook_problems(script: Path) -> list[str]:
    """Return a sentence if the notebook is missing, or out of step with its script."""
    twin = script.with_suffix(".ipynb")
    is_made = twin.exists() and twin.read_text(encoding="utf-8") == notebook_text(script)
    return [] if is_made else [f"{twin.name} is out of step; run: make notebooks"]


if __name__ == "__main__":
    for script in demo_scripts():
        script.with_suffix(".ipynb").write_text(notebook_text(script), encoding="utf-8")
