"""From the command's flags to a server, and to its end: with an engine that computes nothing."""

from __future__ import annotations

import asyncio
import resource
import selectors
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.lifespan.off import LifespanOff

from common.engine_config import EngineStats
from common.llm import LLM, SamplingParams
from common.serve import running
from common.serve.__main__ import main, parse_args
from common.serve.app import ServeConfig
from common.serve.conftest import TEMPLATE
from common.serve.gate import GateConfig
from common.serve.running import CUT_SHORT, DrainingServer, allow_many_connections, serve


class Engine:
    """The interface of `AsyncLLM` that a server uses."""

    def __init__(self) -> None:
        self.death_reason, self.stats = None, EngineStats()
        self.calls: list[str] = []

    def abort_all(self, reason: str) -> None:
        self.calls.append(f"aborted: {reason}")

    def close(self) -> None:
        self.calls.append("closed")

    async def call(self, method: Any, *arguments: Any) -> Any:
        return method(self, *arguments)


async def drained(
    engines: Any,
    num_posts: int,
    drain_seconds: float,
    ends_after: float | None,
    num_signals: int,
) -> DrainingServer:
    """By a signal, or two, while requests run."""
    gate: Any = SimpleNamespace(is_draining=False, num_posts=num_posts)
    server = DrainingServer(engines[0], gate, drain_seconds, *engines[1:])
    server.handle_exit(15, None)
    assert gate.is_draining and not server.should_exit, "what runs may finish"
    for _ in range(num_signals - 1):
        await asyncio.sleep(0.1)
        server.handle_exit(15, None)
    if ends_after is not None:
        await asyncio.sleep(ends_after)
        assert not server.should_exit and not engines[0].calls
        gate.num_posts = 0
    for _ in range(100):
        if server.should_exit:
            return server
        await asyncio.sleep(0.02)
    raise AssertionError("it does not end")


