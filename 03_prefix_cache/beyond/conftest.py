"""The real Mooncake store, started while other tests run, because starting is mostly waiting."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from conftest import is_found, need
from kv_stores import STORES, FaultyStore
from mooncake_master import MooncakeMaster
from mooncake_pool import MooncakePool

WAIT_S = 30.0  # reached only if a test fails


def needs_mooncake(item: pytest.Item) -> bool:
    return hasattr(item, "callspec") and item.callspec.params.get("pool") == "mooncake"


@pytest.fixture(scope="session", autouse=True)
def real_store(request: pytest.FixtureRequest) -> Iterator[Future[MooncakePool] | None]:
    """One store for all tests, if any test needs it. Started with the first test of this folder."""
    if not is_found("Mooncake") or not any(map(needs_mooncake, request.session.items)):
        yield None
        return
    masters: list[MooncakeMaster] = []

    def start() -> MooncakePool:
        masters.append(MooncakeMaster())
        return MooncakePool(masters[0].address, 64 << 20, "127.0.0.1", WAIT_S)

    with ThreadPoolExecutor() as thread:
        store = thread.submit(start)
        yield store
    if store.exception() is None:
        # Without the second that an orderly exit from a store takes.
        store.result()._client.process.kill()
        store.result().close()
    for master in masters:
        master.process.kill()
        master.stop()


@pytest.fixture
def real_client_started(real_store: Future[MooncakePool] | None) -> None:
    """For tests that change the environment: a client that starts later finds their library."""
    if real_store is not None:
        wait([real_store])


@pytest.fixture(params=[*STORES, "mooncake"])
def pool(
    request: pytest.FixtureRequest, tmp_path: Path, real_store: Future[MooncakePool] | None
) -> Iterator[FaultyStore]:
    """Each store in turn, with faults that can be chosen; it is emptied at the end."""
    if is_mooncake := request.param == "mooncake":  # which belongs to all tests
        need("Mooncake")
    store = real_store.result() if is_mooncake else STORES[request.param](tmp_path, 30)
    faulty = FaultyStore(store)
    yield faulty
    faulty.close()
    for name in () if is_mooncake else ("check_invariants", "close"):
        getattr(store, name, bool)()
