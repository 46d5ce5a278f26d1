"""From the command's flags to a server, and to its end: with an engine that computes nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.engine_config import EngineStats
from common.serve import running
from common.serve.__main__ import main, parse_args
from common.serve.app import ServeConfig
from common.serve.conftest import TEMPLATE
from common.serve.fleet.testing.programs import free_port
from common.serve.gate import GateConfig
from common.serve.running import CUT_SHORT, DrainingServer, serve


class Engine:
    """The interface of `AsyncLLM` that a server uses."""

    def __init__(self) -> None:
        self.death_reason = None
        self.stats = EngineStats()
        self.calls: list[str] = []

    def abort_all(self, reason: str) -> None:
        self.calls.append(f"aborted: {reason}")

    def close(self) -> None:
        self.calls.append("closed")

    async def call(self, method: Any, *arguments: Any) -> Any:
        return method(self, *arguments)


@pytest.mark.parametrize(
    ("num", "drain_seconds", "does_finish", "num_signals"),
    [(0, 60, False, 1), (2, 60, True, 1), (2, 0.2, False, 1), (2, 0, False, 1), (2, 60, False, 2)],
    ids=["nobody", "who finishes", "who takes too long", "no time", "a second signal"],
)
async def test_running_requests_can_finish_in_time(
    num: int,
    drain_seconds: float,
    does_finish: bool,
    num_signals: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("uvicorn.Server.shutdown", lambda *_: asyncio.sleep(0))
    engine: Any = Engine()
    gate: Any = SimpleNamespace(is_draining=False, num_posts=num)
    server = DrainingServer(engine, gate, drain_seconds)
    server.handle_exit(15, None)
    assert server.should_exit
    shutdown = asyncio.ensure_future(server.shutdown())
    await asyncio.sleep(0.05)
    assert gate.is_draining
    if does_finish:
        assert not shutdown.done() and not engine.calls, "what runs may finish"
        gate.num_posts = 0
    for _ in range(num_signals - 1):
        server.handle_exit(15, None)
    await asyncio.wait_for(shutdown, 20)
    assert server.num_cut_short == gate.num_posts
    assert engine.calls == ["aborted: the server is shut down"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The arguments of `serve`'s parts; the server ends at once, with `num_cut_short`."""
    found = SimpleNamespace(engine=Engine(), num_cut_short=0)

    def make_llm(model: str | None, **settings: Any) -> Engine:
        found.model = model
        found.settings = settings
        return found.engine

    def make_app(llm: Engine, config: ServeConfig) -> tuple[None, None]:
        found.config = config
        return None, None

    def make_server(llm: Engine, gate: Any, drain_seconds: float) -> Any:
        found.drain_seconds = drain_seconds
        end = partial(asyncio.sleep, 0)
        return SimpleNamespace(serve=lambda sockets: end(), num_cut_short=found.num_cut_short)

    monkeypatch.setattr(running, "AsyncLLM", make_llm)
    monkeypatch.setattr(running, "make_app", make_app)
    monkeypatch.setattr(running, "DrainingServer", make_server)
    monkeypatch.setattr(running, "freeze_gc_heap", lambda: found.engine.calls.append("spared"))
    return found


def run(*flags: str, **settings: Any) -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return asyncio.run(serve(parse_args([*flags]), settings, listener))


