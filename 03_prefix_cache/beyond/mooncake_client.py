"""A client of the Mooncake store that cannot harm its caller.

    engine's process           client's process              elsewhere
    +----------------+  zmq    +---------------------+  TCP  +--------------------------------+
    | MooncakeClient |-------->| library, and memory |<----->| master: which key is where     |
    | (with a limit) |<--------| lent to the store   |<----->| other clients: the bytes       |
    +----------------+         +---------------------+       +--------------------------------+

The library assumes that the store is available. When the master is gone, a call takes 4 s, closing
takes 10 s with Python's global lock held, and a process that ends with a call in flight may crash.
So the library runs in a separate process, which is called with a time limit and killed if it is
late: no store, however broken, costs its caller more than that, once. From then on the client is
down and answers immediately. The price is one more copy of the bytes. (A message is a JSON head
and the bytes. ZeroMQ hides the death of its peer, so the process is asked whether it lives; and it
ends when its standard input is closed, which happens however its owner ends.)

Invariants: a call ends within `timeout_s` of its turn; a client that is down stays down; keys and
values are the caller's, unchanged.

vLLM and SGLang have the library in the engine's process, which lets RDMA read the KV memory without
any copy. Source: Mooncake, arXiv 2407.00079.

See 03_prefix_cache/beyond/README.md"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import zmq

logger = logging.getLogger(__name__)

RPC_FAILED = -900  # the library's code for a master that does not answer
POLL_MS = 50  # how often the process is asked whether it lives
HOW_TO_INSTALL = (
    "Linux on x86-64: pip install mooncake-transfer-engine-non-cuda, and the libraries it wants "
    "with: apt-get install libibverbs1 libnuma1 libcurl4"
)


class MooncakeUnavailableError(RuntimeError):
    """The store cannot be started or reached; the message says what to do."""


@dataclass(frozen=True, slots=True)
class MooncakeAddress:
    """The addresses of a store: `host:port` of the master and of its metadata server."""

    master: str
    metadata: str


def can_connect(address: str, timeout_s: float = 1.0) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except OSError:
        return False
    return True


def end_of_log(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-600:].strip()


class StoreDownError(RuntimeError):
    """The store has failed and is not called any longer."""


class MooncakeClient:
    """This machine's client of the store, usable from any thread, one call at a time.

    Lends `segment_nbytes` of memory to the store (0: none, and then another client must lend some);
    `buffer_nbytes` limits the size of a value. `host` is this machine's name for other clients. The
    first call that fails, or is not answered after `timeout_s`, is the last: this call and all
    later ones raise `StoreDownError` immediately. Raises `MooncakeUnavailableError` if there is no
    store at `address`, or no library.
    """

    def __init__(
        self,
        address: MooncakeAddress,
        segment_nbytes: int = 256 << 20,
        buffer_nbytes: int = 32 << 20,
        timeout_s: float = 5.0,
        host: str = "127.0.0.1",
        start_timeout_s: float = 30.0,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be > 0, got {timeout_s}")
        for endpoint in (address.master, address.metadata):
            if not can_connect(endpoint):  # the library would try for 90 s
                raise MooncakeUnavailableError(f"cannot reach a Mooncake store at {endpoint}")
        self.timeout_s = timeout_s
        self.down_reason: str | None = None
        self._lock = threading.Lock()
        self._log = tempfile.TemporaryFile(prefix="mooncake_client_")  # noqa: SIM115
        self._folder = tempfile.TemporaryDirectory(prefix="mooncake-")
        channel = f"ipc://{self._folder.name}/channel"
        self._socket = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.connect(channel)
        self.process = _start_client_process(channel, self._log)
        metadata_url = f"http://{address.metadata}/metadata"
        setup = [host, metadata_url, segment_nbytes, buffer_nbytes, "tcp", "", address.master]
        try:
            self._call("setup", setup, timeout_s=start_timeout_s)
        except StoreDownError as failure:
            raise MooncakeUnavailableError(
                f"{failure}\nIts log ends: {end_of_log(self._log)}"
            ) from failure

    def locate(self, keys: Sequence[str]) -> list[str]:
        """A client that has the value, for each key up to the first that is not in the store."""
        return self._call("locate", list(keys))[0] if keys else []

    def put(self, key: str, value: bytes) -> bool:
        """Store a value, in the memory that this client lends if there is space. Returns False if
        there is no space. An existing key stays unchanged."""
        return self._call("put", key, value)[0] == 0

    def get(self, key: str) -> bytes | None:
        """Return the value; None if the key does not exist, or the client with the value is
        gone."""
        value = self._call("get", key)[1]
        return value or None

    def remove(self, key: str) -> None:
        self._call("remove", key)

    def _call(
        self, operation: str, argument: object, payload: bytes = b"", timeout_s: float = 0.0
    ) -> tuple[Any, bytes]:
        """Send one call and return its answer. Any failure brings the client down."""
        with self._lock:
            if self.down_reason is not None:
                raise StoreDownError(self.down_reason)
            self._socket.send_multipart([json.dumps([operation, argument]).encode(), payload])
            error = f"the client did not answer {operation!r}"
            if self._has_answered(timeout_s or self.timeout_s):
                head, value = self._socket.recv_multipart()
                error, answer = json.loads(head)
                if error is None:
                    return answer, value
            self.down_reason = error
            self._kill()
        logger.warning("the Mooncake store is not used any longer: %s", error)
        raise StoreDownError(error)

    def _has_answered(self, timeout_s: float) -> bool:
        """Wait for an answer. Returns False if there is none in time, or none will come."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            if self._socket.poll(min(POLL_MS, timeout_s * 1000)):
                return True
        return bool(self._socket.poll(0))

    def _kill(self) -> None:
        self._socket.close(linger=0)
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._folder.cleanup()

    def close(self) -> None:
        """Take the lent memory back, or leave that to the master if it is slow. Can be called
        again."""
        with self._lock:
            if self.down_reason is not None:
                return
            self.down_reason = "the client is closed"
            self._socket.send_multipart([b'["close", null]', b""])
            if not self._has_answered(self.timeout_s):
                logger.warning("the Mooncake client was killed: it was slow to close")
            self._kill()


