"""Two servers behind the real `vllm-router`: what each of its policies finds in the caches.

    python -m common.serve.fleet.routing --trace FILE    measures, writes the record and the table
    python -m common.serve.fleet.routing --tables        the table alone, from the record

FILE is Mooncake's synthetic trace (FAST'25). Its last requests, which share most, are sent at its
own moments, faster, with 8 tokens for each block of 512: a prompt keeps what it shares. The model's
blocks have 8 tokens, too, and a server holds only a part of what is asked for.

    each policy    new servers and a new router; the prefix caches' and the router's counters are
                   read afterwards; imbalance is the busier server's share of what was computed
    one prefix     the same where all prompts begin alike, and nothing else is to be gained
    a death        the same prompts, in turn; one server gets a SIGKILL in mid-run

The router (version 0.1.17) asks `GET /health` of each server, sends the request itself, and asks
`POST /v1/completions/render` for the token ids of a prompt that is text. Here prompts are ids."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common.engine_config import SHIPPED_CHECKPOINT
from common.serve.fleet.load import Outcome, Planned, replay
from common.serve.fleet.programs import (
    HOW_TO_INSTALL,
    Program,
    free_port,
    router_program,
    start_router,
    start_server,
)
from prefix_workloads import TRACE_BLOCK_SIZE, PrefixWorkload, TraceRequest, read_trace
from workshop.measure.bench.bench_record import (
    markdown_table,
    percentile,
    read_record,
    record_head,
    write_record,
)
from workshop.measure.bench.side_by_side import write_table

HERE = Path(__file__).parent
RECORD = HERE / "records" / "routing.json"
MODEL = "tiny"
BLOCK_SIZE = 8
NUM_BLOCKS = 2000
MAX_PROMPT_BLOCKS = 240  # of the model's 2,048 tokens; longer prompts are cut
OUTPUT_DIVISOR, MAX_OUTPUT = 16, 64
POLICIES = ("round_robin", "cache_aware", "kv_aware")
HIT_COUNTERS = (
    "vllm_router_prefix_routing_decisions_total",
    "vllm_router_kv_placement_lookups_total",
    "vllm_router_retries_total",
)


def scaled(trace: Sequence[TraceRequest], speed: float, vocab_size: int) -> list[Planned]:
    """Of a block's id alone its tokens are drawn, as in `trace_token_ids`."""
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
    """All in a few seconds: whoever has computed the prefix once could keep all of them."""
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
        places = [f"tcp://127.0.0.1:{free_port()}" for _ in range(4 if tells else 0)]
        self.servers: list[Program] = []
        for i in range(2):
            own = ("--kv-events", places[i], "--kv-events-replay", places[2 + i]) if tells else ()
            flags = ("--num-threads", "1", "--served-model-name", MODEL, *sizes, *own)
            self.servers.append(stack.enter_context(start_server(*flags)))
        for server in self.servers:
            server.wait_until_ready()
        flags = ["--policy", policy, "--worker-urls", *(s.url for s in self.servers)]
        if tells:
            flags += ["--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", MODEL]
            for server, place, again in zip(self.servers, places, places[2:], strict=False):
                flags += ["--kv-event-source", f"{server.url}={place}"]
                flags += ["--kv-event-replay-source", f"{server.url}={again}"]
        self.router = stack.enter_context(start_router(*flags))
        self.router.wait_until_ready()


