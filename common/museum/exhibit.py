"""What the museum shows: a bug that a real engine shipped, put back into our code.

An exhibit is a story, a patch and a demonstration. The demonstration is a small function that uses
the module as a user of it would, and says in a few lines of text what came of it. It imports what
it needs when it is called, so that it gets the module with the bug where that is wanted:

                             the module    demonstrate()    the named tests
    as it is                 ours          `right`          pass
    with the bug             a copy        `wrong`          fail, each of them

All four are checked for every exhibit (`test_museum_visits.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.tools.source_patch import Patch

NEVER_ENDS = "(it does not end; stopped from outside)"


@dataclass(frozen=True, slots=True)
class Exhibit:
    trap: int  # its number in the project's list of traps, which the tests cite: "Trap 10"
    origin: str  # who shipped it: "vLLM #42571"; or "ours"
    title: str
    patch: Patch
    seen: str  # what a user would have seen
    lesson: str
    demonstrate: Callable[[], str]
    wrong: str  # what it says with the bug in; `NEVER_ENDS` if that is the bug
    right: str
    tests: tuple[str, ...]  # path::name of those that notice

    @property
    def chapter(self) -> str:
        """The folder that the bug is put into."""
        return self.patch.file.partition("/")[0]
