"""Chapter 3's measurements, figures and tables. The command line: `workshop/measure/lab_frame.py`.

    engine    time to first token in the whole engine: none, hash chain and radix tree in turn
    loss      the cost where nothing is shared
    store     one block written to and read from Mooncake, in two processes
    groups    what windows save, counted without a model: the tables of `beyond/GROUPS.md`
    trace     `--trace FILE`: a trace in Mooncake's format through both caches, counted

Engines share one set of weights. A request is served by each of them before the next one comes, one
at a time, so time to first token is that of the prefill alone. Torch uses one thread, and random
token ids cost as much as text.

A trace has no tokens but an id for each block of 512, so a cache with blocks of one "token" gets
the ids. A hit counts as many tokens as the request has in the found blocks, and outputs are not in
the trace. At any capacity both caches evict the same blocks.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from block_pool import BlockPool
from cached_grouped_memory import CachedGroupedMemory
from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.models.loader import LoadedModel, load_model
from grouped_kv_memory import max_blocks
from kv_memory import NotReady
from kv_slots import PREFIX_CACHES
from prefix_cache import PrefixCache
from request import Request
from workshop.book.palette import BASELINE, CACHED, INK, label_axes, label_line, shade
from workshop.measure.bench.bench_record import percentiles
from workshop.measure.bench.bench_work import greedy
from workshop.measure.lab_frame import Measurement, Part, plot_band, run_lab, table
from workshop.measure.prefix_workloads import (
    TRACE_BLOCK_SIZE,
    PlannedRequest,
    PrefixWorkload,
    TraceRequest,
    read_trace,
)
from workshop.measure.rounds import rotated, spread

BLOCK_SIZE = 16
CACHES = ("hash", "radix")
NAMES = {"off": "no cache", "hash": "hash chain", "radix": "radix tree"}


def make_cache(name: str, num_blocks: int, block_size: int = BLOCK_SIZE) -> PrefixCache:
    return PREFIX_CACHES[name](BlockPool(num_blocks + 1), block_size)  # one more: the null block


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def with_answers(
    requests: Sequence[PlannedRequest], vocab_size: int
) -> Iterator[tuple[PlannedRequest, list[int], list[int]]]:
    """Yield each request with its prompt and an answer, which later prompts contain."""
    source, answers = random.Random(5), {}
    for request in requests:
        prompt = request.prompt(answers)
        answer = source.choices(range(vocab_size), k=request.output_len)
        answers[request.request_id] = answer
        yield request, prompt, answer


# -- the whole engine, with the shipped checkpoint

ENGINES = {"off": None, "hash": "hash", "radix": "radix"}
ENGINE_VOCAB_SIZE = 4096
SHARED_PROMPT_LEN = 1920
SHARED_LENS = (0, 256, 512, 768, 1024, 1280, 1536, 1792)
UNIQUE_LEN, UNIQUE_OUTPUT_LEN = 832, 32


@dataclass(frozen=True, slots=True)
class Served:
    """One request: its user's wait and the machine's work."""

    answer: list[int]
    num_computed: int  # prompt tokens
    ttft_ms: float  # wall time
    first_cpu_ms: float  # processor time until the first token
    cpu_ms: float  # processor time until the last


def make_engines(loaded: LoadedModel, num_blocks: int) -> dict[str, LLMEngine]:
    return {
        name: LLMEngine(
            EngineConfig(prefix_cache=cache, num_blocks=num_blocks, block_size=BLOCK_SIZE),
            loaded=loaded,
        )
        for name, cache in ENGINES.items()
    }


def load() -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(SHIPPED_CHECKPOINT, "auto", torch.device("cpu"))


def serve(engine: LLMEngine, request_id: str, prompt: list[int], output_len: int) -> Served:
    num_before = engine.stats().scheduled_tokens
    start, first_cpu_ms = time.process_time(), None
    engine.add_request(request_id, prompt, greedy(output_len))
    while engine.has_unfinished_requests():
        (output,) = engine.step()
        if first_cpu_ms is None:
            first_cpu_ms = (time.process_time() - start) * 1e3
    cpu_ms = (time.process_time() - start) * 1e3
    num_computed = len(prompt) - output.num_cached_tokens
    num_scheduled = engine.stats().scheduled_tokens - num_before
    assert num_scheduled == num_computed + output_len - 1, "the engine computed other tokens"
    ttft = output.metrics.time_to_first_token
    assert ttft is not None and first_cpu_ms is not None, "the engine returned nothing"
    answer = list(output.outputs[0].token_ids)
    return Served(answer, num_computed, ttft * 1e3, first_cpu_ms, cpu_ms)


def warm_up(engines: dict[str, LLMEngine]) -> None:
    for engine in engines.values():
        serve(engine, "warm-up", list(range(2, 600)), 8)
        engine.reset_prefix_cache()


# -- families of requests


def family_requests(scale: int) -> list[PlannedRequest]:
    workload = PrefixWorkload(ENGINE_VOCAB_SIZE, seed=11)
    sessions = [
        *workload.shared_system_prompts(3, 2 * scale, system_len=768, user_len=64, output_len=8),
        *workload.chats(4, 5, first_len=256, user_len=64, output_len=32),
        *workload.few_shot(
            3, 2 * scale, instruction_len=64, examples_len=512, question_len=48, output_len=8
        ),
        *workload.unique_prompts(6 * scale, UNIQUE_LEN, 8),
    ]
    return workload.arrive(sessions)


def measure_families(loaded: LoadedModel, repeats: int, scale: int) -> dict:
    """Return, by family, prompt tokens, and by engine tokens computed and times to first token."""
    engines, requests = make_engines(loaded, num_blocks=2048), family_requests(scale)
    families: dict[str, dict] = {}
    num_different = 0
    warm_up(engines)
    with no_collection():
        for round_number in range(repeats):
            answers: dict[str, dict[str, list[int]]] = {name: {} for name in engines}
            for place, request in enumerate(requests):
                zeros = {"num_prompt": 0, "num_computed": dict.fromkeys(ENGINES, 0)}
                empty = {"ttft_ms": {name: [] for name in ENGINES}}
                kept = families.setdefault(request.family, zeros | empty)
                for name in rotated(engines, place + round_number):
                    prompt = request.prompt(answers[name])
                    served = serve(engines[name], request.request_id, prompt, request.output_len)
                    answers[name][request.request_id] = served.answer
                    kept["ttft_ms"][name].append(round(served.ttft_ms, 3))
                    if round_number == 0:
                        kept["num_computed"][name] += served.num_computed
                        kept["num_prompt"] += len(prompt) if name == "off" else 0
            num_different += sum(answers[name] != answers["off"] for name in engines)
            for engine in engines.values():
                engine.reset_prefix_cache()
    return {"families": families, "runs_with_other_tokens": num_different}


# -- time to first token against the length of the shared prefix


def measure_shared_lens(loaded: LoadedModel, repeats: int, shared_lens: Sequence[int]) -> dict:
    """Return `{engine: {shared tokens: [ms]}}` for prompts of `SHARED_PROMPT_LEN` tokens."""
    source = random.Random(23)

    def text(length: int) -> list[int]:
        return source.choices(range(2, ENGINE_VOCAB_SIZE), k=length)

    engines = make_engines(loaded, num_blocks=2048)
    times = {name: {str(shared): [] for shared in shared_lens} for name in engines}
    warm_up(engines)
    with no_collection():
        for round_number in range(repeats):
            prefix = text(max(shared_lens))
            for engine in engines.values():
                engine.reset_prefix_cache()
                serve(engine, "prefix", [*prefix, 1], 1)
            for shared in rotated(shared_lens, round_number):
                # This token differs from the prefix's, so exactly `shared` tokens are shared.
                other = 2 if prefix[shared : shared + 1] != [2] else 3
                prompt = [*prefix[:shared], other, *text(SHARED_PROMPT_LEN - shared - 1)]
                for name in rotated(engines, round_number):
                    served = serve(engines[name], "request", prompt, 1)
                    num_cached = 0 if name == "off" else shared
                    assert served.num_computed == SHARED_PROMPT_LEN - num_cached, (
                        "another prefix was hit"
                    )
                    times[name][str(shared)].append(round(served.ttft_ms, 3))
    return times


# -- the price where nothing is shared


def measure_loss(measurement: Measurement) -> dict:
    """Processor time of unique prompts, each served by all engines in turn. The memory holds three
    of them, so a cache also evicts at every request."""
    loaded, num_prompts = load(), measurement.of(4, 80)
    num_blocks = 3 * (UNIQUE_LEN + UNIQUE_OUTPUT_LEN) // BLOCK_SIZE + 1
    engines = make_engines(loaded, num_blocks)
    sessions = PrefixWorkload(ENGINE_VOCAB_SIZE, seed=29).unique_prompts(
        num_prompts + 4, UNIQUE_LEN, UNIQUE_OUTPUT_LEN
    )
    first, whole = ({name: [] for name in engines} for _ in range(2))
    with no_collection():
        for place, (request,) in enumerate(sessions):
            for name in rotated(engines, place):
                prompt = request.prompt({})
                served = serve(engines[name], request.request_id, prompt, request.output_len)
                assert served.num_computed == len(prompt), "the cache hit a unique prompt"
                if place >= 4:  # by then the memory is full
                    first[name].append(round(served.first_cpu_ms, 3))
                    whole[name].append(round(served.cpu_ms, 3))
    config = {"prompt_len": UNIQUE_LEN, "output_len": UNIQUE_OUTPUT_LEN}
    return {"config": describe(loaded) | config, "first_token_ms": first, "whole_ms": whole}


def describe(loaded: LoadedModel) -> dict:
    return {
        "model": "common/checkpoints/tiny",
        "dtype": str(loaded.model.embed_weight.dtype).removeprefix("torch."),
        "block_size": BLOCK_SIZE,
        "threads": torch.get_num_threads(),
    }


def measure_engine(measurement: Measurement) -> dict:
    loaded, repeats = load(), measurement.of(1, 4)
    shared_lens = SHARED_LENS[:: measurement.of(4, 1)]
    return {
        "config": {**describe(loaded), "repeats": repeats, "prompt_len": SHARED_PROMPT_LEN},
        **measure_families(loaded, repeats, scale=measurement.of(1, 3)),
        "shared_ms": measure_shared_lens(loaded, repeats, shared_lens),
    }


# -- the real store


def _times_ms(call: Callable[[int], object], repeats: int) -> list[float]:
    times_ms = []
    for index in range(-2, repeats):  # two to warm up
        start = time.perf_counter()
        assert call(index)
        times_ms.append((time.perf_counter() - start) * 1e3)
    return times_ms[2:]


def measure_store(measurement: Measurement) -> dict:
    """Return milliseconds of each repeat, by operation. `put` and `get` are the store's calls and a
    hop to the client's process; `publish` and `fetch` are those of a connector, checksum included.
    The process that publishes lends all memory."""
    from kv_store import make_record, open_record
    from mooncake_master import MooncakeMaster
    from mooncake_pool import MooncakePool

    kv_nbytes, repeats = 1_000_000, measurement.of(3, 50)
    kv_data = [os.urandom(kv_nbytes) for _ in range(4)]
    tokens = tuple(range(BLOCK_SIZE))
    links = {i: (i.to_bytes(32, "big", signed=True), tokens) for i in range(-2, repeats)}
    segment_nbytes = 3 * (repeats + 2) * (kv_nbytes + 4096) + (64 << 20)
    with MooncakeMaster() as master:
        near = MooncakePool(master.address, segment_nbytes)
        far = MooncakePool(master.address, segment_nbytes=0)
        put, get = near._client.put, far._client.get
        operations = {
            "put": lambda i: put(f"raw {i}", kv_data[i % 4]),
            "get": lambda i: get(f"raw {i}") == kv_data[i % 4],
            "publish": lambda i: near.put(links[i], make_record(links[i], kv_data[i % 4])),
            "fetch": lambda i: open_record(next(far.get([links[i]])), links[i]) == kv_data[i % 4],
            "query": lambda i: far.has([links[i]]),
        }
        times = {name: _times_ms(call, repeats) for name, call in operations.items()}
        near.close()
        far.close()
    return {"config": {"kv_nbytes": kv_nbytes}, "ms": times}


# -- windows: six groups of layers, as Gemma 3's, in the same memory as without windows

STEP, WINDOW, GROUPS_VOCAB_SIZE = 2_048, 1_024, 50_000
WINDOWS: dict[str, list[int | None]] = {
    "everything": [None] * 6,
    "5 of 6 a window": [None, *[WINDOW] * 5],
}
LENGTHS = (256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
CAPACITIES = (8_000, 12_000, 16_000, 24_000, 32_000, 48_000, 64_000, 96_000)  # tokens, all layers


def conversations(scale: int) -> list[PlannedRequest]:
    workload = PrefixWorkload(GROUPS_VOCAB_SIZE, seed=3)
    sessions = [
        *workload.chats(4 * scale, 5, first_len=1_500, user_len=300, output_len=300),
        *workload.shared_system_prompts(scale, 10, 3_000, 200, 100),
        *workload.unique_prompts(4 * scale, 2_000, 100),
    ]
    return workload.arrive(sessions)


def serve_windows(
    windows: Sequence[int | None], capacity: int, requests: list[PlannedRequest]
) -> float:
    """Serve the requests one after the other, prompts in steps of 2,048. Returns the share of
    prompt tokens that is found, in memory for `capacity` tokens of all layers."""
    pool = BlockPool(1 + len(windows) * capacity // BLOCK_SIZE)
    memory = CachedGroupedMemory(pool, BLOCK_SIZE, windows, STEP)
    for planned, prompt, answer in with_answers(requests, GROUPS_VOCAB_SIZE):
        request = Request.from_tokens(planned.request_id, prompt, planned.output_len)
        found = memory.get_computed_blocks(request)
        assert not isinstance(found, NotReady)
        end = found.num_tokens
        for token in [None, *answer]:
            if token is not None:
                request.output_token_ids.append(token)
                request.all_token_ids.append(token)
            while end < request.num_tokens:
                num_new = min(STEP, request.num_tokens - end)
                has_room = memory.allocate_slots(request, num_new, 0, found)
                assert has_room, "the KV cache must fit one request"
                end, found = end + num_new, None
                request.num_computed_tokens = end
                memory.cache_blocks(request, end)
        memory.free(request)
    return memory.cache.stats.hit_rate


def measure_groups(measurement: Measurement) -> dict:
    requests = conversations(measurement.of(1, 3))
    capacities = measurement.of(CAPACITIES[-1:], CAPACITIES)
    limit = serve_windows([None], 10**6, requests)
    held = {
        kind: [max_blocks(n, BLOCK_SIZE, windows, 1) for n in LENGTHS]
        for kind, windows in WINDOWS.items()
    }
    found = {
        kind: [serve_windows(w, n, requests) for n in capacities] for kind, w in WINDOWS.items()
    }
    config = {"block_size": BLOCK_SIZE, "window": WINDOW, "step": STEP}
    config["num_requests"] = len(requests)
    record = {"lengths": LENGTHS, "held": held, "capacities": capacities, "found": found}
    return {"config": config, **record, "limit": limit}


# -- a published trace

TRACE_CAPACITIES = (100, 300, 1000, 2000, 3000, 5000, 7000, 10000, 15000, 20000, 30000)


def replay(trace: Sequence[TraceRequest], cache: PrefixCache) -> dict[str, int]:
    """Look up and then cache every request's prompt. `cache` has blocks of one token; blocks in the
    result are those of the trace."""
    num_blocks_hit = 0
    for request in trace:
        num_found = cache.match_prefix(request.hash_ids).num_cached_tokens
        num_blocks_hit += num_found
        cache.stats.record(request.input_length, request.num_tokens_in(num_found))
        cache.cache_computed_blocks(request.hash_ids)
    return {
        "capacity": cache.pool.num_usable_blocks,
        "num_tokens": cache.stats.num_tokens_looked_up,
        "num_tokens_hit": cache.stats.num_tokens_hit,
        "num_blocks_hit": num_blocks_hit,
        "num_cached_at_end": cache.num_cached_blocks,
    }


def num_distinct_blocks(trace: Sequence[TraceRequest]) -> int:
    """Return the capacity at which nothing is ever evicted."""
    return len({hash_id for request in trace for hash_id in request.hash_ids})


def measure_trace(measurement: Measurement) -> dict:
    path = measurement.trace
    if path is None:
        raise ValueError("--record trace needs --trace FILE")
    trace = read_trace(path)[: measurement.of(200, None)]
    limit = num_distinct_blocks(trace)
    capacities = [*(c for c in TRACE_CAPACITIES if c < limit), limit]
    return {
        "command": f"python -m workshop.plot_prefix_cache --record trace --trace {path.name}",
        "config": {
            "file": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "block_size": TRACE_BLOCK_SIZE,
            "num_requests": len(trace),
            "num_distinct_blocks": limit,
        },
        **{
            name: [replay(trace, make_cache(name, capacity, 1)) for capacity in capacities]
            for name in CACHES
        },
    }


# -- tables


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _spread(values: Sequence[float], digits: int = 0) -> str:
    """Return `median (10th-90th percentile)`."""
    return spread(values, digits, 10, 90)


def hit_rate(run: dict) -> float:
    return run["num_tokens_hit"] / run["num_tokens"]


def tables_of_engine(record: dict) -> dict[str, str]:
    families = record["families"].items()
    shared = sorted(
        families, key=lambda pair: pair[1]["num_computed"]["hash"] / pair[1]["num_prompt"]
    )
    rows = {f"{family}, {NAMES[name]}": (kept, name) for family, kept in shared for name in NAMES}
    columns = {
        "prompt tokens": lambda row: f"{row[0]['num_prompt']:,}",
        "computed": lambda row: f"{row[0]['num_computed'][row[1]]:,}",
        "hit": lambda row: _percent(1 - row[0]["num_computed"][row[1]] / row[0]["num_prompt"]),
        "ms to first token": lambda row: _spread(row[0]["ttft_ms"][row[1]]),
    }
    return {"families": table("requests", rows, columns)}


def tables_of_loss(record: dict) -> dict[str, str]:
    """Compare each request with itself in the engine without a cache."""

    def quarters(part: str) -> Callable[[str], str]:
        def cell(name: str) -> str:
            times = zip(record[part][name], record[part]["off"], strict=True)
            found = percentiles([a / b for a, b in times], [50, 25, 75])
            return "{:+.1f} % ({:+.1f} - {:+.1f})".format(*(100 * (x - 1) for x in found))

        return cell

    columns = {
        "to the first token": quarters("first_token_ms"),
        "whole request": quarters("whole_ms"),
    }
    caches = {NAMES[name]: name for name in CACHES}
    return {"loss": table("no prefix shared, processor time", caches, columns)}


def tables_of_store(record: dict) -> dict[str, str]:
    head = f"{record['config']['kv_nbytes'] / 1e6:.0f} MB, two processes, loopback TCP"
    return {"store": table(head, record["ms"], {"ms": lambda times: _spread(times, 2)})}


def tables_of_groups(record: dict) -> dict[str, str]:
    rows = {f"{n:,}": i for i, n in enumerate(record["capacities"])}
    columns = {
        f"found, %, layers see {kind}": lambda i, kind=kind: f"{100 * record['found'][kind][i]:.1f}"
        for kind in WINDOWS
    }
    return {"groups": table("memory, tokens in all layers", rows, columns)}


# -- figures

COLORS = {"off": BASELINE, "hash": CACHED, "radix": shade(CACHED, 0.45)}


def draw_hit_rate(record: dict) -> Figure:
    figure, axis = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
    for cache, marker, dashes in zip(CACHES, ("o", "x"), ("-", ":")):
        capacities = [run["capacity"] for run in record[cache]]
        rates = [100 * hit_rate(run) for run in record[cache]]
        form, color = f"{marker}{dashes}", COLORS[cache]
        axis.plot(capacities, rates, form, color=color, label=NAMES[cache])
    limit = 100 * hit_rate(record["hash"][-1])
    axis.axhline(limit, color=BASELINE)
    label = f"nothing is evicted: {limit:.1f} %"
    label_line(axis, capacities[0], limit, label, INK, offset=(0, 10))
    axis.set(
        title=f"{record['config']['num_requests']:,} requests of Mooncake's synthetic trace",
        xlabel=f"capacity, blocks of {TRACE_BLOCK_SIZE} tokens",
        ylabel="prompt tokens found, %",
        xscale="log",
        ylim=(0, 1.15 * limit),
    )
    axis.grid()
    axis.legend(loc="lower right")
    return figure


def draw_shared(record: dict) -> Figure:
    """Draw medians as a line over an area from the 10th to the 90th percentile."""
    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    places = {"off": (4, "left", -16), "hash": (1, "right", -26), "radix": (1, "right", -44)}
    for (name, times), marker in zip(record["shared_ms"].items(), "os^"):
        lengths, color = [int(length) for length in times], COLORS[name]
        middle = plot_band(
            axis, lengths, list(times.values()), color, f"{marker}-", (10, 90), linewidth=0
        )
        index, side, down = places[name]  # where nothing else is drawn
        index %= len(lengths)
        place = {"ha": side, "offset": (0, down)}
        label_line(axis, lengths[index], middle[index], NAMES[name], color, **place)
    title = f"Prompts of {record['config']['prompt_len']:,} tokens: only what is new costs time"
    label_axes(axis, title, "shared prefix, tokens", "time to first token, ms", ylim=0)
    return figure


def draw_groups(record: dict) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for kind, color in zip(WINDOWS, (BASELINE, CACHED)):
        left.plot(record["lengths"], record["held"][kind], color=color, marker="o", label=kind)
        rates = [100 * rate for rate in record["found"][kind]]
        right.plot(record["capacities"], rates, color=color, marker="o")
    left.set(
        title="A request holds",
        xlabel="tokens of a request that decodes",
        ylabel="blocks, in all six groups",
        xscale="log",
        yscale="log",
    )
    right.axhline(100 * record["limit"], color=BASELINE, linestyle=":")
    right.set(
        title="A cache of that size finds",
        xlabel="memory, as tokens in all layers",
        ylabel="prompt tokens found, %",
        xscale="log",
        ylim=0,
    )
    left.legend(loc="upper left", title="layers see")
    for axis in (left, right):
        axis.grid()
    return figure


PARTS = {
    "engine": Part(measure_engine, {"shared_prefix": draw_shared}, tables_of_engine),
    "loss": Part(measure_loss, tables=tables_of_loss, clock="processor time"),
    "store": Part(measure_store, tables=tables_of_store, clock="time.perf_counter"),
    "groups": Part(measure_groups, {"groups": draw_groups}, tables_of_groups),
    "trace": Part(measure_trace, {"hit_rate": draw_hit_rate}),
}


if __name__ == "__main__":
    run_lab(__file__, "03_prefix_cache", PARTS)