def measure_one(
    policy: str, requests: Sequence[Planned], num_blocks: int, dies: bool = False
) -> dict[str, Any]:
    """If it `dies`, the first server does, halfway."""
    with ExitStack() as stack:
        fleet = Fleet(stack, policy, num_blocks)
        halfway = fleet.servers[0].kill if dies else None
        outcomes = asyncio.run(replay(fleet.router.url, MODEL, requests, halfway))
        return {
            "policy": policy,
            "killed_at": round(requests[len(requests) // 2].at, 4) if dies else None,
            "servers": [server_counts(server) for server in fleet.servers[int(dies) :]],
            "router": router_counts(fleet.router),
            "requests": [outcome.content() for outcome in outcomes],
        }


def server_counts(server: Program) -> dict[str, int]:
    found = server.metrics()
    names = ("prompt_tokens", "prefix_cache_queries", "prefix_cache_hits", "generation_tokens")
    counts = {name: int(sum(found[f"vllm:{name}_total"].values())) for name in names}
    ended = found["vllm:request_success_total"]
    return counts | {"requests": int(sum(ended.values()))}


def router_counts(router: Program) -> dict[str, dict[str, float]]:
    found = router.metrics()
    return {name: found[name] for name in HIT_COUNTERS if name in found}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    trace = read_trace(args.trace)[-args.requests :]
    vocab_size = json.loads((SHIPPED_CHECKPOINT / "config.json").read_text())["vocab_size"]
    requests = scaled(trace, args.speed, vocab_size)
    arguments = [Path(a).name if "/" in a else a for a in sys.argv[1:]]
    record = record_head("common.serve.fleet.routing", arguments)
    record["config"] = {
        "clock": "the client's, from sending a request to its first token",
        "num_requests": len(requests),
        "num_alike_requests": args.alike_requests,
        "speed": args.speed,
        "seconds": round(requests[-1].at, 1),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": sum(request.max_tokens for request in requests),
        "distinct_blocks": len({i for r in trace for i in r.hash_ids[:MAX_PROMPT_BLOCKS]}),
        "num_blocks": args.num_blocks,
        "block_size": BLOCK_SIZE,
    }
    alike = of_one_prefix(args.alike_requests, vocab_size)
    for name, work in (("policies", requests), ("one_prefix", alike)):
        record[name] = {}
        for policy in args.policies:
            record[name][policy] = measure_one(policy, work, args.num_blocks)
            print(row(policy, record[name][policy]), flush=True)
    record["death"] = measure_one(args.policies[0], alike, args.num_blocks, dies=True)
    print(death_sentence(record["death"]), flush=True)
    return record


# -- what is shown


def hit_rate(counts: dict[str, int]) -> float:
    return counts["prefix_cache_hits"] / max(counts["prefix_cache_queries"], 1)


def row(policy: str, found: dict[str, Any]) -> list[str]:
    servers, outcomes = found["servers"], [Outcome(**o) for o in found["requests"]]
    total = {name: sum(s[name] for s in servers) for name in servers[0]}
    computed = [s["prefix_cache_queries"] - s["prefix_cache_hits"] for s in servers]
    waits = [1e3 * (o.first_token - o.sent) for o in outcomes if o.first_token is not None]
    return [
        policy.replace("_", " "),
        " / ".join(f"{hit_rate(server):.0%}" for server in servers),
        f"{hit_rate(total):.0%}",
        f"{max(computed) / max(sum(computed), 1):.0%}",
        " / ".join(str(server["requests"]) for server in servers),
        f"{percentile(waits, 50):,.0f}",
        f"{percentile(waits, 99):,.0f}",
        str(sum(o.error is not None for o in outcomes)),
    ]


HEAD = [
    "policy",
    "prefix hits, each server",
    "both",
    "busier one's share of computed tokens",
    "requests",
    "first token, ms: p50",
    "p99",
    "failed",
]


def death_sentence(death: dict[str, Any]) -> str:
    outcomes, at = [Outcome(**o) for o in death["requests"]], death["killed_at"]
    lost = [o for o in outcomes if o.error is not None]
    begun = sum(o.first_token is not None for o in lost)
    under_way = sum(o.sent < at < o.ended for o in outcomes)
    later = [o for o in outcomes if o.sent >= at]
    why = ", ".join(f"{n} times '{e}'" for e, n in Counter(o.error for o in lost).items())
    retries = sum(death["router"].get("vllm_router_retries_total", {}).values())
    return (
        f"One of two servers killed after {at:.0f} s ({death['policy'].replace('_', ' ')}): of "
        f"{len(outcomes)} requests {len(lost)} fail{'s' if len(lost) == 1 else ''}"
        f"{f' ({why})' if why else ''}, {begun} of them after their first token. "
        f"{under_way} were under way at that moment; of {len(later)} that came later "
        f"{sum(o.error is not None for o in later)} failed, and the router tried "
        f"{retries:.0f} times again."
    )


def table(record: dict[str, Any]) -> str:
    trace, alike = (
        markdown_table(HEAD, [row(policy, found) for policy, found in record[name].items()])
        for name in ("policies", "one_prefix")
    )
    config = record["config"]
    return (
        f"{config['num_requests']} requests in {config['seconds']:.0f} s, "
        f"{config['prompt_tokens']:,} tokens in and {config['output_tokens']:,} out, of "
        f"{config['distinct_blocks']:,} different blocks; each server holds "
        f"{config['num_blocks'] - 1:,}.\n\n{trace}\n\n"
        f"{config['num_alike_requests']} requests whose first 400 tokens are the same, ten a "
        f"second.\n\n{alike}\n\n"
        f"{death_sentence(record['death'])}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="JSONL, as Mooncake's FAST'25")
    parser.add_argument("--tables", action="store_true", help="from the record, without measuring")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--requests", type=int, default=320, help="the last so many of the trace")
    parser.add_argument("--alike-requests", type=int, default=80, help="with one prefix")
    parser.add_argument("--speed", type=float, default=1.6, help="times the trace's own")
    parser.add_argument("--num-blocks", type=int, default=NUM_BLOCKS, help="of each server")
    parser.add_argument("--output", type=Path, default=RECORD)
    args = parser.parse_args()
    if not args.tables:
        if args.trace is None or not args.trace.exists():
            parser.error("--trace: Mooncake's synthetic trace, a file of JSON lines")
        if router_program() is None:
            parser.error(HOW_TO_INSTALL)
        write_record(args.output, measure(args))
    record = read_record(args.output)
    print(table(record))
    if args.output == RECORD:
        for page in ("README.md", "README.zh.md"):
            write_table(HERE / page, "routing", table(record), record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
