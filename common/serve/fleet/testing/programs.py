"""Servers and a router as local processes, each on a free port, ended at the end of a `with` block.

The real router is not a dependency: `pip install vllm-router`, in a separate environment if
necessary, whose program you then name with `VLLM_ROUTER=/path/to/vllm-router`.

See common/serve/fleet/README.md"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[4]
START_SECONDS = 120
HOW_TO_INSTALL = "vllm-router is not installed: pip install vllm-router, or say VLLM_ROUTER=FILE"
_SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def router_program() -> str | None:
    return os.environ.get("VLLM_ROUTER") or shutil.which("vllm-router")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


class Program:
    """A process that serves HTTP; ready when its `/health` succeeds. Its output is kept."""

    def __init__(self, command: Sequence[str], port: int, metrics_port: int | None = None) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._metrics_url = f"http://127.0.0.1:{metrics_port or port}/metrics"
        self._log = tempfile.TemporaryFile(prefix="fleet_")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def wait_until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).is_success:
                    return
            except httpx.HTTPError:
                pass
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"cannot start {self.process.args}:\n{self.output()[-2000:]}")
            time.sleep(0.1)

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the values of `/metrics`, by name and labels."""
        found: dict[str, dict[str, float]] = {}
        for name, labels, value in _SAMPLE.findall(httpx.get(self._metrics_url, timeout=10).text):
            found.setdefault(name, {})[labels] = float(value)
        return found

    def output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


def start_server(*flags: str) -> Program:
    port = free_port()
    return Program([sys.executable, "-m", "common.serve", "--port", str(port), *flags], port)


def start_router(*flags: str) -> Program:
    """Start the real router. Raises `FileNotFoundError` if it is not installed."""
    program = router_program()
    if program is None:
        raise FileNotFoundError(HOW_TO_INSTALL)
    port, metrics_port = free_port(), free_port()
    command = [program, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics_port), "--worker-startup-check-interval", "1"]
    return Program([*command, *flags], port, metrics_port)
