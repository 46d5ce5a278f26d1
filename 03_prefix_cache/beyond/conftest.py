"""The real Mooncake store, started while other tests run: to start it mostly sleeps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import pytest

from mooncake_master import MooncakeMaster, MooncakeUnavailableError
from mooncake_pool import MooncakePool

WAIT_S = 30.0  # never waited for, unless a test fails
Started = TypeVar("Started")


@dataclass
class MooncakeStore:
    """A master to use, with two clients and one that nobody has used, and a master to kill. All of
    them are on their way."""

    master: Future[MooncakeMaster]
    doomed: Future[MooncakeMaster]
    near: Future[MooncakePool]
    far: Future[MooncakePool]
    cold: Future[MooncakePool]


def drop(pool: MooncakePool) -> None:
    """Close it without the second that leaving a store in good order takes."""
    pool._client.process.kill()
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def mooncake_store(request: pytest.FixtureRequest) -> Iterator[MooncakeStore | None]:
    """One for all tests, if one of them wants it. Begun with the first test of the room."""
    wanted = {"master", "doomed", "near", "far", "cold"}
    if not any(wanted & set(getattr(item, "fixturenames", ())) for item in request.session.items):
        yield None
        return
    with ThreadPoolExecutor() as threads:
        master, doomed = threads.submit(MooncakeMaster), threads.submit(MooncakeMaster)

        def join(segment_nbytes: int) -> MooncakePool:
            return MooncakePool(
                master.result().address, segment_nbytes, "127.0.0.1", WAIT_S, WAIT_S
            )

        # All memory of the store is the near one's, so what `far` reads has crossed processes.
        near, far, cold = [threads.submit(join, nbytes) for nbytes in (64 << 20, 0, 0)]
        store = MooncakeStore(master, doomed, near, far, cold)
        yield store
    for pool in (store.near, store.far, store.cold):
        if pool.exception() is None:
            drop(pool.result())
    for each in (master, doomed):
        if each.exception() is None:
            each.result().process.kill()
            each.result().stop()


@pytest.fixture
def real_clients_started(mooncake_store: MooncakeStore | None) -> None:
    """For a test that changes the environment: who starts later would find its library."""
    if mooncake_store is not None:
        wait([mooncake_store.near, mooncake_store.far, mooncake_store.cold])


def started(process: Future[Started]) -> Started:
    try:
        return process.result()
    except MooncakeUnavailableError as failure:
        if os.environ.get("VLLM_FS_REQUIRE_MOONCAKE") or os.environ.get("CI"):
            pytest.fail(f"the CI has to test the Mooncake store: {failure}")
        pytest.skip(str(failure))


@pytest.fixture
def master(mooncake_store: MooncakeStore) -> MooncakeMaster:
    return started(mooncake_store.master)


@pytest.fixture
def doomed(mooncake_store: MooncakeStore) -> MooncakeMaster:
    return started(mooncake_store.doomed)


@pytest.fixture
def near(mooncake_store: MooncakeStore) -> MooncakePool:
    return started(mooncake_store.near)


@pytest.fixture
def far(mooncake_store: MooncakeStore) -> MooncakePool:
    return started(mooncake_store.far)


@pytest.fixture
def cold(mooncake_store: MooncakeStore) -> MooncakePool:
    """For one test alone, which may close it."""
    return started(mooncake_store.cold)
