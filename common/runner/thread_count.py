"""How many threads torch computes with on a CPU: one number for the process, which engines share.

At every matrix all threads wait for the slowest. For a small model a second thread gains little,
and next to a busy program a second thread costs most of the speed. So the default depends on the
model's size (`THREADS_FROM_PARAMETERS`). The user's choice is kept: `OMP_NUM_THREADS`,
`MKL_NUM_THREADS`, or a call of `torch.set_num_threads`. Among open engines with a given number, the
newest engine's number applies. Without one, the largest default applies, because changing the
number under compiled code costs more than it gains. After the last engine has closed, torch has its
earlier number again.

torch keeps one number for the process and one for each thread that has computed. A thread starts
with the process's number, so only a new thread can read that number.

See 02_paged_kv/beyond/README.md#how-many-threads"""

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
    """Return the default number of threads for a model, out of the `available` ones."""
    is_small = device.type == "cpu" and num_parameters < THREADS_FROM_PARAMETERS
    return 1 if is_small else available


class ThreadCount:
    """torch's number of threads, and the numbers that open engines request."""

    def __init__(self) -> None:
        self._requests: dict[object, tuple[bool, int]] = {}  # by engine: (is_given, number)
        self._number: int | None = None  # torch's number, as last seen or set
        self._before = 1  # torch's number before the engines
        self._is_chosen = False  # whether the user chose `_before`
        self._lock = threading.Lock()
        self._closed: deque[object] = deque()

    def default(self, num_parameters: int, device: torch.device) -> int:
        """Return the number of threads for a model whose engine was given none."""
        with self._lock:
            self._look()
            preferred = num_threads_of(num_parameters, device, self._before)
            if preferred == self._before or self._is_chosen:
                return self._before
        logger.info(
            "threads: %d instead of %d, for a model of %.1f M parameters (or set num_threads)",
            preferred,
            self._before,
            num_parameters / 1e6,
        )
        return preferred

    def begin(self, num_threads: int, is_given: bool) -> Callable[[], None]:
        """Register an engine and apply its number. Returns the function that unregisters the
        engine: call it in any thread, in the garbage collector too, and more than once."""
        engine = object()
        with self._lock:
            self._look()
            self._requests[engine] = is_given, num_threads
            self._apply()

        def end() -> None:
            self._closed.append(engine)
            self._forget_closed()

        self._forget_closed()
        return end

    def _forget_closed(self) -> None:
        """Unregister closed engines. The garbage collector can call this from within this class;
        then the holder of the lock does the work."""
        while self._closed and self._lock.acquire(blocking=False):
            try:
                self._look()
                if self._requests.pop(self._closed.popleft(), None) is not None:
                    self._apply()
            finally:
                self._lock.release()

    def _look(self) -> None:
        """Check whether other code has set torch's number. If so, drop the engines' requests, and
        use and later restore that number."""
        number = _in_new_thread(torch.get_num_threads)
        if number != self._number:
            self._is_chosen = self._number is not None or _is_chosen()
            self._before = self._number = number
            self._requests.clear()

    def _apply(self) -> None:
        given = [number for is_given, number in self._requests.values() if is_given]
        defaults = [number for _, number in self._requests.values()] or [self._before]
        number = given[-1] if given else max(defaults)
        if number != self._number or number != torch.get_num_threads():
            self._number = number
            torch.set_num_threads(number)


THREADS = ThreadCount()


def set_threads(given: int | None, num_parameters: int, device: torch.device) -> Callable[[], None]:
    """Set torch's number of threads to `EngineConfig.num_threads`, or to the default. Returns the
    function that restores the earlier number."""
    number = THREADS.default(num_parameters, device) if given is None else given
    return THREADS.begin(number, given is not None)


def _is_chosen() -> bool:
    """Whether the user has chosen torch's number of threads. torch does not report calls of
    `set_num_threads`, but without such a call a new thread takes OpenMP's number, if torch has MKL.
    Without MKL (ARM) the call is not detected."""
    if "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ:
        return True

    def is_fixed() -> bool:
        try:
            ctypes.CDLL(None).omp_set_num_threads(1)  # for this thread only
        except (AttributeError, OSError, TypeError):
            return False
        return torch.get_num_threads() != 1

    return torch.backends.mkl.is_available() and bool(_in_new_thread(is_fixed))


def _in_new_thread(function: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    try:
        thread.start()
    except RuntimeError:  # no new threads at interpreter shutdown
        return function()
    thread.join()
    return found[0]
