"""The master of a Mooncake store on this machine.

The master keeps the index (which key is where) and an HTTP server that knows the clients'
addresses; the bytes are in memory that clients lend. It is a separate program, started here on free
ports and stopped again. In production an operator starts the store, and only its address is needed.

Version 0.3.13 listens on all interfaces, whatever its options, with some of its ports, so use it
only in trusted networks.

Invariants: a master that was returned is ready; one that was stopped is gone."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mooncake_client import (
    HOW_TO_INSTALL,
    MooncakeAddress,
    MooncakeUnavailableError,
    can_connect,
    end_of_log,
)


class MooncakeMaster:
    """`mooncake_master` on free ports of this machine, from construction until `stop`.

    A context manager. `options` are its own command-line options (`-default_kv_lease_ttl=500`).
    Raises `MooncakeUnavailableError` if it is not installed or does not start.
    """

    def __init__(self, options: Sequence[str] = (), start_timeout_s: float = 30.0) -> None:
        program = _find_program()
        self._log = tempfile.TemporaryFile(prefix="mooncake_master_")  # noqa: SIM115
        for _ in range(3):  # another process may take a free port first
            master, metadata, admin = _free_addresses(3)
            self.address = MooncakeAddress(master=master, metadata=metadata)
            self.process = self._start(program, options, [master, metadata, admin])
            if self._is_ready([master, metadata, admin], time.monotonic() + start_timeout_s):
                return
            self.stop()
        raise MooncakeUnavailableError(
            f"cannot start {program}. {HOW_TO_INSTALL}\nIts log ends: {end_of_log(self._log)}"
        )

    def _start(
        self, program: Path, options: Sequence[str], endpoints: list[str]
    ) -> subprocess.Popen[bytes]:
        rpc, metadata, admin = (endpoint.rsplit(":", 1) for endpoint in endpoints)
        command = [str(program), f"-rpc_address={rpc[0]}", f"-rpc_port={rpc[1]}"]
        command += ["-enable_http_metadata_server=true"]
        command += [f"-http_metadata_server_host={metadata[0]}"]
        command += [f"-http_metadata_server_port={metadata[1]}"]
        command += [f"-metrics_host={admin[0]}", f"-metrics_port={admin[1]}", *options]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C reaches only this process, which stops it
        )

    def _is_ready(self, waiting: list[str], deadline: float) -> bool:
        while waiting and time.monotonic() < deadline and self.process.poll() is None:
            waiting = [endpoint for endpoint in waiting if not can_connect(endpoint)]
            time.sleep(0.01)
        return not waiting

    def stop(self) -> None:
        """Stop the master. Can be called again."""
        self.process.terminate()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> MooncakeMaster:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def _find_program() -> Path:
    package = importlib.util.find_spec("mooncake")
    for folder in (package and package.submodule_search_locations) or ():
        program = Path(folder) / "mooncake_master"
        if program.exists():
            return program
    raise MooncakeUnavailableError(f"mooncake is not installed. {HOW_TO_INSTALL}")


def _free_addresses(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses
