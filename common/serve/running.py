"""Run the server: from the parsed command line to shutdown.

See common/serve/README.md"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import resource
import select
import selectors
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.engine_config import EngineConfig
from common.requests.gc_utils import freeze_gc_heap
from common.serve.app import ServeConfig, make_app
from common.serve.async_llm import AsyncLLM
from common.serve.errors import ApiError
from common.serve.gate import Gate, GateConfig, error_response

logger = logging.getLogger(__name__)
HEADER_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 65  # proxies keep a connection for 60
LAST_WORDS_SECONDS = 5  # for clients to read their answers, at the end
CUT_SHORT = 3  # exit code: some requests were ended before their end
FEW = 8  # connections that are accepted or read in one iteration of the loop
READ_BYTES = 16 << 10  # from a connection in one iteration
SPARE_CHUNKS = 512  # of a body, in addition to one for each `CHUNK_BYTES`
CHUNK_BYTES = 256
BACKLOG = 2048  # connections that the system keeps until they are accepted
PROGRESS_S = 10.0
MAX_OPEN_FILES = 65_536
WAITING_BATCHES = 4  # by default, 4 * `max_num_seqs` sequences may wait
KV_EVENTS_HOLD = "anyone who can reach it reads the token ids and salts of all prompts"
CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"  # for the shipped checkpoint
TRY_IT = "def read_lines(path):\n    with open(path) as"  # the shipped checkpoint continues it well
LITTLE_BLOCKS = 28  # too few for eight prompts of the page, so requests are preempted
SWITCH_S = 0.0005  # how long the engine's thread may hold Python's lock while the loop wants it


class FewChunks(h11.Connection):
    """Refuses a body in many small chunks, because h11 takes 13 us for each, and another request
    waits until it has parsed all that was read: 16 KB can hold 2,700 chunks of one byte."""

    num_spare = 0.0  # chunks that this body may still have

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.num_spare = SPARE_CHUNKS
        elif isinstance(event, h11.Data):
            self.num_spare += len(event.data) / CHUNK_BYTES - event.chunk_end
            if self.num_spare < 0:
                raise h11.RemoteProtocolError("the body has too many small chunks")
        return event


class PatientProtocol(H11Protocol, asyncio.BufferedProtocol):
    """HTTP/1.1 with a timeout: a client must send each request completely within `HEADER_SECONDS`
    of connecting or of its first byte, including the rest of a body that was refused.

    It reads `READ_BYTES` at a time. asyncio's 256 KB can hold 50,000 headers, and h11 parses all of
    them before it finds that they are too many."""

    _timer: asyncio.TimerHandle | None = None
    _buffer = bytearray(READ_BYTES)  # of all connections: what is read is copied immediately

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = FewChunks(h11.SERVER)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def _look(self) -> None:
        is_answered = self.cycle is not None and not self.cycle.response_complete
        if is_answered and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not is_answered and self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._cut_off)

    def _cut_off(self) -> None:
        """Close the connection, unless it has data that the busy loop has not read yet, other than
        the rest of a body that was refused."""
        unheard = select.poll()
        unheard.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        if unheard.poll(0) and self.conn.their_state is not h11.SEND_BODY:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._cut_off)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def send_400_response(self, msg: str) -> None:
        error = ApiError(400, msg)
        if self.conn.num_spare < 0:
            error = ApiError(413, f"the body must have chunks of {CHUNK_BYTES} bytes or more")
        response = error_response(error)
        headers = [*response.raw_headers, (b"connection", b"close")]
        with suppress(h11.LocalProtocolError):  # an answer has begun
            for event in (
                h11.Response(status_code=error.status, headers=headers),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class FewAtOnce(selectors.DefaultSelector):
    """A selector that returns at most `FEW` events, in turns. The loop starts all events of one
    iteration in that iteration, so a thousand simultaneous requests would delay every stream."""

    _begin = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(timeout)
        self._begin = (self._begin + FEW) % max(len(events), 1)
        return (events[self._begin :] + events[: self._begin])[:FEW]


def make_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop for a server and its engine, which share Python's lock. Each system call
    in the loop releases the lock, about ten per iteration, and Python's default of 5 ms until the
    loop gets it back is too long."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
    return asyncio.SelectorEventLoop(FewAtOnce())


def allow_many_connections() -> None:
    """Raise the limit of open files: each connection is one, and the default is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_files = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < max_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, hard))


class DrainingServer(uvicorn.Server):
    """A server that drains on the first signal: new requests are refused, running ones may finish,
    and those unfinished after `drain_seconds` get an error. A second signal ends it immediately."""

    def __init__(
        self, llm: AsyncLLM, gate: Gate, drain_seconds: float, little: AsyncLLM | None = None
    ) -> None:
        config = uvicorn.Config(
            gate,
            http=PatientProtocol,
            ws="none",
            lifespan="off",
            log_level="warning",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=LAST_WORDS_SECONDS,
            backlog=FEW,
        )
        super().__init__(config)
        self.gate = gate
        self.drain_seconds = drain_seconds
        self.llms = [llm] if little is None else [llm, little]
        self.num_cut_short = 0
        self._draining: asyncio.Task | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then set the system's backlog separately: asyncio uses one number both for it and
        for the connections accepted per iteration."""
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.gate.is_draining:
            self.drain_seconds = 0.0
            return
        self.gate.is_draining = True
        # The handler runs in the loop's thread.
        self._draining = asyncio.ensure_future(self._drain())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down, and wait for the tasks of disconnected clients, too."""
        await super().shutdown(sockets)
        await asyncio.gather(*self.server_state.tasks, return_exceptions=True)

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        logger.info("shutting down; requests that may finish: %d", self.gate.num_posts)
        while self.gate.num_posts and loop.time() - begin < self.drain_seconds:
            await asyncio.sleep(0.05)
        self.num_cut_short = self.gate.num_posts
        for llm in self.llms:
            llm.abort_all("the server is shut down")
        self.should_exit = True


