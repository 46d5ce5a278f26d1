"""What each cache finds and evicts, step by step: `lookups.txt`."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_log import CacheLog
from step_log import Case, cases_of


@pytest.mark.net
@cases_of(Path(__file__).with_name("lookups.txt"))
def test_lookups(case: Case, make_caches) -> None:
    """With both caches, unless the case names one, and blocks of several sizes."""
    options = dict(case.options)
    names = [options.pop("cache")] if "cache" in options else list(make_caches)
    for name in names:
        for block_size in (1, 3, 16):
            print(f"{name} cache, blocks of {block_size} tokens")
            CacheLog(make_caches[name], block_size, **options).perform(case)
