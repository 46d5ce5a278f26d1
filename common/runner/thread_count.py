"""How many threads torch computes with on a CPU: one number for the process, which engines share.

At every matrix all threads wait for the slowest. For a small model a second thread gains little,
and next to a busy program a second thread costs most of the speed. So without a number in the
configuration or the environment, the model's size decides (`THREADS_FROM_PARAMETERS`). Among open
engines with a given number, the newest engine's number applies. Without one, the largest default
applies, because changing the number under compiled code costs more than it gains. After the last
engine has closed, torch has its earlier number again.

See 02_paged_kv/beyond/README.md#how-many-threads"""

from __future__ import annotations

import logging
import os
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
        self._before = 1  # torch's number before the first of the open engines

    def default(self, num_parameters: int, device: torch.device) -> int:
        """Return the number of threads for a model whose engine was given none."""
        available = self._before if self._requests else torch.get_num_threads()
        if "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ:
            return available
        preferred = num_threads_of(num_parameters, device, available)
        if preferred != available:
            size = num_parameters / 1e6
            reason = f"for a model of {size:.1f} M parameters (or set num_threads)"
            logger.info("threads: %d instead of %d, %s", preferred, available, reason)
        return preferred

    def begin(self, num_threads: int, is_given: bool) -> Callable[[], None]:
        """Register an engine and apply its number. Returns the function that unregisters the
        engine. In another thread than this one it changes the number of later threads only."""
        engine = object()
        if not self._requests:
            self._before = torch.get_num_threads()
        self._requests[engine] = is_given, num_threads
        self._apply()

        def end() -> None:
            if self._requests.pop(engine, None) is not None:
                self._apply()

        return end

    def _apply(self) -> None:
        requests = list(self._requests.values())
        given = [number for is_given, number in requests if is_given]
        if given:
            number = given[-1]
        else:
            number = max((number for _, number in requests), default=self._before)
        if number != torch.get_num_threads():
            torch.set_num_threads(number)


THREADS = ThreadCount()


def set_threads(given: int | None, num_parameters: int, device: torch.device) -> Callable[[], None]:
    """Set torch's number of threads to `EngineConfig.num_threads`, or to the default. Returns the
    function that restores the earlier number."""
    number = THREADS.default(num_parameters, device) if given is None else given
    return THREADS.begin(number, given is not None)
