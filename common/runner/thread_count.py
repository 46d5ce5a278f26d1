"""How many threads torch computes with on a CPU: one number for the process, which engines share.

At every matrix all threads wait for the slowest. For a small model a second thread gains little,
and beside a busy program it costs most of the speed, so the default follows the model's size
(`THREADS_FROM_PARAMETERS`). What the user has chosen stays: `OMP_NUM_THREADS`, `MKL_NUM_THREADS`,
or a call of `torch.set_num_threads`. Of open engines that were given a number, the newest one's
holds; otherwise the largest default, because changing the number under compiled code costs more
than it gains. After the last one has closed, torch has the number that it had before.

torch keeps a number for the process and one for each thread that has computed; a thread begins
with the process's. Only a new thread tells what that is."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections import deque
from collections.abc import Callable

import torch

from common.engine_config import THREADS_FROM_PARAMETERS

logger = logging.getLogger(__name__)


def num_threads_of(num_parameters: int, device: torch.device, available: int) -> int:
    """How many of the available threads a model is computed with by default."""
    is_small = device.type == "cpu" and num_parameters < THREADS_FROM_PARAMETERS
    return 1 if is_small else available


class ThreadCount:
    """torch's number of threads, and what open engines ask of it."""

    def __init__(self) -> None:
        self._asked: dict[object, tuple[bool, int]] = {}  # by engine: (is it the user's?, number)
        self._number: int | None = None  # that torch has, as far as is known
        self._before = 1  # the engines
        self._is_chosen = False  # `_before`, by the user
        self._lock = threading.Lock()
        self._closed: deque[object] = deque()

    def default(self, num_parameters: int, device: torch.device) -> int:
        """The number of threads for a model, where the engine was given none."""
        with self._lock:
            self._look()
            wanted = num_threads_of(num_parameters, device, self._before)
            if wanted == self._before or self._is_chosen:
                return self._before
        logger.info(
            "threads: %d instead of %d, for a model of %.1f M parameters (or say num_threads)",
            wanted,
            self._before,
            num_parameters / 1e6,
        )
        return wanted

    def begin(self, num_threads: int, is_given: bool) -> Callable[[], None]:
        """An engine begins to compute. The function that is returned says that it has ended; it
        may be called in any thread, by the collector too, and more than once."""
        engine = object()
        with self._lock:
            self._look()
            self._asked[engine] = is_given, num_threads
            self._apply()

        def end() -> None:
            self._closed.append(engine)
            self._forget_closed()

        self._forget_closed()
        return end

    def _forget_closed(self) -> None:
        """The collector may call from within this class: then who holds the lock does the work."""
        while self._closed and self._lock.acquire(blocking=False):
            try:
                self._look()
                if self._asked.pop(self._closed.popleft(), None) is not None:
                    self._apply()
            finally:
                self._lock.release()

    def _look(self) -> None:
        """Has somebody else set the number? Then that one holds, and comes back after."""
        number = _in_new_thread(torch.get_num_threads)
        if number != self._number:
            self._is_chosen = self._number is not None or _is_chosen()
            self._before = self._number = number
            self._asked.clear()

    def _apply(self) -> None:
        given = [number for is_given, number in self._asked.values() if is_given]
        defaults = [number for _, number in self._asked.values()] or [self._before]
        number = given[-1] if given else max(defaults)
        if number != self._number or number != torch.get_num_threads():
            self._number = number
            torch.set_num_threads(number)


THREADS = ThreadCount()


def set_threads(given: int | None, num_parameters: int, device: torch.device) -> Callable[[], None]:
    """Give torch as many threads as `EngineConfig.num_threads` says; the function that is returned
    puts them back."""
    number = THREADS.default(num_parameters, device) if given is None else given
    return THREADS.begin(number, given is not None)


def _is_chosen() -> bool:
    """Whether the user has said how many threads torch takes. torch does not tell of a call of
    `set_num_threads`. But without one, a new thread takes OpenMP's number, if torch has MKL.
    Without MKL (ARM) such a call is not seen."""
    if "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ:
        return True

    def is_fixed() -> bool:
        try:
            ctypes.CDLL(None).omp_set_num_threads(1)  # of this thread alone
        except (AttributeError, OSError, TypeError):
            return False
        return torch.get_num_threads() != 1

    return torch.backends.mkl.is_available() and bool(_in_new_thread(is_fixed))


def _in_new_thread(ask: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    try:
        thread.start()
    except RuntimeError:  # while the interpreter ends there are no new ones
        return ask()
    thread.join()
    return found[0]
