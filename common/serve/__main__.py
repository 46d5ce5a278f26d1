"""Serve a model over OpenAI's API.

python -m common.serve                                      the shipped checkpoint, on port 8000
python -m common.serve --model DIRECTORY_OR_HUB_ID --api-key SECRET
python -m common.serve --speculative '{"method": "ngram"}' --num-blocks 400

See common/serve/README.md"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import logging
import os
import sys
from pathlib import Path

from common.serve.flags import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    add_engine_flags,
    engine_settings,
)
from common.serve.ports import open_port

WAITING = "sequences; more get a 429 (default: 4 x max_num_seqs)"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
NOT_INSTALLED = "the server needs more packages: pip install 'vllm-from-scratch[server]'"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m common.serve",
        description="Serve a model to whoever speaks OpenAI's API.",
        epilog="Each field of EngineConfig is a flag, too.",
    )
    parser.add_argument("--model", help="directory or hub id (default: the shipped checkpoint)")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: all that this machine has")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one")
    parser.add_argument("--api-key", default=os.environ.get("VLLM_API_KEY"), metavar="KEY")
    parser.add_argument("--metrics-without-key", action="store_true", help="as in vLLM")
    name = "that clients may call this server by: host.docker.internal"
    parser.add_argument("--allowed-host", metavar="NAME", action="append", default=[], help=name)
    url = "of pages that may send requests: http://localhost:3000; *: any"
    parser.add_argument("--allowed-origin", metavar="URL", action="append", default=[], help=url)
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call it")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="instead of the model's")
    no_flag = "as in vLLM; has no effect here"
    parser.add_argument("--enable-auto-tool-choice", action="store_true", help=no_flag)
    by_template = "parse, whatever the chat template says (default: if it has the marks)"
    parser.add_argument("--tool-call-parser", choices=TOOL_CALL_PARSERS, help=by_template)
    parser.add_argument("--reasoning-parser", choices=REASONING_PARSERS, help=by_template)
    parser.add_argument("--max-waiting", type=int, metavar="N", help=WAITING)
    parser.add_argument("--drain-seconds", type=float, default=20.0, metavar="S")
    parser.add_argument("--max-body-bytes", type=int, default=16 << 20, metavar="N")
    parser.add_argument("--kv-events", metavar="ADDRESS", help="tcp://*:5557: told to routers")
    parser.add_argument("--kv-events-replay", metavar="ADDRESS", help="and what they missed")
    parser.add_argument("--adapter-root", type=Path, metavar="DIR", help="adapters over HTTP")
    add_engine_flags(parser.add_argument_group("the engine: see common/engine_config.py"))
    args = parser.parse_args(argv)
    if args.kv_events_replay is not None and args.kv_events is None:
        parser.error("--kv-events-replay needs --kv-events")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    try:
        listener = open_port(args.host, args.port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        address = f"port {args.port} of {args.host}"
        print(f"serve: cannot listen on {address}: {reason} (another: --port)", file=sys.stderr)
        return 2
    try:
        from common.serve.running import serve
    except ModuleNotFoundError as error:
        print(f"serve: {NOT_INSTALLED} ({error.name} is not there)", file=sys.stderr)
        return 2
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(serve(args, engine_settings(args), listener))
    except (ValueError, OSError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def end(code: int) -> None:
    """End the process immediately, even if a thread still works for requests that have ended:
    Python would wait for a pool's threads, which can be tokenizing a text of megabytes."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:  # during loading; later, a signal drains the server
        code = 130
    end(code)
