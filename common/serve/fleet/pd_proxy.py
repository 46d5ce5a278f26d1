"""Prefill and decode in two servers: a proxy that speaks vLLM's protocol of two requests.

    python -m common.serve.fleet.pd_proxy --prefill URL --decode URL --port 8000

    client --> proxy --1--> prefill server    the request with max_tokens=1; its token is unused,
                       |                      but at its end the prompt's full blocks are stored
                       2--> decode server     the unchanged request, whose answer the client gets:
                                              loads these blocks and computes the other tokens

Both carry `kv_transfer_params`. vLLM's connectors between two engines return the location of the
blocks in the first answer, and the proxy passes it on in the second request; a store finds blocks
by their content, so our connectors leave it empty.

The first request is optional: if it fails or is late, the decode server computes the prompt.
(`vllm-router` 0.1.17 answers with an error then.) Requests other than generations go to the decode
server.

See common/serve/fleet/README.md"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

logger = logging.getLogger(__name__)
GENERATES = ("/v1/completions", "/v1/chat/completions")
# The parameters that vLLM's proxies send to the first server.
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
NOT_FOR_ONE_TOKEN = ("stream_options", "min_tokens", "max_completion_tokens", "n")
HEADERS = ("authorization", "content-type", "x-request-id")
ANSWER_HEADERS = ("content-type", "retry-after", "www-authenticate", "x-request-id")


def first_request(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the request to the prefill server."""
    kept = {name: value for name, value in body.items() if name not in NOT_FOR_ONE_TOKEN}
    return kept | {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK}


def make_proxy(prefill: str, decode: str, prefill_seconds: float = 60.0) -> Starlette:
    first = httpx.AsyncClient(base_url=prefill, timeout=httpx.Timeout(prefill_seconds, connect=2))
    second = httpx.AsyncClient(base_url=decode, timeout=None)

    async def ask_first(path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        """Return the location of the blocks, or None if it is not needed or the request fails."""
        try:
            answer = await first.post(path, json=first_request(body), headers=headers)
            answer.raise_for_status()
            return answer.json().get("kv_transfer_params")
        except (httpx.HTTPError, ValueError) as error:
            logger.warning("%s did not prefill (%r), so the decode server does", prefill, error)
            return None

    async def forward(request: Request) -> Response:
        path = request.url.path
        content = await request.body()
        headers = {n: v for n, v in request.headers.items() if n in HEADERS}
        if path in GENERATES:
            try:
                body = json.loads(content)
            except ValueError:
                body = None  # the decode server reports the error
            if isinstance(body, dict):
                found = await ask_first(path, body, headers)
                content = json.dumps(body | ({"kv_transfer_params": found} if found else {}))
        forwarded = second.build_request(
            request.method, path, params=request.query_params, content=content, headers=headers
        )
        try:
            answer = await second.send(forwarded, stream=True)
        except httpx.HTTPError as error:
            return Response(f"the decode server does not answer: {error!r}", 502)

        async def stream_body() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            finally:  # a client that disconnects ends the request
                await answer.aclose()

        kept = {n: v for n, v in answer.headers.items() if n in ANSWER_HEADERS}
        return StreamingResponse(stream_body(), answer.status_code, kept)

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    parser.add_argument("--prefill-seconds", type=float, default=60.0, metavar="S")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    app = make_proxy(args.prefill, args.decode, args.prefill_seconds)
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
