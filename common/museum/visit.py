"""Look at an exhibit: its demonstration and its tests, with the bug and without.

Each look is a process of its own (`common/tools/apart.py`), so that nothing is imported before the
bug is in. The bug is in a copy of its module in a temporary folder, and
`common/tools/module_swap.py` gives that to whoever imports it.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from common.museum.exhibit import NEVER_ENDS, Exhibit
from common.tools.apart import apart
from common.tools.module_swap import ModuleSwap
from common.tools.named_tests import TestRun, run_tests

LIMIT_S = 60
ENDLESS_S = 2  # where the symptom is that it does not end
_FOLDER = "museum-"
_IN_THE_FOLDER = re.compile(rf"[^\s\"']*{_FOLDER}\w+/")


@contextlib.contextmanager
def broken_copy(exhibit: Exhibit) -> Iterator[ModuleSwap]:
    """The module with the bug, for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
        path = Path(folder).resolve() / Path(exhibit.patch.file).name
        path.write_text(exhibit.patch.apply(), encoding="utf-8")
        yield ModuleSwap(exhibit.patch.module, path)


def show(exhibit: Exhibit, swap: ModuleSwap | None = None) -> str:
    """What the demonstration says, with the bug if `swap` has it. An exception is its last line."""
    limit_s = ENDLESS_S if swap is not None and exhibit.wrong == NEVER_ENDS else LIMIT_S
    answer = apart(_demonstrate, (exhibit, swap), limit_s)
    return NEVER_ENDS if answer is None else answer


def try_tests(
    exhibit: Exhibit, swap: ModuleSwap | None = None, *, first_only: bool = False
) -> TestRun:
    """Run the named tests. `first_only` stops at the first failure, and tells all about it."""
    limit_s = ENDLESS_S if swap is not None and exhibit.wrong == NEVER_ENDS else LIMIT_S
    arguments = (exhibit.tests, swap, first_only, limit_s)
    run = apart(run_tests, arguments, 2 * limit_s + LIMIT_S)
    if run is None:
        return TestRun((), "pytest did not end")
    return replace(run, report=without_folder(run.report))


def without_folder(text: str) -> str:
    """Names of files as a reader knows them: the copy's without its temporary folder."""
    return _IN_THE_FOLDER.sub("(with the bug) ", text)


def _demonstrate(exhibit: Exhibit, swap: ModuleSwap | None) -> str:
    if swap is not None:
        swap.install()
        swap.check()  # before anything else
    try:
        return exhibit.demonstrate()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
