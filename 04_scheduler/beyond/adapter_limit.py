"""A limit on the number of different LoRA adapters in a batch, because the device holds only that
many.

A request whose adapter is not in the batch is skipped until an adapter leaves the batch; when the
request has aged, admission stops at it (`policy_queue.py`). So requests for a running adapter
cannot overtake it forever, and every adapter is served. Chapter 1's scheduler never skips a
request: there admission stops immediately. SGLang groups by adapter when it picks from the queue;
vLLM skips requests, as here.

See 04_scheduler/beyond/ADAPTERS.md#what-has-the-scheduler-to-do-with-it"""

from __future__ import annotations

from typing import cast
from weakref import proxy

from base_scheduler import BaseScheduler, SchedulerPlugin
from prefix_cache import extra_keys_of
from request import Request, check_integers


class MaxLoRAs(SchedulerPlugin):
    """At most `max_loras` different adapters run at the same time. A request names its adapter in
    its extra keys, `("lora", id)`; requests without one are not limited. Raises `ValueError` below
    1."""

    scheduler: BaseScheduler

    def __init__(self, max_loras: int) -> None:
        check_integers(1, max_loras=max_loras)
        self.max_loras = max_loras
        self._adapters: dict[str, str | int] = {}  # of running requests, by request id
        self._taken: set[str | int] = set()  # the same adapters

    def attach(self, scheduler: BaseScheduler) -> None:
        self.scheduler = cast("BaseScheduler", proxy(scheduler))

    @staticmethod
    def adapter_of(request: Request) -> str | int | None:
        return dict(extra_keys_of(request)).get("lora")

    def begin_step(self) -> None:
        """Drop the adapters of requests that finished or were preempted."""
        if self._adapters:
            running = self.scheduler.running
            self._adapters = {r: a for r, a in self._adapters.items() if r in running}
            self._taken = set(self._adapters.values())

    def can_start(self, request: Request) -> bool:
        adapter = self.adapter_of(request)
        taken = self._taken
        return adapter is None or adapter in taken or len(taken) < self.max_loras

    def on_start(self, request: Request) -> None:
        if (adapter := self.adapter_of(request)) is not None:
            self._adapters[request.request_id] = adapter
            self._taken.add(adapter)

    def check(self) -> None:
        running = map(self.adapter_of, self.scheduler.running.values())
        assert {adapter for adapter in running if adapter is not None} <= self._taken
        assert len(self._taken) <= self.max_loras