@pytest.mark.parametrize(
    ("num", "drain_seconds", "ends_after", "num_cut_short", "num_signals"),
    [
        (0, 60, None, 0, 1),
        (2, 60, 0.2, 0, 1),
        (2, 0.2, None, 2, 1),
        (2, 0, None, 2, 1),
        (2, 60, None, 2, 2),
    ],
    ids=["nobody", "who finishes", "who takes too long", "no time", "a second signal"],
)
def test_running_requests_can_finish_in_time(
    num: int,
    drain_seconds: float,
    ends_after: float | None,
    num_cut_short: int,
    num_signals: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    engines = [Engine(), Engine()]
    server = asyncio.run(drained(engines, num, drain_seconds, ends_after, num_signals))
    assert server.num_cut_short == num_cut_short
    assert [engine.calls for engine in engines] == [["aborted: the server is shut down"]] * 2
    assert f"may finish: {num}" in caplog.text


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The arguments of `serve`'s parts; the server ends immediately, and has cut off
    `num_cut_short`."""
    found = SimpleNamespace(engine=Engine(), num_cut_short=0)

    def make_llm(model: str | None, **settings: Any) -> Engine:
        found.model, found.settings = model, settings
        return found.engine

    def make_app(llm: Engine, config: ServeConfig, little: Any) -> tuple[None, None]:
        found.config = config
        return None, None

    class Server:
        def __init__(self, llm: Engine, gate: Any, drain_seconds: float, little: Any) -> None:
            found.drain_seconds, self.num_cut_short = drain_seconds, found.num_cut_short

        async def serve(self, sockets: list[socket.socket]) -> None:
            found.engine.calls.append("served")

    for name, made in ("AsyncLLM", make_llm), ("make_app", make_app), ("DrainingServer", Server):
        monkeypatch.setattr(running, name, made)
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
    flags |= {"heartbeat-seconds": 2, "max-body-bytes": 1000}
    flags |= {"tool-call-parser": "hermes", "reasoning-parser": "olmo3"}
    given = [f"--{name}={value}" for name, value in flags.items()]
    assert run(*given, "--metrics-without-key", num_blocks=9) == 0
    gate = GateConfig("::1", "k", 1000, 30.0, ("a.b",), ("http://a.b",), False)
    template = "é: {{ messages }}"
    expected = ServeConfig(tmp_path.name, gate, template, "hermes", "olmo3", tmp_path / "a", 2.0)
    assert (served.config, served.drain_seconds) == (expected, 3.0)
    assert served.model == str(tmp_path) and served.settings == {"max_waiting": 7, "num_blocks": 9}
    printed = capsys.readouterr().err
    assert f"loading {tmp_path.name} ..." in printed and "Bearer $KEY" in printed
    assert served.engine.calls == ["spared", "served", "closed"]


def test_so_many_wait_unless_it_is_said(served: SimpleNamespace) -> None:
    """Trap 87: without a limit one client's queue is as long as it likes."""
    for settings, limit in ({}, 1024), ({"max_num_seqs": 3}, 12):
        assert run(**settings) == 0
        assert served.settings["max_waiting"] == limit


def test_a_shutdown_ends_within_the_time_that_kubernetes_gives() -> None:
    assert parse_args([]).drain_seconds + running.LAST_WORDS_SECONDS < 30


def test_a_thread_that_does_not_end_keeps_no_process() -> None:
    """Trap 87: SIGTERM ended the server, and Python waited for its threads."""
    script = (
        "import threading, time; from common.serve.__main__ import end\n"
        "threading.Thread(target=time.sleep, args=(100,)).start(); end(3)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 3


@pytest.mark.parametrize(
    ("flags", "name"),
    [((), "tiny"), (("--model=a/b",), "a/b"), (("--served-model-name=c", "--model=a/b"), "c")],
)
def test_a_model_has_a_name(
    served: SimpleNamespace, flags: tuple[str, ...], name: str, capsys: pytest.CaptureFixture
) -> None:
    assert run(*flags, "--api-key=") == 0
    assert served.config.model_name == name and served.config.gate.api_key is None
    assert served.config.chat_template == (None if "--model=a/b" in flags else TEMPLATE)
    printed = capsys.readouterr().err
    assert f'"model": "{name}"' in printed and "Bearer" not in printed
    assert '"temperature": 0' in printed


def test_the_printed_example_gets_a_good_continuation(alone: LLM) -> None:
    """A newcomer's first answer: code that works, and the same each time."""
    params = SamplingParams(temperature=0, max_tokens=16)
    (output,) = alone.generate(running.TRY_IT, params, use_tqdm=False)
    assert output.outputs[0].text.startswith(" fp:\n        return fp.read()\n")
    compile(running.TRY_IT + output.outputs[0].text, "answer", "exec")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port=99999999"], "port 99999999 of 127.0.0.1: ports must be numbers from 0 to 65535"),
        (["--port=-1"], "port -1 of 127.0.0.1: ports must be numbers"),
        (["--host=nowhere.invalid"], "of nowhere.invalid: "),
        (["--host", "x" * 70], "x: "),
    ],
)
def test_a_place_that_is_none_is_a_sentence(
    flags: list[str], says: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(flags) == 2
    printed = capsys.readouterr().err
    assert says in printed and printed.count("\n") == 1 and "Unknown error" not in printed


def test_a_port_in_use_is_a_sentence(capsys: pytest.CaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([f"--port={port}"]) == 2
    printed = capsys.readouterr().err
    assert f"listen on port {port} of 127.0.0.1: Address already in use (another: --" in printed
    assert printed.count("\n") == 1


def test_a_template_that_is_not_there_is_said_before_a_model_is_loaded(
    served: SimpleNamespace, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        run(f"--chat-template={tmp_path / 'nothing'}")
    assert not hasattr(served, "model")


def test_the_exit_code_says_whether_all_could_finish(served: SimpleNamespace) -> None:
    served.num_cut_short = 1
    assert run() == CUT_SHORT == 3 and served.engine.calls[-1] == "closed"


@pytest.mark.parametrize("death_reason", [None, "broken"])
def test_kv_events_end_before_the_engine_does(
    served: SimpleNamespace,
    death_reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """But a dead one is not asked. That prompts can be read there is said at the start: Trap 86."""

    class KVEvents:
        def __init__(self, engine: Engine, endpoint: str, replay: str | None) -> None:
            self.publisher, engine.death_reason = SimpleNamespace(endpoint=endpoint), death_reason
            engine.calls.append(f"tells {endpoint}, {replay}")

        def take_out(self, engine: Engine) -> None:
            engine.calls.append("told")

    monkeypatch.setattr("common.serve.kv_events.KVEvents", KVEvents)
    assert run("--kv-events=a", "--kv-events-replay=b") == 0
    assert "are at a (anyone who can reach it reads the token ids" in capsys.readouterr().err
    notified = [] if death_reason else ["told"]
    closed = ["closed", "closed"]  # and the small engine
    assert served.engine.calls == ["spared", "tells a, b", "served", *notified, *closed]


def test_an_ipv6_address_is_printed_in_brackets(capsys: pytest.CaptureFixture) -> None:
    listener: Any = SimpleNamespace(getsockname=lambda: ("::1", 80, 0, 0))
    running._print_addresses(parse_args([]), "m", listener)
    assert "http://[::1]:80/v1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        (
            [],
            "no key: programs on this machine can send prompts; each page reads its own only",
        ),
        (["--host=0.0.0.0"], "GET /events is off"),
        (["--host=0.0.0.0", "--api-key=k"], "open to the key: every prompt and answer"),
    ],
)
def test_a_line_lists_the_open_endpoints(
    served: SimpleNamespace, flags: list[str], printed: str, capsys: pytest.CaptureFixture
) -> None:
    """Trap 86."""
    assert run(*flags) == 0
    assert printed in capsys.readouterr().err


def test_engine_statistics_are_a_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(running, "PROGRESS_S", 0.05)
    engine: Any = SimpleNamespace(stats=EngineStats(kv_blocks_total=4))

    async def two_lines() -> None:
        task = asyncio.ensure_future(running.log_progress(engine))
        await asyncio.sleep(0.12)
        assert not caplog.records, "idle"
        engine.stats = EngineStats(
            num_steps=3,
            num_running=2,
            prompt_tokens=5,
            output_tokens=1,
            kv_blocks_in_use=1,
            kv_blocks_total=4,
            looked_up_tokens=4,
            cached_tokens=1,
        )
        await asyncio.sleep(0.15)
        task.cancel()

    asyncio.run(two_lines())
    (record,) = caplog.records
    printed = (
        "prompts 100.0 tok/s, outputs 20.0 tok/s, running 2, waiting 0, KV blocks in use 25.0%"
    )
    assert record.getMessage().startswith(printed) and record.getMessage().endswith(" 25.0%")


def test_connections_that_always_have_data_starve_no_other() -> None:
    with running.FewAtOnce() as selector, ExitStack() as stack:
        for _ in range(running.FEW + 1):
            here, there = map(stack.enter_context, socket.socketpair())
            there.send(b"x")
            selector.register(here, selectors.EVENT_READ)
        served = {key.fd for _ in range(3) for key, _ in selector.select(0)}
        assert len(served) == running.FEW + 1


def test_the_lock_is_released_soon() -> None:
    before = sys.getswitchinterval()
    try:
        for given, expected in (0.005, running.SWITCH_S), (0.0001, 0.0001):
            sys.setswitchinterval(given)
            running.make_event_loop().close()
            assert sys.getswitchinterval() == pytest.approx(expected, rel=0.1)
    finally:
        sys.setswitchinterval(before)


def test_between_requests_a_connection_is_kept_for_longer_than_proxies_do() -> None:
    """And a page that asks for another protocol, or an application's life, gets HTTP."""
    server: Any = DrainingServer(Engine(), None, 1)  # pyright: ignore[reportArgumentType]
    server.config.load()
    assert server.config.timeout_keep_alive > 60 and not server.config.ws_protocol_class
    assert server.config.lifespan_class is LifespanOff


def test_as_many_connections_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MAX_OPEN_FILES", 800)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (700, before[1]))
        for _ in range(2):
            allow_many_connections()
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            assert (soft, hard) == (800, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
