"""Compile every kernel that an engine can launch before its first request.

Triton compiles a kernel when it is first called, which takes a second or more, in the middle of
somebody's step. An engine on a GPU knows all of its launches from its configuration
(`launch_configurations`), so it compiles them while it starts. Machine code is kept on disk: the
next start of the same engine reads it.

Nothing is launched. Arguments are stand-ins, which have a type and an address that 16 divides, as
PyTorch's memory does; lengths and counts are any numbers, because no kernel is specialised to
them (`triton_or_none.jit_for_any`)."""

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
    """Compile them for `device` and load them; the number of launches. Says how long it takes,
    since somebody waits for it."""
    launches, start = list(launches), time.perf_counter()
    logger.info("compiling %d kernels (about a second each the first time) ...", len(launches))
    with torch.cuda.device(device):
        for launch in launches:
            compile_now(launch)._init_handles()  # loads it, too: that would wait for the GPU later
    logger.info("%d kernels compiled in %.1f s", len(launches), time.perf_counter() - start)
    return len(launches)


def compile_now(launch: Launch) -> Any:
    """The compiled kernel, which Triton also keeps for the launches to come."""
    names = launch.kernel.arg_names
    arguments = [_stand_in(launch.arguments[n]) for n in names if n in launch.arguments]
    return launch.kernel.warmup(*arguments, grid=(1,), **launch.constants, **launch.options)


def _stand_in(kind: str) -> Any:
    """`kind` as in `Launch.arguments`. Of a dtype Triton makes an aligned tensor."""
    if kind[0] == "*":
        return _DTYPES[kind[1:]]
    return 1.0 if kind[0] == "f" else 1
