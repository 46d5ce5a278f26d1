"""Both caches on one workload, without a model. `plot_prefix_cache.py --record` runs this module;
alone it does nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from prefix_cache import MatchCursor, PrefixCache
from workshop.measure.plot_prefix_cache_ops import (
    VOCAB_SIZE,
    cpu_us,
    in_turn,
    make_cache,
    no_collection,
)
from workshop.measure.prefix_workloads import PlannedRequest, PrefixWorkload


def mixed_requests(scale: int = 1) -> list[PlannedRequest]:
    """Draw chats, system prompts, few-shot templates and unique prompts, in a random order."""
    workload = PrefixWorkload(VOCAB_SIZE, seed=3)
    sessions = [
        *workload.chats(12 * scale, 6, first_len=200, user_len=60, output_len=90),
        *workload.shared_system_prompts(4, 24 * scale, 700, 70, 40),
        *workload.few_shot(4, 16 * scale, 150, 500, 50, 10),
        *workload.unique_prompts(30 * scale, 600, 60),
    ]
    return workload.arrive(sessions)


def serve_without_model(cache: PrefixCache, requests: Sequence[PlannedRequest]) -> dict:
    """Serve requests one after the other, by an engine's calls. Returns microseconds for each."""
    source, answers = random.Random(5), {}
    us, num_hit, num_looked_up, num_evicted = [], 0, 0, 0
    for request in requests:
        prompt = request.prompt(answers)
        answer = answers[request.request_id] = source.choices(
            range(VOCAB_SIZE), k=request.output_len
        )
        time_us, (num_cached, evicted) = cpu_us(lambda: _serve(cache, prompt, answer))  # noqa: B023
        us.append(time_us)
        num_hit += num_cached
        num_looked_up += len(prompt)
        num_evicted += evicted
    return {
        "us": us,
        "hit_rate": num_hit / num_looked_up,
        "num_evicted_tokens": num_evicted * cache.block_size,
    }


def _serve(cache: PrefixCache, prompt: list[int], answer: list[int]) -> tuple[int, int]:
    size, cursor = cache.block_size, MatchCursor()
    found, num_cached = cache.match_prefix(prompt, cursor=cursor)
    cache.touch(found)
    token_ids = prompt + answer
    num_new = len(token_ids) // size - len(found)
    num_evicted = cache.evict(num_new - cache.pool.num_free_blocks)
    blocks = cache.pool.allocate(num_new)
    assert blocks is not None, "the pool is too small"
    num_prompt_blocks = len(prompt) // size - len(found)  # published when the prompt is computed
    first = cache.insert(prompt, blocks[:num_prompt_blocks], start=len(found), cursor=cursor)
    held = found + first.blocks
    rest = blocks[num_prompt_blocks:]
    held += cache.insert(token_ids, rest, start=len(held), cursor=cursor).blocks
    cache.release(held)
    return num_cached, num_evicted


def measure_workload(repeats: int, num_tokens: int = 48_000, scale: int = 1) -> dict:
    """Return `{cache and block size: {hit rate, [[microseconds of each request]]}}`, in memory for
    `num_tokens` tokens."""
    requests = mixed_requests(scale)
    kinds = {"hash, 16": ("hash", 16), "radix, 16": ("radix", 16), "radix, 1": ("radix", 1)}
    runs: dict[str, list[dict]] = {kind: [] for kind in kinds}
    for round_number in range(repeats):
        for kind in in_turn(list(kinds), round_number):
            name, size = kinds[kind]
            cache = make_cache(name, num_tokens // size, size)
            with no_collection():
                runs[kind].append(serve_without_model(cache, requests))
    return {
        "memory_tokens": num_tokens,
        "num_requests": len(requests),
        "kinds": {
            kind: {
                "hit_rate": results[0]["hit_rate"],
                "num_evicted_tokens": results[0]["num_evicted_tokens"],
                "us": [result["us"] for result in results],
            }
            for kind, results in runs.items()
        },
    }
