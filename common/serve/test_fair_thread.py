"""One turn at a time for each client, and a short text that waits for no long one."""

from __future__ import annotations

import asyncio
import threading

from common.serve.fair_thread import MAX_SHORT, FairThread, text_thread


async def test_clients_take_turns() -> None:
    thread = FairThread("test")
    may_go, order = threading.Event(), list[str]()

    def work(name: str) -> str:
        may_go.wait(20)
        order.append(name)
        return name

    def begin(client: str | None, name: str) -> asyncio.Future[str]:
        return asyncio.ensure_future(thread.run(client, work, name))

    calls = [begin("a", f"a{i}") for i in range(4)]
    calls += [begin("b", f"b{i}") for i in range(2)]
    calls += [begin(None, "free"), begin(None, "free")]
    await asyncio.sleep(0.05)
    calls.pop(1).cancel()  # its client has left: the next one has its turn
    may_go.set()
    found = await asyncio.gather(*calls)
    assert order == ["a0", "b0", "free", "free", "a2", "b1", "a3"], order
    assert sorted(found) == sorted(order) and not thread._turns


async def test_a_short_text_waits_for_no_long_one() -> None:
    may_go = threading.Event()
    long = asyncio.ensure_future(text_thread(MAX_SHORT + 1).run("a", may_go.wait, 20))
    try:
        assert await asyncio.wait_for(text_thread(MAX_SHORT).run("a", len, "xy"), 20) == 2
        assert not long.done()
    finally:
        may_go.set()
    assert await long
