"""All exhibits, in the order of the chapters; a visitor names one by its place, from 1."""

from __future__ import annotations

from common.workshop.museum import (
    bugs_batching,
    bugs_chunks,
    bugs_engine,
    bugs_paged_kv,
    bugs_prefix_cache,
    bugs_scheduler,
    bugs_speculation,
)
from common.workshop.museum.exhibit import Exhibit

EXHIBITS: tuple[Exhibit, ...] = (
    *bugs_batching.EXHIBITS,
    *bugs_paged_kv.EXHIBITS,
    *bugs_prefix_cache.EXHIBITS,
    *bugs_scheduler.EXHIBITS,
    *bugs_speculation.EXHIBITS,
    *bugs_chunks.EXHIBITS,
    *bugs_engine.EXHIBITS,
)

TITLES = {  # of the folders that the bugs are put into
    "01_batching": "1. Batching",
    "02_paged_kv": "2. Paged KV",
    "03_prefix_cache": "3. Prefix cache",
    "04_scheduler": "4. Scheduler",
    "05_spec_decode": "5. Speculative decoding",
    "06_chunked_prefill": "6. Chunked prefill",
    "common": "The engine around them",
}
