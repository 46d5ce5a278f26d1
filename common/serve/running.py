"""Run the server: from the parsed command line to shutdown.

See common/serve/README.md"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
import time
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

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.force_exit = self.should_exit  # a second signal does not wait
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, shut down, and wait for the tasks of disconnected clients, too."""
        self.gate.is_draining = True
        logger.info("shutting down; requests that may finish: %d", self.gate.num_posts)
        end = time.monotonic() + self.drain_seconds
        while self.gate.num_posts and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.05)
        self.num_cut_short = self.gate.num_posts
        self.llm.abort_all("the server is shut down")
        self.force_exit = False  # what has ended is sent
        await super().shutdown(sockets)
        await asyncio.gather(*self.server_state.tasks, return_exceptions=True)


async def serve(args: argparse.Namespace, settings: dict[str, Any], listener: socket.socket) -> int:
    """Serve until a signal, and return the exit code. Raises what `AsyncLLM` does."""
    name = "tiny" if args.model is None else args.model
    if args.model is not None and Path(args.model).is_dir():
        name = Path(args.model).name
    name = args.served_model_name or name
    _print_line(f"loading {name} ...")
    template_file = args.chat_template or (CHAT_TEMPLATE if args.model is None else None)
    template = template_file and template_file.read_text(encoding="utf-8")
    # The loop and the engine share Python's lock. Its default of 5 ms is too long for the loop.
    sys.setswitchinterval(SWITCH_S)
    freeze_gc_heap()
    max_num_seqs = settings.get("max_num_seqs", EngineConfig().max_num_seqs)
    max_waiting = WAITING_BATCHES * max_num_seqs if args.max_waiting is None else args.max_waiting
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


def _print_addresses(gate: GateConfig, name: str, listener: socket.socket) -> None:
    """Print where the server is, and which prompts and answers others can read."""
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    _print_line(f"{name} is served at http://{address}/v1 until Ctrl-C")
    _print_line(f"  watch it, and try it, at http://{address}/#key={gate.events_key}")
    if gate.api_key is None:
        who = "programs on this machine" if gate.is_local else "anyone who can reach this machine"
        _print_line(f"  no --api-key: {who} can send prompts")


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
