"""`FairThread`: a thread that works for all clients, with one turn at a time for each.

A thread with a plain queue works in order of arrival, so 24 texts of one client delay the next
client by all of them. Here a client's calls wait for its previous call before they enter the queue,
which then holds one call per client. A client is an address: all clients behind a proxy that
forwards no addresses are one, so short and long texts have separate threads, too.

See common/serve/README.md#what-one-client-can-take-from-others"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")
MAX_SHORT = 64 << 10  # characters; tokenizing them takes about 50 ms


class FairThread:
    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._turns = WeakValueDictionary[tuple[object, str], asyncio.Lock]()

    async def run(self, client: str | None, call: Callable[..., T], *arguments: object) -> T:
        """Return `call(*arguments)`, run in the thread when it is the client's turn. None: a call
        without turns, for callers that wait for each call before the next."""
        loop = asyncio.get_running_loop()
        work = partial(call, *arguments)
        if client is None:
            return await loop.run_in_executor(self._executor, work)
        turn = self._turns.setdefault((loop, client), asyncio.Lock())  # a lock belongs to a loop
        async with turn:
            return await loop.run_in_executor(self._executor, work)


SHORT_TEXTS, LONG_TEXTS = FairThread("short texts"), FairThread("long texts")


def text_thread(num_chars: int) -> FairThread:
    """Return the thread that tokenizes and renders texts of this length."""
    return SHORT_TEXTS if num_chars <= MAX_SHORT else LONG_TEXTS
