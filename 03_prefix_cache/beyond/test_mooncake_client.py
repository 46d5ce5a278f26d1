"""The client's process against a library that hangs, crashes and lies: a scripted one, so that
these tests run everywhere; and a machine without the store. The real one is used in
`test_mooncake_pool.py`."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import mooncake_client
from bounded_loops import as_long_as
from mooncake_client import MooncakeClient, StoreDownError
from mooncake_master import MooncakeAddress, MooncakeMaster, MooncakeUnavailableError

LIMIT_S = 0.05
LATE_S = 30.0  # a loaded machine's tolerance; what hangs here hangs for longer, or 100 times
SCRIPTED_LIBRARY = """
import os, time
from types import SimpleNamespace as N

def obey(key):
    if key.startswith("hang"): time.sleep(60)
    if key.startswith("crash"): os._exit(3)
    if key.startswith("raise"): raise RuntimeError("as scripted")
    return -900 if key.startswith("rpc") else 0

class ReplicateConfig:
    preferred_segment = None

class MooncakeDistributedStore:
    def setup(self, host, metadata, segment, buffer, protocol, devices, master):
        self.values = {"environment": repr(sorted(os.environ)).encode()}
        return obey(host)
    def batch_is_exist(self, keys):
        return [obey(key) or int(key in self.values) for key in keys]
    def is_exist(self, key):
        return self.batch_is_exist([key])[0]
    def batch_get_replica_desc(self, keys):
        buffer = N(buffer_descriptor=N(transport_endpoint="somebody"))
        return {key: [N(get_memory_descriptor=lambda: buffer)] for key in keys if key != "gone"}
    def get_hostname(self):
        return "mine"
    def put(self, key, value, config):
        assert config.preferred_segment == "mine"
        code = obey(key) or (-200 if key.startswith("full") else 0)
        if code == 0: self.values.setdefault(key, bytes(value))
        return code
    def get(self, key):
        return b"" if obey(key) else self.values.get(key, b"")
    def remove(self, key, force):
        return 0 if self.values.pop(key, None) is not None else -704
    def close(self):
        return obey("hang" if "slow to close" in self.values else "")
"""


@pytest.fixture
def address(
    real_client_started: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MooncakeAddress]:
    """Where something listens; and the client's process finds the scripted library."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text(SCRIPTED_LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        yield MooncakeAddress(address, address)


@contextmanager
def in_time() -> Iterator[None]:
    """Long before what hangs here would end."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < LATE_S


@pytest.fixture
def client(address: MooncakeAddress) -> Iterator[MooncakeClient]:
    client = MooncakeClient(address, timeout_s=LATE_S)
    yield client
    client.close()


def test_keys_are_located_up_to_the_first_that_is_missing(client: MooncakeClient) -> None:
    """And a full store is not a failed one."""
    for key in ("a", "b", "gone"):
        client.put(key, b"value")
    assert client.locate([]) == client.locate(["unknown", "a"]) == []
    assert client.locate(["a", "b", "unknown", "a"]) == ["somebody"] * 2
    # Taken out of the store between the two questions that it takes.
    assert client.locate(["a", "gone", "b"]) == ["somebody"]
    assert not client.put("full", b"value") and client.down_reason is None
    assert client.put("a", b"value") and client.get("full") is None


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.parametrize("trouble", ["hang", "crash", "raise", "rpc"])
@pytest.mark.parametrize("operation", ["locate", "get", "put"])
def test_after_a_failure_the_client_answers_at_once(
    client: MooncakeClient, trouble: str, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.timeout_s = LIMIT_S if trouble == "hang" else LATE_S
    arguments = {"locate": (["a", trouble],), "get": (trouble,), "put": (trouble, b"x")}[operation]
    with in_time(), pytest.raises(StoreDownError):
        getattr(client, operation)(*arguments)
    assert client.process.poll() is not None, "the client's process is left behind"
    assert trouble != "raise" or "as scripted" in client.down_reason
    with in_time():
        for _ in range(100):
            with pytest.raises(StoreDownError):
                client.locate(["a"])
        client.close()
    assert client.down_reason and [each.levelname for each in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("trouble", ["hangs for many", "does not read", "is slow to close"])
def test_a_client_process_that_stands_still_costs_one_limit(
    client: MooncakeClient, trouble: str
) -> None:
    if trouble == "is slow to close":
        client.put("slow to close", b"x")
    elif trouble == "does not read":
        os.kill(client.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, client.process.pid, os.WSTOPPED)
    client.timeout_s = LIMIT_S
    with in_time(), ThreadPoolExecutor(40) as threads:
        if trouble == "hangs for many":  # not 40 limits
            for call in [threads.submit(client.get, "hang") for _ in range(40)]:
                with pytest.raises(StoreDownError):
                    call.result()
        elif trouble == "does not read":  # the socket's buffer is full long before it has been sent
            with pytest.raises(StoreDownError, match="timed out"):
                client.put("a", bytes(50_000_000))
        client.close()
        client.close()
    assert client.process.poll() is not None
    with pytest.raises(StoreDownError, match=r"timed out|closed"):
        client.get("a")


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


def test_the_library_is_not_sent_through_a_proxy(
    address: MooncakeAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    client = MooncakeClient(address, timeout_s=LATE_S)
    environment = bytes(client.get("environment")).decode()
    client.close()
    assert "proxy" not in environment.lower() and "PYTHONPATH" in environment


@pytest.mark.parametrize("trouble", ["hang", "crash", "raise", "rpc", "no library", "no store"])
def test_a_set_up_that_fails_is_reported(
    address: MooncakeAddress, trouble: str, tmp_path: Path
) -> None:
    limit_s, message = LIMIT_S if trouble == "hang" else LATE_S, "Its log ends"
    if trouble == "no library":
        (tmp_path / "mooncake" / "store.py").write_text("raise ImportError('libibverbs.so.1: no')")
        message = r"libibverbs.so.1: no.*apt-get install"
    elif trouble == "no store":
        with socket.create_server(("127.0.0.1", 0)) as server:
            message = f"127.0.0.1:{server.getsockname()[1]}"
        address = MooncakeAddress(address.master, message)
    with in_time(), pytest.raises(MooncakeUnavailableError, match=message):
        MooncakeClient(address, host=trouble, start_timeout_s=limit_s)
    with pytest.raises(ValueError, match="timeout_s must be > 0, got 0"):
        MooncakeClient(address, timeout_s=0)


# -- a machine without the store


PROGRAMS = {
    "no package": "pip install",
    "another package of that name": "pip install",
    "does not start": r"(?s)apt-get install.*so.1 is missing",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_master_that_cannot_start_is_reported_with_what_to_install(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_loader("mooncake", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    if program == "does not start":
        script = tmp_path / "mooncake_master"
        script.write_text("#!/bin/sh\necho libibverbs.so.1 is missing >&2\nexit 127\n")
        script.chmod(0o755)
    found = None if program == "no package" else spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with in_time(), pytest.raises(MooncakeUnavailableError, match=PROGRAMS[program]):
        MooncakeMaster()
