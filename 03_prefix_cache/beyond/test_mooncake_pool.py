"""The pool on Mooncake: a client's process against a scripted library that hangs, crashes and lies
(`conftest.py`). The real one is in `test_mooncake_engines.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import util
from pathlib import Path

import psutil
import pytest

import mooncake_client
from bounded_loops import as_long_as
from mooncake_client import (
    MooncakeAddress,
    MooncakeClient,
    MooncakeUnavailableError,
    StoreDownError,
)
from mooncake_master import MooncakeMaster
from mooncake_pool import MooncakePool

LIMIT_S = 0.05
LATE_S = 30.0  # a loaded machine's tolerance; what hangs here hangs for longer


@pytest.fixture
def client(address: MooncakeAddress) -> Iterator[MooncakeClient]:
    client = MooncakeClient(address, timeout_s=LATE_S)
    yield client
    client.close()


def test_keys_are_found_up_to_the_first_that_is_missing(client: MooncakeClient) -> None:
    """And a full store is not a failed one; and the library is not sent through a proxy."""
    call = client.call
    for key in ("a", "b"):
        call("put", key, b"value")
    assert call("has", ["unknown", "a"]) == 0 and call("has", ["a", "b", "unknown", "a"]) == 2
    assert call("put", "full", b"value") is False and client.down_reason is None
    assert call("put", "a", b"value") is True and call("get", "full") == b""
    environment = call("get", "environment").decode()
    assert "proxy" not in environment.lower() and "PYTHONPATH" in environment


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.parametrize("trouble", ["hang", "crash", "raise", "rpc", "stands still"])
@pytest.mark.parametrize("operation", ["has", "get", "put"])
def test_after_a_failure_a_store_is_an_empty_one_at_once(
    address: MooncakeAddress, trouble: str, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of many calls at once, each fails, and all together take one limit."""
    pool = MooncakePool(address, timeout_s=LATE_S)
    link = (b"h" * 32, (1, 2))
    client = pool._client
    value = b"x"
    if trouble == "stands still":  # more than a socket's buffer holds
        value = bytes(50_000_000)
        os.kill(client.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, client.process.pid, os.WSTOPPED)
    client.timeout_s = LIMIT_S if trouble in ("hang", "stands still") else LATE_S
    arguments = {"has": (["a", trouble],), "get": (trouble,), "put": (trouble, value)}[operation]
    with ThreadPoolExecutor(40) as threads:
        calls = [threads.submit(client.call, operation, *arguments) for _ in range(40)]
        assert all(isinstance(call.exception(), StoreDownError) for call in calls)
    assert client.process.poll() is not None, "the client's process is left behind"
    assert trouble != "raise" or "as scripted" in pool.down_reason
    assert pool.has([link]) == 0
    assert pool.put(link, b"x") is False
    with pytest.raises(StoreDownError):
        next(pool.get([link]))
    pool.drop(link)
    pool.close()
    assert pool.down_reason and [each.levelname for each in caplog.records] == ["WARNING"]


def test_a_client_that_is_slow_to_close_is_killed_and_stays_closed(client: MooncakeClient) -> None:
    client.call("put", "slow to close", b"x")
    client.timeout_s = LIMIT_S
    client.close()
    client.close()
    assert client.process.poll() is not None
    with pytest.raises(StoreDownError, match="closed"):
        client.call("get", "a")


def test_the_client_process_ends_with_its_owner(address: MooncakeAddress) -> None:
    script = (
        "import os\n"
        "from mooncake_client import MooncakeClient, MooncakeAddress\n"
        f"client = MooncakeClient(MooncakeAddress({address.master!r}, {address.master!r}))\n"
        "print(client.process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    folder = str(Path(mooncake_client.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE)
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(done.stdout))
        for _ in as_long_as(lambda: process.status() != psutil.STATUS_ZOMBIE, seconds=LATE_S):
            time.sleep(0.01)


UNAVAILABLE = {
    **dict.fromkeys(["hang", "crash", "raise", "rpc"], "Its log ends"),
    "no library": r"libibverbs.so.1: no.*apt-get install",
    "no store": "cannot reach a Mooncake store at 127.0.0.1:1",
    "no package": "pip install",
    "another package of that name": "pip install",
    "does not start": r"(?s)apt-get install.*so.1 is missing",
}


@pytest.mark.parametrize("trouble", UNAVAILABLE)
def test_a_store_that_cannot_be_used_is_reported_with_what_to_do(
    address: MooncakeAddress, trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first six are a client's, the last three a master's."""
    if trouble == "no library":
        (tmp_path / "mooncake" / "store.py").write_text("raise ImportError('libibverbs.so.1: no')")
    elif trouble == "no store":
        address = MooncakeAddress(address.master, "127.0.0.1:1")
    elif trouble == "does not start":
        script = tmp_path / "mooncake_master"
        script.write_text("#!/bin/sh\necho libibverbs.so.1 is missing >&2\nexit 127\n")
        script.chmod(0o755)
    spec = util.spec_from_loader("mooncake", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    found = None if trouble == "no package" else spec
    monkeypatch.setattr(util, "find_spec", lambda name: found)
    limit_s = LIMIT_S if trouble == "hang" else LATE_S
    monkeypatch.setattr(mooncake_client, "START_TIMEOUT_S", limit_s)
    with pytest.raises(MooncakeUnavailableError, match=UNAVAILABLE[trouble]):
        if trouble in list(UNAVAILABLE)[:6]:
            MooncakeClient(address, host=trouble)
        MooncakeMaster()
