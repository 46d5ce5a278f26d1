"""`transformers` on the workload of the GPU report: its `generate`, on the same weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from common.workshop.bench.bench_models import make_twin
from common.workshop.bench.bench_work import BenchRequest
from common.workshop.bench.gpu_arithmetic import kv_bytes_per_token
from common.workshop.bench.gpu_budget import Section
from common.workshop.bench.gpu_engine import ENDED_EARLY, TEMPERATURE, Engines, Run, requests_of
from common.workshop.bench.gpu_inputs import Lab
from static_batching import pad_left

ROOM = 1.3  # of a batch's KV: its cache grows by copying a layer at a time


def measure_transformers(engines: Engines, section: Section) -> None:
    """Padded batches as large as memory allows, each until its longest request is done. What nobody
    asked for is not counted."""
    engines.drop()
    lab, twin = engines.lab, make_twin(engines.loaded)
    requests = requests_of(lab, 0)
    hf_generate(twin, requests[:4], 2, None)
    num_at_once = rows_that_fit(lab, requests)
    section.results |= {"num_requests": len(requests), "num_at_once": num_at_once, "runs": []}
    counts = None
    while counts is None and section.has_time("a run"):
        lab.device.synchronize()
        start = time.perf_counter()
        counts = serve_padded(twin, requests, num_at_once, section)
        lab.device.synchronize()
        seconds = time.perf_counter() - start
        if counts is None:
            num_at_once = section.results["num_at_once"] = num_at_once // 2
            lab.device.release()
            continue
        is_complete = sum(counts) == sum(request.max_tokens for request in requests)
        run = Run(seconds, sum(counts), is_complete).as_record()
        section.results["runs"].append(run)
        if not is_complete:
            section.cut(ENDED_EARLY)


def rows_that_fit(lab: Lab, requests: Sequence[BenchRequest]) -> int:
    """Of a batch: all, or a half, a quarter, ... of them."""
    longest = max(len(r.prompt_token_ids) for r in requests) + max(r.max_tokens for r in requests)
    row_bytes = ROOM * longest * kv_bytes_per_token(lab.sizes.model, lab.dtype.itemsize)
    num_rows = len(requests)
    while num_rows > 1 and num_rows * row_bytes > lab.device.free_bytes():
        num_rows //= 2
    return num_rows


def serve_padded(
    twin: Any, requests: Sequence[BenchRequest], num_at_once: int, section: Section
) -> list[int] | None:
    """Tokens that each got and had asked for, until the time is up. None: memory was too small."""
    counts: list[int] = []
    try:
        for first in range(0, len(requests), num_at_once):
            batch = requests[first : first + num_at_once]
            if section.seconds_left() <= 0:
                break
            longest = max(r.max_tokens for r in batch)
            made = hf_generate(twin, batch, longest, section.seconds_left())
            counts += [min(made, r.max_tokens) for r in batch]
    except torch.OutOfMemoryError:
        if num_at_once == 1:
            raise
        return None
    return counts


def hf_generate(
    twin: Any, requests: Sequence[BenchRequest], max_tokens: int, max_time: float | None
) -> int:
    """How many tokens each row got: `max_tokens`, or as many as `max_time` seconds allow."""
    ids, mask = pad_left([r.prompt_token_ids for r in requests])
    generation = GenerationConfig(
        max_new_tokens=max_tokens,
        max_time=max_time,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        pad_token_id=0,
        eos_token_id=None,
    )
    where = twin.device
    output = twin.generate(
        ids.to(where), attention_mask=mask.to(where), generation_config=generation
    )
    return output.shape[1] - ids.shape[1]
