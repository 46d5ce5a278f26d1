"""Work in a process of its own: its answer, its end, its death."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from workshop.practice.apart import apart


def _loaded() -> list[str]:
    return [name for name in ("torch", "request", "block_pool") if name in sys.modules]


def _die() -> None:
    raise SystemExit(3)


def _never_end() -> None:
    while True:
        pass


def test_libraries_are_there_and_nothing_of_ours() -> None:
    assert apart(_loaded, (), 60) == ["torch"]


def test_ctrl_c_ends_a_command_with_a_word() -> None:
    code = "import sys; sys.argv[0] = '-m'; import workshop; raise KeyboardInterrupt"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (-signal.SIGINT, "interrupted\n")


def test_a_process_that_dies_is_an_error_and_one_that_does_not_end_is_stopped() -> None:
    with pytest.raises(RuntimeError, match="exited with 3"):
        apart(_die, (), 60)
    apart(_loaded, (), 60)  # the process that others are forked from is there
    assert apart(_never_end, (), 0.2) is None
