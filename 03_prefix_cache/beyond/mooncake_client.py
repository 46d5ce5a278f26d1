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
down and answers immediately. The price is that the bytes are copied.

zmq carries the calls, and hides a peer that is gone: it waits for another. So the engine's process
asks the operating system whether the client's process lives, and the client's process ends when its
standard input, a pipe from the engine's process, closes.

Invariants: a call ends within `timeout_s` of its turn; a client that is down stays down; keys and
values are the caller's, unchanged; importing this module needs no PyTorch.

vLLM and SGLang have the library in the engine's process, which lets RDMA read the KV memory without
any copy. Source: Mooncake, arXiv 2407.00079.

See 03_prefix_cache/beyond/README.md"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import IO, Any

import msgpack
import zmq

logger = logging.getLogger(__name__)

RPC_FAILED = -900  # the library's code for a master that does not answer
START_TIMEOUT_S = 30.0
BUFFER_NBYTES = 32 << 20  # limits the size of a value
_LOOK_MS = 20  # between two looks at the client's process
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

    Lends `segment_nbytes` of memory to the store (0: none, and then another client must lend some).
    `host` is this machine's name for other clients. The first call that fails, or is not answered
    after `timeout_s`, is the last: this call and all later ones raise `StoreDownError` immediately.
    Raises `MooncakeUnavailableError` if there is no store at `address`, or no library.
    """

    def __init__(
        self,
        address: MooncakeAddress,
        segment_nbytes: int = 256 << 20,
        timeout_s: float = 5.0,
        host: str = "127.0.0.1",
    ) -> None:
        for endpoint in (address.master, address.metadata):
            if not can_connect(endpoint):  # the library would try for 90 s
                raise MooncakeUnavailableError(f"cannot reach a Mooncake store at {endpoint}")
        self.timeout_s = START_TIMEOUT_S
        self.down_reason: str | None = None
        self._lock = threading.Lock()
        self._log = tempfile.TemporaryFile(prefix="mooncake_client_")  # noqa: SIM115
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        metadata = f"http://{address.metadata}/metadata"
        with tempfile.TemporaryDirectory(prefix="mooncake_client_") as folder:  # only its owner's
            endpoint = f"ipc://{folder}/calls"
            self._socket.bind(endpoint)
            self.process = _start_client_process(endpoint, self._log)
            try:
                self.call("setup", host, metadata, segment_nbytes, address.master)
            except StoreDownError as failure:
                raise MooncakeUnavailableError(
                    f"{failure}\nIts log ends: {end_of_log(self._log)}"
                ) from failure
        self.timeout_s = timeout_s

    def call(self, operation: str, *arguments: object) -> Any:
        """Call a method of `_StoreCalls` in the client's process. Any failure brings the client
        down."""
        with self._lock:
            if self.down_reason is not None:
                raise StoreDownError(self.down_reason)
            try:
                return self._ask(operation, *arguments)
            except BaseException as failure:  # after an interrupt, too: the answer would be the
                self.down_reason = str(failure) or repr(failure)  # next call's
                self._kill()
                logger.warning("the Mooncake store is not used any longer: %s", failure)
                raise

    def _ask(self, operation: str, *arguments: object) -> Any:
        deadline = time.monotonic() + self.timeout_s
        self._wait(zmq.POLLOUT, operation, deadline)
        message: Any = msgpack.packb([operation, arguments])
        self._socket.send(message)
        self._wait(zmq.POLLIN, operation, deadline)
        error, answer = msgpack.unpackb(self._socket.recv())
        if error is not None:
            raise StoreDownError(error)
        return answer

    def _wait(self, event: int, operation: str, deadline: float) -> None:
        """Wait until a message can be sent, or received."""
        while not self._socket.poll(_LOOK_MS, event):
            if self.process.poll() is not None:
                raise StoreDownError(f"no answer to {operation!r}: the client's process has exited")
            if time.monotonic() >= deadline:
                raise StoreDownError(f"no answer to {operation!r} in {self.timeout_s:g} s")

    def _kill(self) -> None:
        self._context.destroy(linger=0)
        self.process.kill()
        self.process.communicate()

    def close(self) -> None:
        """Take the lent memory back, or leave that to the master if it is slow. Can be called
        again."""
        with self._lock:
            if self.down_reason is None:
                self.down_reason = "the client is closed"
                try:
                    self._ask("close")
                except StoreDownError as failure:
                    logger.warning("the Mooncake client was killed: %s", failure)
            self._kill()


def _start_client_process(endpoint: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
    # The library would ask a proxy for the metadata.
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    return subprocess.Popen(
        [sys.executable, __file__, endpoint],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


# -- the client's process


class _StoreCalls:
    """The calls of the client's process. An exception brings the client down."""

    def setup(self, host: str, metadata: str, segment_nbytes: int, master: str) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as failure:
            raise RuntimeError(f"the library does not load: {failure}. {HOW_TO_INSTALL}") from None
        self._store = MooncakeDistributedStore()
        code = self._store.setup(host, metadata, segment_nbytes, BUFFER_NBYTES, "tcp", "", master)
        if code:
            raise RuntimeError(f"the store's set-up failed with code {code}")
        self._placement = ReplicateConfig()
        self._placement.preferred_segment = self._store.get_hostname()

    def has(self, keys: list[str]) -> int:
        """How many keys, from the first on, are in the store."""
        codes = self._store.batch_is_exist(keys)
        _checked(min(codes))
        return next((i for i, code in enumerate(codes) if code != 1), len(keys))

    def put(self, key: str, value: bytes) -> bool:
        """Store a value, in the memory that this client lends if there is space. Returns False
        without space. An existing key stays unchanged."""
        return _checked(self._store.put(key, value, self._placement)) == 0

    def get(self, key: str) -> bytes:
        """Return the value, b"" if the key does not exist, or the client with it is gone."""
        value = self._store.get(key)
        if not value:
            _checked(self._store.is_exist(key))
        return value

    def remove(self, key: str) -> None:
        _checked(self._store.remove(key, True))

    def close(self) -> None:
        self._store.close()


def _checked(code: int) -> int:
    if code == RPC_FAILED:
        raise RuntimeError("the master does not answer")
    return code


def _serve(endpoint: str) -> None:
    """Serve calls until the engine's process closes our standard input, or ends in any way."""
    channel = zmq.Context().socket(zmq.PAIR)
    channel.connect(endpoint)
    poller = zmq.Poller()
    poller.register(channel, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    calls = _StoreCalls()
    while sys.stdin.fileno() not in dict(poller.poll()):
        operation, arguments = msgpack.unpackb(channel.recv())
        error = answer = None
        try:
            answer = getattr(calls, operation)(*arguments)
        except Exception as failure:
            error = str(failure) or repr(failure)
        message: Any = msgpack.packb([error, answer])
        channel.send(message)


if __name__ == "__main__":
    try:
        _serve(sys.argv[1])
    finally:
        os._exit(0)  # without the library's clean-up, which can hang
