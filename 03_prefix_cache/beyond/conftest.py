"""Stores for the tests of this folder. Mooncake's library is a scripted one, so that its row runs
everywhere; the real one is in `test_mooncake_engines.py`."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_stores import STORES, FaultyStore
from mooncake_client import MooncakeAddress
from mooncake_pool import MooncakePool

SCRIPTED_LIBRARY = """
import os, time

def obey(key):
    if "hang" in key: time.sleep(60)
    if "crash" in key: os._exit(3)
    if "raise" in key: raise RuntimeError("as scripted")
    return -900 if "rpc" in key else 0

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
    def get_hostname(self):
        return "mine"
    def put(self, key, value, config):
        assert config.preferred_segment == "mine"
        code = obey(key) or (-200 if key == "full" else 0)
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
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeAddress]:
    """Where something listens; and the client's process finds the scripted library."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text(SCRIPTED_LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HTTPS_proxy", "http://127.0.0.1:9")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        yield MooncakeAddress(address, address)


@pytest.fixture(params=[*STORES, "mooncake"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FaultyStore]:
    """Each store in turn, with faults that can be chosen."""
    if request.param == "mooncake":
        store = MooncakePool(request.getfixturevalue("address"), timeout_s=30.0)
    else:
        store = STORES[request.param](tmp_path, 30)
    faulty = FaultyStore(store)
    yield faulty
    faulty.hold.set()
    getattr(store, "close", bool)()
