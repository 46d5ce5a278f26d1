"""Communication between the ranks of an engine while a model runs.

    all_reduce     the sum over the ranks of a stage, on each of them
    all_gather     the parts of the ranks of a stage side by side, on each of them
    send, receive  hidden states, from a stage to the next
    min_across     the smallest number that any rank has

Groups of processes are objects of one engine. `torch.distributed.init_process_group` would make the
default group of the whole process, which two engines would share; nothing is global here. Every
group has a separate prefix in the store that the ranks meet at.

All ranks of a group must make the same calls in the same order, with tensors of the same shape. A
rank enters a collective because a plan says so, never to wait for work, so idle time cannot cause a
timeout.

`all_reduce` is bitwise identical on every rank: each part of the tensor is summed by one rank and
sent to the others. The order of addition depends on the tensor's size, so a row's last bits differ
between batches (except with two ranks: a + b is b + a).

The transport is Gloo on a CPU, over the loopback interface, and NCCL on CUDA, where nothing here
waits for the device.

See common/parallel/README.md#tensor-parallel"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from common.models.ranks import Ranks

dist: Any = torch.distributed  # its type stubs lack what is needed here


class CollectiveError(RuntimeError):
    """A rank did not answer in time or exited. The message names this rank and the operation."""


class Collectives:
    """The collective operations of one rank. Raises `CollectiveError`.

    `connect` makes the groups; without them nothing is sent."""

    def __init__(self, ranks: Ranks | None = None, device: torch.device | str = "cpu") -> None:
        self.ranks = ranks or Ranks()
        self.device = device
        self._world_group: Any = None
        self._tp_group: Any = None  # its ranks; None: there is one
        self._pp_group: Any = None  # the stages' ranks with this `tp_rank`; None: there is one
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._stores: list[Any] = []  # a group's store must outlive it

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of this stage. `tensor`, contiguous, is overwritten."""
        if self._tp_group is not None:
            with self._named("all_reduce"):
                self._tp_group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the ranks' parts by rank: [..., size] -> [..., tensor_parallel_size * size]."""
        if self._tp_group is None:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.ranks.tensor_parallel_size)]
        with self._named("all_gather"):
            self._tp_group.allgather([parts], [tensor]).wait()
        return torch.cat(parts, dim=-1)

    def min_across(self, value: int) -> int:
        """Return the minimum over all ranks of all stages."""
        if self._world_group is None:
            return value
        number = torch.tensor([value], dtype=torch.int64)
        with self._named("min_across"):
            self._world_group.allreduce([number], dist.ReduceOp.MIN).wait()
        return int(number)

    def send(self, tensor: torch.Tensor) -> None:
        """Send to the next stage's rank with the same `tp_rank`. Waits for that rank only if more
        steps are in flight than there are stages. The tensor must not be overwritten."""
        with self._named("send"):
            work = self._pp_group.send([tensor], self.ranks.stage + 1, 0)
            self._sent.append((work, tensor))  # kept alive until it is sent
            while len(self._sent) > self.ranks.pipeline_parallel_size:
                self._sent[0][0].wait()
                self._sent.popleft()

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Wait for the next tensor from the previous stage and return it."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        with self._named("receive"):
            self._pp_group.recv([tensor], self.ranks.stage - 1, 0).wait()
        return tensor

    @classmethod
    def connect(
        cls, ranks: Ranks, store: Any, device: torch.device, timeout_s: float
    ) -> Collectives:
        """Meet the other ranks, which are on this machine, at `store`, a
        `torch.distributed.Store`. Returns when all have joined. `timeout_s` applies to each
        operation."""
        self = cls(ranks, device)
        timeout = timedelta(seconds=timeout_s)

        def group(name: str, rank: int, size: int, is_nccl: bool) -> Any:
            if size == 1:
                return None
            self._stores.append(dist.PrefixStore(name, store))
            return _make_group(self._stores[-1], rank, size, timeout, is_nccl)

        on_gpu = device.type == "cuda"
        tp_size = ranks.tensor_parallel_size
        num_stages = ranks.pipeline_parallel_size
        with self._named("connect"):
            # Numbers are on the CPU, so this one is Gloo's everywhere.
            self._world_group = group("world", ranks.rank, ranks.world_size, False)
            self._tp_group = group(f"tp {ranks.stage}", ranks.tp_rank, tp_size, on_gpu)
            self._pp_group = group(f"pp {ranks.tp_rank}", ranks.stage, num_stages, on_gpu)
        return self

    def close(self) -> None:
        """Close the groups. Tensors sent and not yet received can be lost."""
        self._world_group = self._tp_group = self._pp_group = None
        self._sent.clear()
        self._stores.clear()

    @contextmanager
    def _named(self, operation: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch.distributed's errors are such, timeouts included
            reason = str(error).partition("\n")[0]
            raise CollectiveError(
                f"rank {self.ranks.rank} of {self.ranks.world_size}: {operation} failed, another "
                f"rank exited or is late: {reason}"
            ) from error


def _make_group(store: Any, rank: int, size: int, timeout: timedelta, is_nccl: bool) -> Any:
    if is_nccl:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, size, options)
