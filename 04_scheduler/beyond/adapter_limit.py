"""A limit on the number of different LoRA adapters in a batch, because the device holds only that
many.

A request whose adapter is not in the batch is skipped until an adapter leaves the batch; when the
request has aged, admission stops at it (`policy_queue.py`). So requests for a running adapter
cannot overtake it forever, and every adapter is served. Chapter 1's scheduler never skips a
request: there admission stops immediately. SGLang groups by adapter when it picks from the queue;
vLLM skips requests, as here.

See 04_scheduler/beyond/ADAPTERS.md#what-has-the-scheduler-to-do-with-it"""

from __future__ import annotations

from base_scheduler import SchedulerPlugin
from prefix_cache import extra_keys_of
from request import Request


class MaxLoRAs(SchedulerPlugin):
    """At most `max_loras` different adapters run at the same time. A request names its adapter in
    its extra keys, `("lora", id)`; requests without one are not limited."""

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self._adapters: dict[str, str | int] = {}  # of running requests, by request id

    @staticmethod
    def adapter_of(request: Request) -> str | int | None:
        return dict(extra_keys_of(request)).get("lora")

    def begin_step(self) -> None:
        """Drop the adapters of requests that finished or were preempted."""
        running = self.scheduler.running
        self._adapters = {r: a for r, a in self._adapters.items() if r in running}

    def can_start(self, request: Request) -> bool:
        adapter = self.adapter_of(request)
        taken = set(self._adapters.values())
        return adapter is None or adapter in taken or len(taken) < self.max_loras

    def on_start(self, request: Request) -> None:
        if (adapter := self.adapter_of(request)) is not None:
            self._adapters[request.request_id] = adapter

    def check(self) -> None:
        running = set(map(self.adapter_of, self.scheduler.running.values())) - {None}
        assert running <= set(self._adapters.values())
        assert len(set(self._adapters.values())) <= self.max_loras
