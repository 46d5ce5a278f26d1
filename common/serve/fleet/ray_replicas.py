"""Replicas that Ray Serve scales with the load: each is an `AsyncLLM` in a separate process, and
Ray starts, routes, counts and ends them.

    python -m common.serve.fleet.ray_replicas --max-replicas 2 --streams 24

sends that many concurrent streams, and prints the number of replicas while the streams run and
after the last request. Run `pip install "ray[serve]"` first.

See common/serve/fleet/README.md#ray-serve"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]
from starlette.requests import Request
from starlette.responses import StreamingResponse

PROMPT, MAX_TOKENS = "def fibonacci(n):\n    if n", 400


class Replica:
    def __init__(self) -> None:
        from common.serve.async_llm import AsyncLLM

        self.llm = AsyncLLM(num_blocks=2000, num_threads=1)

    async def __call__(self, request: Request) -> StreamingResponse:
        """Stream the text for a body of `{"prompt": ..., "max_tokens": ...}`."""
        return StreamingResponse(self.stream_text(**await request.json()), media_type="text/plain")

    async def stream_text(self, prompt: str, max_tokens: int) -> AsyncIterator[str]:
        from request import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        async for delta in self.llm.generate(prompt, params):  # ended if the client leaves
            for completion in delta.completions.values():
                yield completion.text

    async def check_health(self) -> None:
        if self.llm.death_reason is not None:
            raise RuntimeError(self.llm.death_reason)


def num_replicas() -> int:
    found = serve.status().applications["default"].deployments["Replica"].replica_states
    return found.get("RUNNING", 0)


async def try_it(num_streams: int) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=300) as client:

        async def post_prompt() -> str:
            body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS}
            return (await client.post("http://127.0.0.1:8000/", json=body)).text

        seen = [await asyncio.to_thread(num_replicas)]
        rounds, texts = 0, set[str]()
        while rounds < 4 or (max(seen) == 1 and rounds < 12):
            texts |= set(await asyncio.gather(*(post_prompt() for _ in range(num_streams))))
            seen.append(await asyncio.to_thread(num_replicas))
            rounds += 1
        for _ in range(60):
            await asyncio.sleep(1)
            if (left := await asyncio.to_thread(num_replicas)) == 1:
                break
        return {"running": seen, "left": left, "different answers": len(texts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--max-replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=24, help="at once")
    args = parser.parse_args()
    scaling = {
        "min_replicas": 1,
        "max_replicas": args.max_replicas,
        "target_ongoing_requests": args.streams // 2,
        "upscale_delay_s": 1,
        "downscale_delay_s": 5,
    }
    deployed = serve.deployment(
        autoscaling_config=scaling,
        max_ongoing_requests=2 * args.streams,
        ray_actor_options={"num_cpus": 0.5},
    )(Replica)
    ray.init(include_dashboard=False, _node_ip_address="127.0.0.1")
    serve.run(deployed.bind())
    try:
        print(json.dumps(asyncio.run(try_it(args.streams))))
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main()
