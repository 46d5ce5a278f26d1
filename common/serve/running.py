"""Run the server: from the parsed command line to shutdown.

See common/serve/README.md"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn

from common.engine_config import EngineConfig
from common.requests.gc_utils import freeze_gc_heap
from common.serve.app import ServeConfig, make_app
from common.serve.async_llm import AsyncLLM
from common.serve.gate import Gate, GateConfig

logger = logging.getLogger(__name__)
KEEP_ALIVE_SECONDS = 65  # proxies keep a connection for 60
LAST_WORDS_SECONDS = 5  # for clients to read their answers, at the end
CUT_SHORT = 3  # exit code: some requests were ended before their end
WAITING_BATCHES = 4  # by default, 4 * `max_num_seqs` sequences may wait
KV_EVENTS_HOLD = "anyone who can reach it reads the token ids and salts of all prompts"
CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"  # for the shipped checkpoint
SWITCH_S = 0.0005  # how long the engine's thread may hold Python's lock while the loop wants it


class DrainingServer(uvicorn.Server):
    """A server that drains on the first signal: new requests are refused, running ones may finish,
    and those unfinished after `drain_seconds` get an error. A second signal ends it immediately."""

    def __init__(self, llm: AsyncLLM, gate: Gate, drain_seconds: float) -> None:
        config = uvicorn.Config(
            gate,
            ws="none",
            lifespan="off",
            log_level="warning",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        )
        super().__init__(config)
        self.llm = llm
        self.gate = gate
        self.drain_seconds = drain_seconds
        self.num_cut_short = 0
        self._draining: asyncio.Task | None = None

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
        self.llm.abort_all("the server is shut down")
        self.should_exit = True


async def serve(args: argparse.Namespace, settings: dict[str, Any], listener: socket.socket) -> int:
    """Serve until a signal, and return the exit code. Raises what `AsyncLLM` does."""
    name = args.served_model_name or _name(args.model)
    _print_line(f"loading {name} ...")
    template_file = args.chat_template or (CHAT_TEMPLATE if args.model is None else None)
    template = template_file and template_file.read_text(encoding="utf-8")
    # The loop and the engine share Python's lock. Its default of 5 ms is too long for the loop.
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
    freeze_gc_heap()
    max_waiting = args.max_waiting
    if max_waiting is None:
        batch = EngineConfig.__dataclass_fields__["max_num_seqs"].default
        max_waiting = WAITING_BATCHES * settings.get("max_num_seqs", batch)
    llm = await asyncio.to_thread(AsyncLLM, args.model, max_waiting=max_waiting, **settings)
    kv_events = None
    try:
        if args.kv_events is not None:
            from common.serve.kv_events import KVEvents

            kv_events = await llm.call(KVEvents, args.kv_events, args.kv_events_replay)
            _print_line(f"KV events are at {kv_events.publisher.endpoint} ({KV_EVENTS_HOLD})")
        gate_config = GateConfig(
            host=args.host,
            api_key=args.api_key or None,
            max_body_bytes=args.max_body_bytes,
            allowed_hosts=tuple(args.allowed_host),
            allowed_origins=tuple(args.allowed_origin),
            metrics_need_key=not args.metrics_without_key,
        )
        config = ServeConfig(
            model_name=name,
            gate=gate_config,
            chat_template=template,
            tool_call_parser=args.tool_call_parser,
            reasoning_parser=args.reasoning_parser,
            adapter_root=args.adapter_root,
        )
        _, gate = make_app(llm, config)
        server = DrainingServer(llm, gate, args.drain_seconds)
        listener.listen()  # from now on connections wait for the server
        _print_addresses(gate_config, name, listener)
        await server.serve(sockets=[listener])
        return CUT_SHORT if server.num_cut_short else 0
    finally:
        if kv_events is not None and llm.death_reason is None:
            await llm.call(lambda engine: kv_events.close())
        await asyncio.to_thread(llm.close)


def _name(model: str | None) -> str:
    return "tiny" if model is None else Path(model).name if Path(model).is_dir() else model


def _print_addresses(gate: GateConfig, name: str, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    _print_line(f"{name} is served at http://{address}/v1 until Ctrl-C")
    _print_line(f"  watch it, and try it, at http://{address}/")
    _print_line(f"  {_open_access_lines(gate)}")


def _open_access_lines(gate: GateConfig) -> str:
    """Return a line that says which prompts and answers others can read."""
    if gate.api_key is not None:
        return "open to the key: every prompt and answer, by GET /events"
    if gate.is_local:
        return "no key: programs on this machine can send prompts; each page reads its own only"
    return "no key: anyone who can reach this machine can send prompts; GET /events is off"


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
