"""Start worker processes.

    LLM(tensor_parallel_size=2)            starts two processes
    torchrun --nproc-per-node=2 SCRIPT     rank 0 is the driver, and starts them; rank 1 comes to
                                           `LLM(...)` in the script, and ends there

A process that is started runs `python -m common.parallel.worker`, not a copy of this one: nothing
of the user's script is imported again, so it needs no `if __name__ == "__main__"`, and can be a
notebook. The driver plans while the model computes, and outlives its workers to report what
happened.

No port and no name is fixed: the store in which the ranks meet has a port that the system assigns,
and the sockets are in a temporary folder.

See common/parallel/README.md#processes"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import torch
import torch.distributed

from common.parallel.executor import Link
from common.runner.thread_count import default_threads
from request import check_integers

WORKER_MODULE = "common.parallel.worker"
dist: Any = torch.distributed  # its type stubs lack what is needed here


@dataclass(frozen=True, slots=True)
class StartedWorkers:
    links: list[Link]
    folder: TemporaryDirectory  # of the sockets
    store: Any  # where the ranks meet
    num_threads: int  # of PyTorch, for each worker


def launch(
    num_ranks: int, device: torch.device, num_parameters: int, num_threads: int | None = None
) -> StartedWorkers:
    """Start the workers, each with `num_threads`. None: they share what one process would take for
    the whole model. Raises `ValueError` if there are not enough devices."""
    if device.type == "cuda" and (num_devices := torch.cuda.device_count()) < num_ranks:
        raise ValueError(f"{num_ranks} ranks need a CUDA device each, got {num_devices}")
    # Only its owner may enter. The path of a socket may have 107 bytes.
    parent = None if len(gettempdir()) < 60 else "/tmp"
    folder = TemporaryDirectory(prefix="vllm_from_scratch_", dir=parent)
    return StartedWorkers(
        links=[start_process(folder.name, rank) for rank in range(num_ranks)],
        folder=folder,
        store=dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False),
        num_threads=num_threads or max(1, default_threads(num_parameters, device) // num_ranks),
    )


def start_process(folder: str, rank: int) -> Link:
    """Start a worker, which ends when its standard input closes. The worker gets this process's
    import path, without the folder that Python puts in front for `-m`."""
    path = [os.path.abspath(entry) for entry in sys.path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", WORKER_MODULE, folder, str(rank), "0"],
        env=env,
        stdin=subprocess.PIPE,
        stdout=2,  # this process's stderr: stdout is the user's
    )
    assert process.stdin is not None
    return Link(rank, process, process.stdin)


def torchrun_size(pipeline_parallel_size: int = 1) -> int:
    """The tensor parallel size that uses all of torchrun's processes. Ends every process but the
    first, which starts the workers. Raises `ValueError` if no size does, or there are several
    machines."""
    if os.environ["RANK"] != "0":
        raise SystemExit(0)
    check_integers(1, pipeline_parallel_size=pipeline_parallel_size)
    world_size = int(os.environ["WORLD_SIZE"])
    if int(os.environ["LOCAL_WORLD_SIZE"]) != world_size:
        raise ValueError("torchrun must start all processes on one machine")
    if world_size % pipeline_parallel_size:
        raise ValueError(
            f"pipeline_parallel_size must divide the {world_size} processes that torchrun has "
            f"started, got {pipeline_parallel_size}"
        )
    return world_size // pipeline_parallel_size
