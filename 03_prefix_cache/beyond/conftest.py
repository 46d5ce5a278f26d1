"""The real Mooncake store, started while other tests run, because starting is mostly waiting."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import is_found, need
from kv_stores import STORES, FaultyStore
from mooncake_master import MooncakeMaster
from mooncake_pool import MooncakePool

WAIT_S = 30.0  # reached only if a test fails


@dataclass
class MooncakeStore:
    """A master and a client. Both are being started."""

    master: Future[MooncakeMaster]
    near: Future[MooncakePool]


def needs_mooncake(item: pytest.Item) -> bool:
    row = getattr(item, "callspec", None) and item.callspec.params.get("pool")
    return "near" in getattr(item, "fixturenames", ()) or row == "mooncake"


@pytest.fixture(scope="session", autouse=True)
def mooncake_store(request: pytest.FixtureRequest) -> Iterator[MooncakeStore | None]:
    """One store for all tests, if any test needs it. Started with the first test of this folder."""
    if not is_found("Mooncake") or not any(map(needs_mooncake, request.session.items)):
        yield None
        return
    with ThreadPoolExecutor() as threads:
        master = threads.submit(MooncakeMaster)

        def join() -> MooncakePool:
            return MooncakePool(master.result().address, 64 << 20, "127.0.0.1", WAIT_S)

        near = threads.submit(join)
        yield MooncakeStore(master, near)
    if near.exception() is None:
        # Without the second that an orderly exit from a store takes.
        near.result()._client.process.kill()
        near.result().close()
    if master.exception() is None:
        master.result().process.kill()
        master.result().stop()


@pytest.fixture
def real_client_started(mooncake_store: MooncakeStore | None) -> None:
    """For tests that change the environment: a client that starts later finds their library."""
    if mooncake_store is not None:
        wait([mooncake_store.near])


@pytest.fixture
def master(mooncake_store: MooncakeStore) -> MooncakeMaster:
    need("Mooncake")
    return mooncake_store.master.result()


@pytest.fixture
def near(master: MooncakeMaster, mooncake_store: MooncakeStore) -> MooncakePool:
    return mooncake_store.near.result()


@pytest.fixture(params=[*STORES, "mooncake"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FaultyStore]:
    """Each store in turn, with faults that can be chosen; it is emptied at the end."""
    is_mooncake = request.param == "mooncake"  # which belongs to all tests
    store = request.getfixturevalue("near") if is_mooncake else STORES[request.param](tmp_path, 30)
    faulty = FaultyStore(store)
    yield faulty
    faulty.close()
    for name in () if is_mooncake else ("check_invariants", "close"):
        getattr(store, name, bool)()
