"""The assembly for layers with an attention window: unsupported options, and the KV memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from block_pool import BlockPool
from cached_grouped_memory import CachedGroupedMemory
from common.engine_config import EngineConfig
from common.models.layer_groups import LayerGroups, Window
from grouped_kv_memory import GroupedKVMemory

logger = logging.getLogger(__name__)


def check_windows(config: EngineConfig, groups: LayerGroups) -> None:
    """Raise `ValueError` for options that are not supported for layers with a window."""
    spec_config = config.speculation
    refused = {
        # A draft model's keys use the slots of layers with full attention.
        'speculative other than "ngram", where no layer sees everything,': (
            spec_config is not None and spec_config.method != "ngram" and None not in groups.windows
        ),
        "kv_tiers": config.kv_tiers is not None,
        "kv_connector": config.kv_connector is not None,
        f"prefix_cache={config.prefix_cache!r}": config.prefix_cache not in (None, "hash"),
        f"scheduler={config.scheduler!r}": config.scheduler != "two_phase",
    }
    window = min(window for window in groups.windows if window is not None)
    for name, is_asked in refused.items():
        if is_asked:
            raise ValueError(
                f"{name} is not supported for layers with a window; set max_model_len={window}, "
                "with which no layer has one"
            )
    logger.info(
        "%d groups of layers have block tables of their own; of %d places for a layer %d are "
        "unused",
        len(groups.windows),
        len(groups.windows) * groups.num_tensors,
        groups.num_unused,
    )


def make_grouped_memory(
    config: EngineConfig, num_blocks: int, windows: Sequence[Window], device: torch.device
) -> GroupedKVMemory:
    kind = GroupedKVMemory if config.prefix_cache is None else CachedGroupedMemory
    step = config.num_in_flight_tokens(device)
    return kind(BlockPool(num_blocks), config.block_size, windows, step)
