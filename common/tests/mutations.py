"""Break this line, and this test fails. `BREAK_A_LINE.md` is made from the table below.

    python -m common.tests.mutations               break each line in a copy, run its test
    python -m common.tests.mutations --only 7      one of them
    python -m common.tests.mutations --write       make BREAK_A_LINE.md anew

A test that cannot fail proves nothing. Here are thirty lines that look harmless, each with what it
would do to a user if it were wrong, and the test that notices. The lines are broken in a temporary
copy of the repository, never in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "BREAK_A_LINE.md"
_NOT_COPIED = (".git", ".venv", "build", "dist", "shared", "figures", "*.ipynb", "__pycache__")
_SECONDS = 300  # for one test


@dataclass(frozen=True, slots=True)
class Mutation:
    file: str
    old: str  # stands in `file` exactly once
    new: str
    test: str  # path::name
    harm: str  # what a user would see


MUTATIONS: tuple[Mutation, ...] = ()
