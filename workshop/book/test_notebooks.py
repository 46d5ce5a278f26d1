"""Every demo script runs from beginning to end where only the wheel is, its first cell says how to
get the chapters, and the tool that makes the notebooks is sound."""

# `nbformat` and `nbclient` take seconds to import, and every process of a test run collects this
# file: they are imported where they are used.

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workshop.book.notebooks import (
    demo_scripts,
    execute,
    main,
    notebook_problems,
    setup_cell,
    wheel_folder,
    write_twin,
)

SCRIPT = "# %% [markdown]\n# # A title\n\n# %%\nprint(6 * 7)\niter([])\n"


@pytest.mark.sample(every=6, first=5)  # a quick one
@pytest.mark.parametrize("script", demo_scripts(), ids=lambda path: path.name)
def test_demo_runs(script: Path) -> None:
    """In a fresh kernel, with the wheel's modules, without an error, within the time budget."""
    executed = execute(script)
    setup, *others = [cell.outputs for cell in executed.cells if cell.cell_type == "code"]
    assert not setup and any(others), "a demo that shows nothing"


def test_notebooks_find_the_wheel_and_nothing_of_the_checkout(script: Path) -> None:
    """Else a demo that imports the workshop or a helper of tests would run here, and only here."""
    names = ["static_batching", "workshop", "bounded_loops"]
    code = f"from importlib.util import find_spec\n[find_spec(name) for name in {names}]\n"
    script.write_text(f"# %%\n{code}", encoding="utf-8")
    (output,) = execute(script).cells[1].outputs
    found = output.data["text/plain"]
    assert found.count("ModuleSpec") == 1 and str(wheel_folder() / names[0]) in found


@pytest.mark.parametrize("address", ["", "https://github.com/owner/book"])
def test_first_cell_gets_the_chapters_or_says_how(address: str, tmp_path: Path) -> None:
    """`pip` is a script here that prints its arguments."""
    pip = "import sys; print(*sys.argv[1:]); open('static_batching.py', 'w').close()"
    (tmp_path / "pip.py").write_text(pip, encoding="utf-8")
    command = [sys.executable, "-S", "-c", setup_cell(address) + "\nimport static_batching"]
    run = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True)
    if address:
        assert (run.returncode, run.stderr) == (0, "")
        assert f"install --quiet git+{address} matplotlib\n" in run.stdout
    else:
        assert run.returncode == 1 and "modules of vllm-from-scratch are not" in run.stderr


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "01_a" / "small_demo.py"
    path.parent.mkdir()
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_twin_is_made_once_and_what_is_out_of_step_is_seen(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No cell id, time stamp or memory address makes a second run differ from the first."""
    import nbformat

    assert notebook_problems(script) == ["small_demo.ipynb is missing; run: make notebooks"]
    assert write_twin(script)
    assert notebook_problems(script) == [] and main(["--check", str(script)]) == 0
    twin = script.with_suffix(".ipynb")
    notebook = nbformat.read(twin, as_version=4)
    outputs = notebook.cells[2].outputs
    assert outputs[0].text == "42\n"
    assert outputs[1].data["text/plain"] == "<list_iterator at 0x...>"
    assert not write_twin(script)
    notebook.cells[2].execution_count = None
    nbformat.write(notebook, twin)
    assert "never executed" in "\n".join(notebook_problems(script))
    script.write_text(SCRIPT.replace("6 * 7", "6 * 8"), encoding="utf-8")
    assert main(["--check", str(script)]) == 1 and "out of step" in capsys.readouterr().out