def test_every_flag_arrives_where_it_counts(
    served: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = {"model": tmp_path, "host": "::1", "api-key": "k", "max-waiting": 7, "drain-seconds": 3}
    flags |= {"chat-template": tmp_path / "t", "adapter-root": tmp_path / "a"}
    (tmp_path / "t").write_text("é: {{ messages }}", encoding="utf-8")
    flags |= {"allowed-host": "a.b", "allowed-origin": "http://a.b"}
    flags |= {"max-body-bytes": 1000}
    flags |= {"tool-call-parser": "hermes", "reasoning-parser": "deepseek_r1"}  # as at vLLM
    given = [f"--{name}={value}" for name, value in flags.items()]
    given += ["--metrics-without-key", "--enable-auto-tool-choice"]
    assert run(*given, num_blocks=9) == 0
    gate = GateConfig("::1", "k", 1000, 30.0, ("a.b",), ("http://a.b",), False)
    own = "é: {{ messages }}", "hermes", "deepseek_r1", tmp_path / "a"
    assert served.config == ServeConfig(tmp_path.name, gate, *own)
    assert (served.model, served.drain_seconds) == (str(tmp_path), 3.0)
    assert served.settings == {"max_waiting": 7, "num_blocks": 9}
    printed = capsys.readouterr().err
    assert f"loading {tmp_path.name} ..." in printed
    assert served.engine.calls == ["spared", "closed"]


def test_so_many_wait_unless_it_is_said(served: SimpleNamespace) -> None:
    """Trap 87: without a limit one client's queue is as long as it likes. And the exit code says
    whether all could finish, in the time that Kubernetes gives."""
    for settings, limit in ({}, 1024), ({"max_num_seqs": 3}, 12):
        assert run(**settings) == 0
        assert served.settings["max_waiting"] == limit
    served.num_cut_short = 1
    assert run() == CUT_SHORT == 3 and served.engine.calls[-1] == "closed"
    assert parse_args([]).drain_seconds + running.LAST_WORDS_SECONDS < 30


def test_a_thread_that_does_not_end_keeps_no_process() -> None:
    """Trap 87: SIGTERM ended the server, and Python waited for its threads."""
    script = (
        "import threading, time; from common.serve.__main__ import end\n"
        "threading.Thread(target=time.sleep, args=(100,)).start(); end(3)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 3


@pytest.mark.parametrize(
    ("flags", "name", "printed"),
    [
        ([], "tiny", "no --api-key: programs on this machine can send prompts"),
        (
            ["--api-key=", "--model=a/b", "--host=0.0.0.0"],
            "a/b",
            "no --api-key: anyone who can reach this machine",
        ),
        (
            ["--served-model-name=c", "--api-key=k"],
            "c",
            "watch it, and try it, at http://127.0.0.1:",
        ),
    ],
)
def test_a_model_has_a_name_and_a_line_lists_the_open_endpoints(
    served: SimpleNamespace, flags: list[str], name: str, printed: str, capsys: Any
) -> None:
    """Trap 86."""
    assert run(*flags) == 0 and printed in capsys.readouterr().err
    assert served.config.model_name == name
    assert served.config.gate.api_key == ("k" if name == "c" else None)
    assert served.config.chat_template == (None if name == "a/b" else TEMPLATE)


def connector(**fields: Any) -> str:
    store = {"kind": "mooncake", "master": "127.0.0.1:1", "metadata": "127.0.0.1:1"}
    return f"--kv-connector={json.dumps(store | fields)}"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port=99999999"], "port 99999999 of 127.0.0.1: bind(): port must be 0-65535"),
        (["--port=TAKEN"], " of 127.0.0.1: Address already in use (another: --"),
        (["--host=nowhere.invalid"], "of nowhere.invalid: "),
        (["--host", "x" * 70], "x: "),
        (["--port=0", "--chat-template=/nothing"], "No such file or directory: '/nothing'"),
        (["--port=0", "--model=/nowhere"], "/nowhere"),
        (["--port=0", connector(kind="nixl")], "must have kind"),
        (["--port=0", '--kv-connector={"kind": "mooncake", "master": "x"}'], "'metadata'"),
        (["--port=0", connector(port=1)], "'port'"),
        (["--port=0", connector(master=f"127.0.0.1:{free_port()}")], "reach a Mooncake store"),
    ],
)
def test_a_flag_that_is_wrong_is_a_sentence(
    flags: list[str], says: str, capsys: pytest.CaptureFixture
) -> None:
    """Before a model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main([flag.replace("TAKEN", port) for flag in flags]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert says in printed[-1] and "Unknown error" not in printed[-1] and len(printed) <= 2
