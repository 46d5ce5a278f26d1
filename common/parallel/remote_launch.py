"""Start worker processes, or connect to those that torchrun has started.

    LLM(tensor_parallel_size=2)            starts two processes, each with the end of a socket pair
    torchrun --nproc-per-node=2 SCRIPT     rank 0 is the driver, and starts worker 0; rank 1 comes
                                           to `LLM(...)` in the script, becomes worker 1 there, and
                                           never gets back to the script

A process that is started runs `python -m common.parallel.worker`, not a copy of this one: nothing
of the user's script is imported again, so it needs no `if __name__ == "__main__"`, and can be a
notebook. Worker 0 is a separate process under torchrun too: in both cases the driver plans while
the model computes, and outlives its worker to report what happened.

No port and no name is fixed: sockets use a port that the system assigns. The other ranks read it
from torchrun's store, with the secret that a connection must present.

See common/parallel/README.md#processes"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed

from common.parallel.channel import START_TIMEOUT_S, Channel, ChannelClosed, Lifeline
from common.parallel.executor import Link
from common.runner.thread_count import THREADS, num_threads_of
from request import check_integers

WORKER_MODULE = "common.parallel.worker"
dist: Any = torch.distributed  # its type stubs lack what is needed here


@dataclass(frozen=True, slots=True)
class StartedWorkers:
    links: list[Link]
    own_hosts: list[str]  # of each rank, its address for the others; "": it knows itself
    store: Any  # where the ranks meet, in this process; None: there is one
    store_host: str
    num_threads: int  # of PyTorch, for each worker on this machine

    @property
    def store_port(self) -> int:
        return 0 if self.store is None else self.store.port


def launch(
    num_ranks: int, device: torch.device, num_parameters: int, num_threads: int | None = None
) -> StartedWorkers:
    """Start the workers, each with `num_threads`. None: they share what one process would take for
    the whole model. Raises `ValueError` if there are not enough devices."""
    if is_torchrun():
        num_threads = num_threads or _torchrun_threads(num_parameters, device)
        return _launch_with_torchrun(num_ranks, num_threads)
    if device.type == "cuda" and (num_devices := torch.cuda.device_count()) < num_ranks:
        raise ValueError(f"{num_ranks} ranks need a CUDA device each, got {num_devices}")
    links: list[Link] = []
    try:
        for rank in range(num_ranks):
            links.append(start_process(rank))
        store = _make_store("127.0.0.1") if num_ranks > 1 else None
    except BaseException:
        for link in links:
            link.channel.close()  # and it ends
            link.lifeline.close()
        raise
    return StartedWorkers(
        links,
        ["127.0.0.1"] * num_ranks,
        store,
        "127.0.0.1",
        num_threads or max(1, THREADS.default(num_parameters, device) // num_ranks),
    )


def _make_store(host: str) -> Any:
    return dist.TCPStore(host, 0, None, True, wait_for_workers=False)


def start_process(rank: int) -> Link:
    """Start a worker with one end of two socket pairs. The worker gets this process's import path,
    without the folder that Python puts in front for `-m`."""
    pairs = [socket.socketpair() for _ in range(2)]
    (channel, its_channel), (lifeline, its_lifeline) = pairs
    path = [os.path.abspath(folder) for folder in sys.path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
    inherited = (its_channel.fileno(), its_lifeline.fileno())
    with its_channel, its_lifeline:
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER_MODULE, *map(str, inherited)],
            pass_fds=inherited,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=2,  # this process's stderr: stdout is the user's
        )
    return Link(rank, Channel(channel), Channel(lifeline), process)


# -- under torchrun


def is_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def torchrun_size(pipeline_parallel_size: int = 1) -> int:
    """The tensor parallel size that uses all of torchrun's processes. Raises `ValueError` if no
    size does."""
    check_integers(1, pipeline_parallel_size=pipeline_parallel_size)
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size % pipeline_parallel_size:
        raise ValueError(
            f"pipeline_parallel_size must divide the {world_size} processes that torchrun has "
            f"started, got {pipeline_parallel_size}"
        )
    return world_size // pipeline_parallel_size


def check_torchrun(tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    """Raise `ValueError` if torchrun has started another number of processes."""
    world_size = int(os.environ["WORLD_SIZE"])
    if tensor_parallel_size * pipeline_parallel_size != world_size:
        raise ValueError(
            f"tensor_parallel_size x pipeline_parallel_size must be {world_size}, the number of "
            f"processes that torchrun has started, got {tensor_parallel_size} x "
            f"{pipeline_parallel_size}"
        )


def _torchrun_store() -> Any:
    """The store of torchrun's agent. Every process is a client of it."""
    env = os.environ
    rank = int(os.environ["RANK"])
    is_agents = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        env["MASTER_ADDR"],
        int(env["MASTER_PORT"]),
        None,
        rank == 0 and not is_agents,
        timedelta(seconds=START_TIMEOUT_S),
        wait_for_workers=False,
    )
    return dist.PrefixStore(f"vllm-from-scratch/{env.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _launch_with_torchrun(num_ranks: int, num_threads: int) -> StartedWorkers:
    meeting = _torchrun_store()
    if meeting.add("engines", 1) > 1:
        raise ValueError("cannot start a second engine: torchrun's processes are workers of one")
    family, _, _, _, address = socket.getaddrinfo(
        os.environ["MASTER_ADDR"], 0, type=socket.SOCK_STREAM
    )[0]
    host = str(address[0])
    links = [start_process(0)]
    with socket.create_server((host, 0), family=family) as server:
        secret = secrets.token_hex(16)
        endpoint = {"host": host, "port": server.getsockname()[1], "secret": secret}
        meeting.set("engine", json.dumps(endpoint))
        links += _accept(server, secret, num_ranks)
    store = _make_store(host) if num_ranks > 1 else None
    own_hosts = [host] + [""] * (num_ranks - 1)
    return StartedWorkers(links, own_hosts, store, host, num_threads)


def _torchrun_threads(num_parameters: int, device: torch.device) -> int:
    """The number of threads. torchrun sets 1 unless the user sets it: too few with more cores."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        return torch.get_num_threads()
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    available = max(1, (psutil.cpu_count(logical=False) or 1) // num_local)
    return num_threads_of(num_parameters, device, available)


def _accept(server: socket.socket, secret: str, num_ranks: int) -> list[Link]:
    """Accept two connections from each rank except 0. Reject a caller without the secret."""
    server.settimeout(START_TIMEOUT_S)
    found: dict[tuple[int, str], Channel] = {}
    while len(found) < 2 * (num_ranks - 1):
        sock, _ = server.accept()
        sock.settimeout(10.0)
        channel = Channel(sock)
        try:
            hello = json.loads(channel.receive())
            if not hmac.compare_digest(hello["secret"], secret):
                raise ValueError
        except (ChannelClosed, ValueError, KeyError, TypeError):
            channel.close()
            continue
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found[hello["rank"], hello["name"]] = channel
    ranks = range(1, num_ranks)
    return [Link(rank, found[rank, "channel"], found[rank, "lifeline"]) for rank in ranks]


def serve_if_not_first() -> None:
    """Under torchrun, serve as a worker of rank 0's engine on every other rank, then exit."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        return
    from common.parallel.worker import serve

    endpoint = json.loads(_torchrun_store().get("engine"))
    ends = []
    for name in ("channel", "lifeline"):
        sock = socket.create_connection((endpoint["host"], endpoint["port"]), START_TIMEOUT_S)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ends.append(Channel(sock))
        ends[-1].send(
            json.dumps({"secret": endpoint["secret"], "rank": rank, "name": name}).encode()
        )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver to answer
    serve(ends[0], Lifeline(ends[1].sock, parent=None))
    raise SystemExit(0)
