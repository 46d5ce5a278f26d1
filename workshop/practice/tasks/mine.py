"""Run a program of ours with each of your functions that passes its tests instead of ours:

    python -m workshop.tasks.mine common.demo --num-prompts 4
    python -m workshop.tasks.mine common.tests.equivalence --seconds 60

`make demo ARGS=--mine` and `make matrix ARGS=--mine` start this command; `make watch ARGS=--mine`
does the same. A function that has changed since `make task` graded it is not used."""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from workshop.practice.module_swap import ModuleSwap, name_of
from workshop.practice.tasks.answer import answer_to
from workshop.practice.tasks.course import TASKS, Task
from workshop.practice.tasks.workbench import Workbench


def passing(bench: Workbench) -> list[Task]:
    """Return the tasks whose function is as it was when it passed. Names the others."""
    written = [t for t in TASKS if bench.text(t) is not None and not bench.is_blank(t)]
    for task in written:
        if not bench.has_passed(task):
            told = f"{task.number} has not passed as it is, so ours is used: make task N="
            print(f"{told}{task.number}", file=sys.stderr)
    return [task for task in written if bench.has_passed(task)]


def install(tasks: Iterable[Task], bench: Workbench, folder: Path) -> list[ModuleSwap]:
    """Install swaps so that the tasks' modules are imported from files in `folder`."""
    swaps, tasks = [], list(tasks)
    for module in dict.fromkeys(task.module for task in tasks):
        kept = [task for task in tasks if task.module == module]
        file = folder / bench.file(kept[0]).name
        answer = answer_to(bench.text(kept[0]) or "", kept, module)
        file.write_text(answer.text, encoding="utf-8")
        swaps.append(ModuleSwap(name_of(kept[0].path), file))
        swaps[-1].install()
    return swaps


def told(num_tasks: int) -> str:
    return f"{num_tasks} of {len(TASKS)} functions of this engine are yours."


@contextmanager
def installed(bench: Workbench | None = None) -> Iterator[tuple[int, int]]:
    """Use the reader's functions in the context. Yields how many are the reader's, of how many;
    this is also printed before and after."""
    bench = bench or Workbench()
    tasks = passing(bench)
    with tempfile.TemporaryDirectory(prefix="mine-") as folder:
        for swap in install(tasks, bench, Path(folder).resolve()):
            swap.check()
        print(told(len(tasks)), flush=True)
        try:
            yield len(tasks), len(TASKS)
        finally:
            print(f"\n{told(len(tasks))}")


def main(arguments: list[str], bench: Workbench | None = None) -> None:
    program, *rest = (argument for argument in arguments if argument != "--mine")
    with installed(bench):
        sys.argv = [program, *rest]
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