async def serve(args: argparse.Namespace, settings: dict[str, Any], listener: socket.socket) -> int:
    """Serve until a signal, and return the exit code. Raises what `AsyncLLM` does."""
    name = args.served_model_name or _name(args.model)
    _print_line(f"loading {name} ...")
    template_file = args.chat_template or (CHAT_TEMPLATE if args.model is None else None)
    template = template_file and template_file.read_text(encoding="utf-8")
    allow_many_connections()
    freeze_gc_heap()
    max_waiting = args.max_waiting
    if max_waiting is None:
        batch = EngineConfig.__dataclass_fields__["max_num_seqs"].default
        max_waiting = WAITING_BATCHES * settings.get("max_num_seqs", batch)
    llm = await asyncio.to_thread(AsyncLLM, args.model, max_waiting=max_waiting, **settings)
    kv_events = little = None
    try:
        if args.model is None:  # the shipped checkpoint, which is small enough for a second engine
            logger.info("loading a second, small engine for the page's switch")
            little = await asyncio.to_thread(
                AsyncLLM, None, max_waiting=max_waiting, **little_settings(settings)
            )
        if args.kv_events is not None:
            from common.serve.kv_events import KVEvents

            kv_events = await llm.call(KVEvents, args.kv_events, args.kv_events_replay)
            _print_line(f"KV events are at {kv_events.publisher.endpoint} ({KV_EVENTS_HOLD})")
        gate_config = GateConfig(
            args.host,
            args.api_key or None,
            args.max_body_bytes,
            allowed_hosts=tuple(args.allowed_host),
            allowed_origins=tuple(args.allowed_origin),
            metrics_need_key=not args.metrics_without_key,
        )
        config = ServeConfig(
            name,
            gate_config,
            template,
            args.tool_call_parser,
            args.reasoning_parser,
            args.adapter_root,
            args.heartbeat_seconds,
        )
        _, gate = make_app(llm, config, little)
        server = DrainingServer(llm, gate, args.drain_seconds, little)
        _print_addresses(args, name, listener)
        progress_log = asyncio.ensure_future(log_progress(llm))
        try:
            await server.serve(sockets=[listener])
        finally:
            progress_log.cancel()
        return CUT_SHORT if server.num_cut_short else 0
    finally:
        if kv_events is not None and llm.death_reason is None:
            await llm.call(kv_events.take_out)
        if little is not None:
            await asyncio.to_thread(little.close)
        await asyncio.to_thread(llm.close)


def little_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the small engine that runs out of memory, for the page's switch."""
    kept = ("device", "dtype", "num_threads")
    return {name: settings[name] for name in kept if name in settings} | {
        "num_blocks": LITTLE_BLOCKS
    }


async def log_progress(llm: AsyncLLM) -> None:
    """Log a line every `PROGRESS_S` seconds in which the engine has run a step."""
    before = llm.stats
    while True:
        await asyncio.sleep(PROGRESS_S)
        now = llm.stats
        if now.num_steps == before.num_steps:
            continue
        looked_up = now.looked_up_tokens - before.looked_up_tokens
        logger.info(
            "prompts %.1f tok/s, outputs %.1f tok/s, running %d, waiting %d, KV blocks in use "
            "%.1f%%, prompt tokens found in the cache %.1f%%",
            (now.prompt_tokens - before.prompt_tokens) / PROGRESS_S,
            (now.output_tokens - before.output_tokens) / PROGRESS_S,
            now.num_running,
            now.num_waiting,
            100 * now.kv_blocks_in_use / max(now.kv_blocks_total, 1),
            100 * (now.cached_tokens - before.cached_tokens) / max(looked_up, 1),
        )
        before = now


def _name(model: str | None) -> str:
    return "tiny" if model is None else Path(model).name if Path(model).is_dir() else model


def _print_addresses(args: argparse.Namespace, name: str, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    key = ' -H "Authorization: Bearer $KEY"' if args.api_key else ""
    _print_line(f"{name} is served at http://{address}/v1 until Ctrl-C")
    _print_line(f"  watch it, and try it, at http://{address}/")
    body = json.dumps({"model": name, "prompt": TRY_IT, "max_tokens": 16, "temperature": 0})
    kind = "-H 'Content-Type: application/json'"
    _print_line(f"  curl http://{address}/v1/completions{key} {kind} -d '{body}'")
    _print_line(f"  {_open_access_lines(GateConfig(args.host, args.api_key or None))}")


def _open_access_lines(gate: GateConfig) -> str:
    """Return a line that says which prompts and answers others can read."""
    if gate.api_key is not None:
        return "open to the key: every prompt and answer, by GET /events"
    if gate.is_local:
        return "no key: programs on this machine can send prompts; each page reads its own only"
    return "no key: anyone who can reach this machine can send prompts; GET /events is off"


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
