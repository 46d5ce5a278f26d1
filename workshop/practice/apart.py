"""Run a function in a separate process, so that no module of ours is imported before it starts.

If the system can fork, the process is forked from one that has loaded only the libraries and no
module of ours (`libraries.py`), so it starts within a fraction of a second. The examples of the
museum and of the tasks run like this, and their tests; so do recorded runs and readers' answers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from workshop.practice.module_swap import ModuleSwap
from workshop.practice.source_patch import ROOT

START_S = 120  # for a process to be there: it may import PyTorch on a busy machine
END_S = 5  # for a process that has answered, to tidy up
_LIBRARIES = ["workshop.practice.libraries"]


def forked_with_libraries() -> Any:
    """Return the `multiprocessing` context that starts these processes."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LIBRARIES)
    if threading.current_thread() is threading.main_thread():  # only there can handlers be set
        # The children inherit it: Ctrl-C is for this process to answer.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        forkserver.ensure_running()
        signal.signal(signal.SIGINT, before)
    return context


def apart(work: Callable, arguments: tuple, limit_s: float, swap: ModuleSwap | None = None) -> Any:
    """Return `work(*arguments)`, run in another process, with the module of `swap` from its file.
    None if the call does not end within `limit_s`. Raises `RuntimeError` if the process dies, and
    if the module cannot be imported."""
    context = forked_with_libraries()
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, work, arguments, swap), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_S):
            raise RuntimeError(f"no process started within {START_S} seconds")
        if problem := ours.recv():
            raise RuntimeError(problem)
        if not ours.poll(limit_s):
            return None
        answer = ours.recv()
        process.join(END_S)
        return answer
    except EOFError:
        process.join(1)
        raise RuntimeError(f"the process exited with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        ours.close()


def _answer(
    connection: Connection, work: Callable, arguments: tuple, swap: ModuleSwap | None
) -> None:
    os.chdir(ROOT)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    problem = ""
    try:
        if swap is not None:
            swap.install()
            swap.check()  # before anything else
    except Exception as error:
        problem = f"{swap and swap.file.name}: {type(error).__name__}: {error}"
    with suppress(BrokenPipeError):  # the other process was stopped
        connection.send(problem)
        if not problem:  # it begins
            connection.send(work(*arguments))
