"""Work in a process of its own: its answer, its end, its death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from workshop.practice.apart import apart


def _loaded() -> list[str]:
    return [name for name in ("torch", "request", "block_pool") if name in sys.modules]


def _settings_of_pytest() -> list[str]:
    return [name for name in os.environ if name.startswith("PYTEST_")]


def _die() -> None:
    raise SystemExit(3)


def _never_end() -> None:
    while True:
        pass


def test_libraries_are_there_and_nothing_of_ours() -> None:
    assert apart(_loaded, (), 60) == ["torch"]


def test_a_run_of_pytest_there_has_none_of_the_settings_of_this_one() -> None:
    assert _settings_of_pytest() and apart(_settings_of_pytest, (), 60) == []


def test_ctrl_c_is_for_the_process_that_asks() -> None:
    assert apart(signal.getsignal, (signal.SIGINT,), 60) == signal.SIG_IGN


def test_ctrl_c_ends_a_command_with_a_word() -> None:
    code = "import sys; sys.argv[0] = '-m'; import workshop; raise KeyboardInterrupt"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (-signal.SIGINT, "interrupted\n")


def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="exited with 3"):
        apart(_die, (), 60)


def test_what_does_not_end_is_stopped_at_its_limit() -> None:
    apart(_loaded, (), 60)  # the process that others are forked from is there
    begun = time.monotonic()
    assert apart(_never_end, (), 0.2) is None
    assert time.monotonic() - begun < 10
