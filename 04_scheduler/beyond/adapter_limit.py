"""A batch may hold only so many different LoRA adapters: there is room for so many on the device.

A request whose adapter is not among those of the batch waits for one of them to go, and is passed
over meanwhile; when too many have left the queue since it came, the line waits for it
(`policy_queue.py`). So of two adapters each is served: who comes for the one that runs can not
overtake for ever. Chapter 1's scheduler passes over nobody: there the line waits at once.

SGLang groups by adapter when it picks from the queue; vLLM passes over, as here."""

from __future__ import annotations

from typing import cast
from weakref import proxy

from base_scheduler import SchedulerBooks, SchedulerPlugin
from prefix_cache import extra_keys_of
from request import Request, check_integers


class MaxLoRAs(SchedulerPlugin):
    """At most `max_loras` different adapters run at once. A request names its adapter in its extra
    keys, `("lora", id)`; those without one are not held back here. Raises `ValueError` below 1."""

    books: SchedulerBooks

    def __init__(self, max_loras: int) -> None:
        check_integers(1, max_loras=max_loras)
        self.max_loras = max_loras
        self._adapters: dict[str, str | int] = {}  # of those who run, by request id

    def attach(self, books: SchedulerBooks) -> None:
        self.books = cast("SchedulerBooks", proxy(books))

    @staticmethod
    def adapter_of(request: Request) -> str | int | None:
        return dict(extra_keys_of(request)).get("lora")

    def begin_step(self) -> None:
        """Who has ended or was preempted holds nothing any more."""
        if self._adapters:
            running = self.books.running
            self._adapters = {r: a for r, a in self._adapters.items() if r in running}

    def may_start(self, request: Request) -> bool:
        adapter, taken = self.adapter_of(request), set(self._adapters.values())
        return adapter is None or adapter in taken or len(taken) < self.max_loras

    def started(self, request: Request) -> None:
        if (adapter := self.adapter_of(request)) is not None:
            self._adapters[request.request_id] = adapter

    def check(self) -> None:
        running = map(self.adapter_of, self.books.running.values())
        taken = set(self._adapters.values())
        assert {adapter for adapter in running if adapter is not None} <= taken
        assert len(taken) <= self.max_loras
