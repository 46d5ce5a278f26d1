"""Compile every kernel that an engine can launch before its first request.

Triton compiles a kernel at its first call, which takes a second or more and would delay the step
that makes the call. An engine on a GPU knows all of its launches from its configuration
(`launch_configurations`), so the engine compiles them while it starts. Machine code is kept on
disk, and the next start of the same engine reads it.

Nothing is launched. Arguments are stand-ins with a type and an address that is a multiple of 16, as
in PyTorch's memory. Lengths and counts can be any numbers, because no kernel is specialised to
them (`triton_or_none.jit_for_any`).

See common/models/regions/README.md#compiled-at-the-start"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import torch

from kernel_launch import TRITON_TYPES, Launch

logger = logging.getLogger(__name__)

_DTYPES = {name: dtype for dtype, name in TRITON_TYPES.items()}


def warm_up(launches: Iterable[Launch], device: torch.device) -> int:
    """Compile `launches` for `device`, load them, and return their number. Logs the time, in s,
    because the start of the engine waits for it."""
    launches = list(launches)
    start = time.perf_counter()
    logger.info("compiling %d kernels (about a second each the first time) ...", len(launches))
    with torch.cuda.device(device):
        for launch in launches:
            compile_now(launch)._init_handles()  # loading later would wait for the GPU
    logger.info("%d kernels compiled in %.1f s", len(launches), time.perf_counter() - start)
    return len(launches)


def compile_now(launch: Launch) -> Any:
    """Return the compiled kernel, which Triton also keeps for later launches."""
    names = launch.kernel.arg_names
    arguments = [_stand_in(launch.arguments[n]) for n in names if n in launch.arguments]
    return launch.kernel.warmup(*arguments, grid=(1,), **launch.constants, **launch.options)


def _stand_in(kind: str) -> Any:
    """Return a stand-in for an argument of `kind`, as in `Launch.arguments`. Triton replaces a
    dtype by an aligned tensor."""
    if kind[0] == "*":
        return _DTYPES[kind[1:]]
    return 1.0 if kind[0] == "f" else 1
