"""The savings of windows, and their effect on a prefix cache: the figure and table of
`beyond/GROUPS.md`. `--record groups` counts, without a model and without a clock. The command line
is described in `workshop/measure/lab_frame.py`.

The model has six groups of layers, arranged as Gemma 3's: one that sees everything, five with a
window of 1,024. It is compared with the same layers without windows, in the same memory."""

from __future__ import annotations

import random
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from block_pool import BlockPool
from cached_grouped_memory import CachedGroupedMemory
from grouped_kv_memory import max_blocks
from kv_memory import NotReady
from request import Request
from workshop.book.palette import BASELINE, CACHED
from workshop.measure.bench.bench_record import markdown_table
from workshop.measure.lab_frame import Measurement, Part, run_lab
from workshop.measure.prefix_workloads import PlannedRequest, PrefixWorkload

BLOCK_SIZE, STEP, WINDOW, VOCAB_SIZE = 16, 2_048, 1_024, 50_000
KINDS: dict[str, list[int | None]] = {
    "everything": [None] * 6,
    "5 of 6 a window": [None, *[WINDOW] * 5],
}
COLORS = dict(zip(KINDS, (BASELINE, CACHED)))
LENGTHS = (256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
CAPACITIES = (8_000, 12_000, 16_000, 24_000, 32_000, 48_000, 64_000, 96_000)  # tokens, all layers


def conversations(scale: int) -> list[PlannedRequest]:
    workload = PrefixWorkload(VOCAB_SIZE, seed=3)
    sessions = [
        *workload.chats(4 * scale, 5, first_len=1_500, user_len=300, output_len=300),
        *workload.shared_system_prompts(scale, 10, 3_000, 200, 100),
        *workload.unique_prompts(4 * scale, 2_000, 100),
    ]
    return workload.arrive(sessions)


def serve(windows: Sequence[int | None], capacity: int, requests: list[PlannedRequest]) -> float:
    """Serve the requests one after the other, prompts in steps of 2,048. Returns the share of
    prompt tokens that is found, in memory for `capacity` tokens of all layers."""
    pool = BlockPool(1 + len(windows) * capacity // BLOCK_SIZE)
    memory = CachedGroupedMemory(pool, BLOCK_SIZE, windows, STEP)
    source, answers = random.Random(5), {}
    for planned in requests:
        prompt = planned.prompt(answers)
        answer = source.choices(range(VOCAB_SIZE), k=planned.output_len)
        answers[planned.request_id] = answer
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


def measure(measurement: Measurement) -> dict:
    requests = conversations(1 if measurement.tiny else 3)
    capacities = CAPACITIES[-1:] if measurement.tiny else CAPACITIES
    limit = serve([None], 10**6, requests)
    held = {
        kind: [max_blocks(n, BLOCK_SIZE, windows, 1) for n in LENGTHS]
        for kind, windows in KINDS.items()
    }
    found = {kind: [serve(w, n, requests) for n in capacities] for kind, w in KINDS.items()}
    config = {
        "block_size": BLOCK_SIZE,
        "window": WINDOW,
        "step": STEP,
        "num_requests": len(requests),
    }
    record = {"lengths": LENGTHS, "held": held, "capacities": capacities, "found": found}
    return {"config": config, **record, "limit": limit}


def draw(record: dict) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for kind, color in COLORS.items():
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


def tables(record: dict) -> dict[str, str]:
    rows = [
        [f"{n:,}", *(f"{100 * record['found'][kind][i]:.1f}" for kind in KINDS)]
        for i, n in enumerate(record["capacities"])
    ]
    head = ["memory, tokens in all layers", *(f"found, %, layers see {kind}" for kind in KINDS)]
    return {"groups": markdown_table(head, rows)}


if __name__ == "__main__":
    run_lab(__file__, "03_prefix_cache", {"groups": Part(measure, {"groups": draw}, tables)})