def _start_client_process(channel: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
    # The library would ask a proxy for the metadata.
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    return subprocess.Popen(
        [sys.executable, __file__, channel],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


# -- the client's process


class _StoreCalls:
    """The calls of the client's process. Each returns `(error, answer, payload)`."""

    def setup(self, arguments: list, _: bytes) -> tuple[str | None, object, bytes]:
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as failure:
            return f"the library does not load: {failure}. {HOW_TO_INSTALL}", None, b""
        self._store = MooncakeDistributedStore()
        host, metadata, segment_nbytes, buffer_nbytes, protocol, devices, master = arguments
        code = self._store.setup(
            host, metadata, segment_nbytes, buffer_nbytes, protocol, devices, master
        )
        self._placement = ReplicateConfig()
        self._placement.preferred_segment = self._store.get_hostname()
        return (f"the store's set-up failed with code {code}" if code else None), code, b""

    def locate(self, keys: list[str], _: bytes) -> tuple[str | None, object, bytes]:
        codes = self._store.batch_is_exist(keys)
        num_found = next((i for i, code in enumerate(codes) if code != 1), len(keys))
        found = self._store.batch_get_replica_desc(keys[:num_found]) if num_found else {}
        nodes: list[str] = []
        for key in keys[:num_found]:
            if not found.get(key):
                break
            memory = found[key][0].get_memory_descriptor()
            nodes.append(memory.buffer_descriptor.transport_endpoint)
        return _error_of(min(codes)), nodes, b""

    def put(self, key: str, value: bytes) -> tuple[str | None, object, bytes]:
        code = self._store.put(key, value, self._placement)
        return _error_of(code), code, b""

    def get(self, key: str, _: bytes) -> tuple[str | None, object, bytes]:
        value = self._store.get(key)
        return (None if value else _error_of(self._store.is_exist(key))), None, value

    def remove(self, key: str, _: bytes) -> tuple[str | None, object, bytes]:
        code = self._store.remove(key, True)
        return _error_of(code), code, b""

    def close(self, _: None, __: bytes) -> tuple[str | None, object, bytes]:
        return None, self._store.close(), b""


def _error_of(code: int) -> str | None:
    return "the master does not answer" if code == RPC_FAILED else None


def _serve(channel: str) -> None:
    """Serve calls until the engine's process has ended in any way."""
    threading.Thread(target=_end_with_owner, daemon=True).start()
    calls = _StoreCalls()
    messages = zmq.Context.instance().socket(zmq.PAIR)
    messages.bind(channel)
    while True:
        head, payload = messages.recv_multipart()
        operation, argument = json.loads(head)
        try:
            error, answer, data = getattr(calls, operation)(argument, payload)
        except Exception as failure:
            error = repr(failure)
            answer = None
            data = b""
        messages.send_multipart([json.dumps([error, answer]).encode(), data])


def _end_with_owner() -> None:
    sys.stdin.buffer.read()
    os._exit(0)  # without the library's clean-up, which can hang


if __name__ == "__main__":
    _serve(sys.argv[1])
