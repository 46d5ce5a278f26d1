"""How many threads torch computes with on a CPU: one number for the process, which engines share.

At every matrix all threads wait for the slowest. For a small model a second thread gains little,
and next to a busy program a second thread costs most of the speed. So without a number in the
configuration or the environment, the model's size decides (`THREADS_FROM_PARAMETERS`). The newest
open engine's number applies. After the last engine has closed, torch has its earlier number again.

See 02_paged_kv/beyond/README.md#how-many-threads"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch

from common.engine_config import THREADS_FROM_PARAMETERS

logger = logging.getLogger(__name__)

_numbers: dict[object, int] = {}  # torch's before the first open engine, then those of engines


def default_threads(num_parameters: int, device: torch.device) -> int:
    """Return the number of threads for a model whose engine was given none."""
    available = next(iter(_numbers.values()), torch.get_num_threads())
    is_small = device.type == "cpu" and num_parameters < THREADS_FROM_PARAMETERS
    is_chosen = "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ
    if is_chosen or not is_small or available == 1:
        return available
    size = num_parameters / 1e6
    logger.info("threads: 1, for a model of %.1f M parameters (or set num_threads)", size)
    return 1


def set_threads(given: int | None, num_parameters: int, device: torch.device) -> Callable[[], None]:
    """Set torch's number of threads to `EngineConfig.num_threads`, or to the default. Returns the
    function that gives them back, which can be called again."""
    number = default_threads(num_parameters, device) if given is None else given
    engine = object()
    _numbers.setdefault(None, torch.get_num_threads())
    _numbers[engine] = number
    torch.set_num_threads(number)

    def give_back() -> None:
        if _numbers.pop(engine, None) is not None:
            torch.set_num_threads(list(_numbers.values())[-1])
            if len(_numbers) == 1:
                _numbers.clear()

    return give_back
