"""Every demo script runs from beginning to end, and the tool that makes the notebooks is sound."""

# `nbformat` and `nbclient` take seconds to import, and every process of a test run collects this
# file: they are imported where they are used.

from __future__ import annotations

from pathlib import Path

import pytest

from workshop.book.notebooks import demo_scripts, execute, main, notebook_problems, write_twin

SCRIPT = "# %% [markdown]\n# # A title\n\n# %%\nprint(6 * 7)\niter([])\n"


@pytest.mark.sample(every=6, first=5)  # a quick one
@pytest.mark.parametrize("script", demo_scripts(), ids=lambda path: path.name)
def test_demo_runs(script: Path) -> None:
    """In a fresh kernel, without an error, within the time budget of `notebooks`."""
    executed = execute(script)
    assert any(cell.get("outputs") for cell in executed.cells), "a demo that shows nothing"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "01_a" / "small_demo.py"
    path.parent.mkdir()
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_twin_is_made_once_and_then_unchanged(script: Path) -> None:
    """No cell id, time stamp or memory address makes a second run differ from the first."""
    import nbformat

    assert notebook_problems(script) == ["small_demo.ipynb is missing; run: make notebooks"]
    assert write_twin(script)
    assert notebook_problems(script) == []
    twin = script.with_suffix(".ipynb")
    outputs = nbformat.read(twin, as_version=4).cells[1].outputs
    assert outputs[0].text == "42\n"
    assert outputs[1].data["text/plain"] == "<list_iterator at 0x...>"
    nbformat.validate(nbformat.read(twin, as_version=4))
    assert not write_twin(script)


def test_what_is_out_of_step_is_seen(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_twin(script)
    assert main(["--check", str(script)]) == 0
    script.write_text(SCRIPT.replace("6 * 7", "6 * 8"), encoding="utf-8")
    assert "out of step" in notebook_problems(script)[0]
    assert main(["--check", str(script)]) == 1
    assert "out of step" in capsys.readouterr().out


def test_stored_error_and_unexecuted_cell_are_seen(script: Path) -> None:
    import nbformat

    write_twin(script)
    twin = script.with_suffix(".ipynb")
    notebook = nbformat.read(twin, as_version=4)
    notebook.cells[1].outputs = [
        nbformat.v4.new_output("error", ename="ZeroDivisionError", evalue="", traceback=[])
    ]
    notebook.cells[1].execution_count = None
    nbformat.write(notebook, twin)
    problems = "\n".join(notebook_problems(script))
    assert "never executed" in problems
    assert "stores ZeroDivisionError" in problems


def test_raising_cell_raises(script: Path) -> None:
    from nbclient.exceptions import CellExecutionError

    script.write_text("# %%\n1 / 0\n", encoding="utf-8")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(script)


def test_time_budget_is_for_the_whole_notebook(script: Path) -> None:
    """Three cells of one second each are within the budget alone and beyond it together."""
    from nbclient.exceptions import CellTimeoutError

    script.write_text("# %%\nimport time; time.sleep(1)\n\n" * 3 + "# %%\n2", encoding="utf-8")
    with pytest.raises(CellTimeoutError):
        execute(script, time_budget_s=2)


def test_demo_imports_flat_modules(script: Path) -> None:
    (script.parent / "flat_module_of_a_test.py").write_text("X = 5\n", encoding="utf-8")
    other = script.parent.parent / "02_b" / "second_demo.py"
    other.parent.mkdir()
    other.write_text("# %%\nfrom flat_module_of_a_test import X\nX\n", encoding="utf-8")
    assert execute(other).cells[0].outputs[0].data["text/plain"] == "5"
