"""Processes that are forked with the libraries loaded: seconds less than `python` takes to import
PyTorch."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TextIO

from workshop.practice.apart import forked_with_libraries


class Forked:
    """`work(*arguments)` in another process, with what is asked of a `Popen`."""

    def __init__(self, work: Callable, *arguments: Any, daemon: bool = True) -> None:
        """A daemon ends with this process, and has no children."""
        context = forked_with_libraries()
        self._process = context.Process(target=work, args=arguments, daemon=daemon)
        self._process.start()
        self.pid = self._process.pid
        self.kill = self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code


def start_program(module: str, *arguments: str, **environment: str) -> tuple[Forked, TextIO]:
    """`python -m module arguments`, and its stderr."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return Forked(_run, theirs, module, arguments, environment), ours.makefile()


def _run(stderr: socket.socket, module: str, arguments: list[str], environment: dict) -> None:
    os.dup2(stderr.fileno(), 2)
    os.environ |= environment
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has none
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")
