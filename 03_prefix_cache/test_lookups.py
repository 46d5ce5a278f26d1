"""What each cache finds and evicts, step by step: `lookups.txt`."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_log import CacheLog
from kv_slots import PREFIX_CACHES
from step_log import Case, cases_of


@pytest.mark.net
@cases_of(Path(__file__).with_name("lookups.txt"))
def test_lookups(case: Case) -> None:
    """With both caches, unless the case names one, and blocks of several sizes."""
    options = dict(case.options)
    names = [options.pop("cache")] if "cache" in options else list(PREFIX_CACHES)
    for name in names:
        for block_size in (1, 3, 16):
            print(f"{name} cache, blocks of {block_size} tokens")
            CacheLog(PREFIX_CACHES[name], block_size, **options).perform(case)
