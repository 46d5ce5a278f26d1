"""Two servers and the real `vllm-router`: how much each of its policies finds in the caches.

    python -m workshop.measure.bench.routing --trace FILE    measures, writes record and table
    python -m workshop.measure.bench.routing                 the table alone, from the record

FILE is Mooncake's synthetic trace (FAST'25). Its last requests, which share most, are sent at its
own moments, faster, with 8 tokens for each block of 512, so a prompt keeps its shared part. The
model's blocks have 8 tokens, too, and a server holds only a part of the requested blocks.

    each policy    new servers and a new router; the prefix caches' and the router's counters are
                   read afterwards; imbalance is the busier server's share of the computed tokens
    one prefix     the same where all prompts begin alike, and nothing else can be gained
    a death        the same prompts, in turn; one server gets a SIGKILL in mid-run

The router (version 0.1.17) asks `GET /health` of each server, sends the request itself, and asks
`POST /v1/completions/render` for the token ids of a prompt that is text. Here prompts are ids."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common.engine_config import SHIPPED_CHECKPOINT
from common.serve.fleet import programs
from workshop.measure.bench import bench_record
from workshop.measure.bench.load import Outcome, Planned, replay
from workshop.measure.prefix_workloads import (
    TRACE_BLOCK_SIZE,
    PrefixWorkload,
    TraceRequest,
    read_trace,
)

PAGES = Path(__file__).parents[3] / "common" / "serve" / "fleet"
RECORD = Path(__file__).parent / "records" / "routing.json"
MODEL = "tiny"
BLOCK_SIZE = 8
NUM_BLOCKS = 2000
MAX_PROMPT_BLOCKS = 240  # of the model's 2,048 tokens; longer prompts are cut
OUTPUT_DIVISOR, MAX_OUTPUT = 16, 64
NUM_REQUESTS, SPEED = 320, 1.6  # the last ones of the trace, at this multiple of its speed
NUM_ALIKE = 80  # requests with one prefix
POLICIES = ("round_robin", "cache_aware", "kv_aware")
ROUTER_COUNTERS = (
    "vllm_router_prefix_routing_decisions_total",
    "vllm_router_kv_placement_lookups_total",
)


def scaled(trace: Sequence[TraceRequest], speed: float, vocab_size: int) -> list[Planned]:
    """Plan the trace's requests: tokens drawn from block ids only."""
    planned = []
    for request in trace:
        prompt: list[int] = []
        for index, hash_id in enumerate(request.hash_ids[:MAX_PROMPT_BLOCKS]):
            num_left = request.input_length - index * TRACE_BLOCK_SIZE
            length = -(-min(num_left, TRACE_BLOCK_SIZE) * BLOCK_SIZE // TRACE_BLOCK_SIZE)
            prompt += random.Random(hash_id).choices(range(vocab_size), k=length)
        at = (request.timestamp_ms - trace[0].timestamp_ms) / 1e3 / speed
        num_tokens = min(MAX_OUTPUT, 1 + request.output_length // OUTPUT_DIVISOR)
        planned.append(Planned(at, prompt, num_tokens))
    return planned


def of_one_prefix(num_requests: int, vocab_size: int) -> list[Planned]:
    """Plan requests with one prefix within seconds. One server could keep it and serve all."""
    sessions = PrefixWorkload(vocab_size).shared_system_prompts(1, num_requests, 400, 8, 0)
    return [
        Planned(1.0 + i / 10 if i else 0.0, list(request.new_token_ids), 48)
        for i, (request,) in enumerate(sessions)
    ]


class Fleet:
    """Two servers and a router of `policy`, until the stack is closed."""

    def __init__(self, stack: ExitStack, policy: str, num_blocks: int) -> None:
        sizes = ("--block-size", str(BLOCK_SIZE), "--num-blocks", str(num_blocks))
        tells = policy == "kv_aware"
        places = [f"tcp://127.0.0.1:{programs.free_port()}" for _ in range(4 if tells else 0)]
        self.servers: list[programs.Program] = []
        for i in range(2):
            own = ("--kv-events", places[i], "--kv-events-replay", places[2 + i]) if tells else ()
            flags = ("--num-threads", "1", "--served-model-name", MODEL, *sizes, *own)
            self.servers.append(stack.enter_context(programs.start_server(*flags)))
        for server in self.servers:
            server.wait_until_ready()
        flags = ["--policy", policy, "--worker-urls", *(s.url for s in self.servers)]
        if tells:
            flags += ["--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", MODEL]
            for server, place, again in zip(self.servers, places, places[2:], strict=False):
                flags += ["--kv-event-source", f"{server.url}={place}"]
                flags += ["--kv-event-replay-source", f"{server.url}={again}"]
        self.router = stack.enter_context(programs.start_router(*flags))
        self.router.wait_until_ready()


def measure_one(
    policy: str, requests: Sequence[Planned], num_blocks: int, dies: bool = False
) -> dict[str, Any]:
    """Measure one policy. If `dies`, the first server is killed halfway."""
    with ExitStack() as stack:
        fleet = Fleet(stack, policy, num_blocks)
        halfway = fleet.servers[0].kill if dies else None
        outcomes = asyncio.run(replay(fleet.router.url, MODEL, requests, halfway))
        return {
            "policy": policy,
            "killed_at": round(requests[len(requests) // 2].at, 4) if dies else None,
            "servers": [server_counts(server) for server in fleet.servers[int(dies) :]],
            "router": {k: v for k, v in fleet.router.metrics().items() if k in ROUTER_COUNTERS},
            "requests": [outcome.content() for outcome in outcomes],
        }


def server_counts(server: programs.Program) -> dict[str, int]:
    found = server.metrics()
    names = ("prompt_tokens", "prefix_cache_queries", "prefix_cache_hits", "generation_tokens")
    counts = {name: int(sum(found[f"vllm:{name}_total"].values())) for name in names}
    ended = found["vllm:request_success_total"]
    return counts | {"requests": int(sum(ended.values()))}


def measure(path: Path) -> dict[str, Any]:
    trace = read_trace(path)[-NUM_REQUESTS:]
    vocab_size = json.loads((SHIPPED_CHECKPOINT / "config.json").read_text())["vocab_size"]
    requests, alike = scaled(trace, SPEED, vocab_size), of_one_prefix(NUM_ALIKE, vocab_size)
    record = bench_record.record_head("workshop.measure.bench.routing", ["--trace", path.name])
    record["config"] = {
        "clock": "the client's, from sending a request to its first token",
        "num_requests": len(requests),
        "num_alike_requests": NUM_ALIKE,
        "speed": SPEED,
        "seconds": round(requests[-1].at, 1),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": sum(request.max_tokens for request in requests),
        "distinct_blocks": len({i for r in trace for i in r.hash_ids[:MAX_PROMPT_BLOCKS]}),
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
    }
    for name, work in (("policies", requests), ("one_prefix", alike)):
        record[name] = {policy: measure_one(policy, work, NUM_BLOCKS) for policy in POLICIES}
    record["death"] = measure_one("round_robin", alike, NUM_BLOCKS, dies=True)
    return record


# -- tables


def hit_rate(counts: dict[str, int]) -> float:
    return counts["prefix_cache_hits"] / max(counts["prefix_cache_queries"], 1)


def row(policy: str, found: dict[str, Any]) -> dict[str, str]:
    """Return one row of the table, by the heading of each column."""
    servers, outcomes = found["servers"], [Outcome(**o) for o in found["requests"]]
    total = {name: sum(s[name] for s in servers) for name in servers[0]}
    computed = [s["prefix_cache_queries"] - s["prefix_cache_hits"] for s in servers]
    waits = [1e3 * (o.first_token - o.sent) for o in outcomes if o.first_token is not None]
    return {
        "policy": policy.replace("_", " "),
        "prefix hits, each server": " / ".join(f"{hit_rate(server):.0%}" for server in servers),
        "both": f"{hit_rate(total):.0%}",
        "busier one's share of computed tokens": f"{max(computed) / max(sum(computed), 1):.0%}",
        "requests": " / ".join(str(server["requests"]) for server in servers),
        "first token, ms: p50": f"{bench_record.percentile(waits, 50):,.0f}",
        "p99": f"{bench_record.percentile(waits, 99):,.0f}",
        "failed": str(sum(o.error is not None for o in outcomes)),
    }


def exit_reason(death: dict[str, Any]) -> str:
    outcomes, at = [Outcome(**o) for o in death["requests"]], death["killed_at"]
    lost = [o for o in outcomes if o.error is not None]
    return (
        f"One of two servers killed after {at:.0f} s: of {len(outcomes)} requests, "
        f"{sum(o.sent < at < o.ended for o in outcomes)} were in flight. {len(lost)} failed, "
        f"{sum(o.first_token is not None for o in lost)} of them after their first token; of "
        f"those sent later, {sum(o.sent >= at for o in lost)} failed."
    )


def policies_table(found: dict[str, Any]) -> str:
    return bench_record.table_of([row(policy, one) for policy, one in found.items()])


def table(record: dict[str, Any]) -> str:
    config = record["config"]
    return (
        f"{config['num_requests']} requests in {config['seconds']:.0f} s, "
        f"{config['prompt_tokens']:,} tokens in and {config['output_tokens']:,} out, of "
        f"{config['distinct_blocks']:,} different blocks; each server holds "
        f"{config['num_blocks'] - 1:,}.\n\n{policies_table(record['policies'])}\n\n"
        f"{config['num_alike_requests']} requests whose first 400 tokens are the same, ten a "
        f"second.\n\n{policies_table(record['one_prefix'])}\n\n"
        f"{exit_reason(record['death'])}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="JSONL, as Mooncake's FAST'25")
    args = parser.parse_args()
    if args.trace is not None:
        bench_record.write_record(RECORD, measure(args.trace))
    record = bench_record.read_record(RECORD)
    print(table(record))
    bench_record.write_table(PAGES / "README.md", "routing", table(record), record)


if __name__ == "__main__":
    main()
