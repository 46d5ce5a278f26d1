"""Launches as PyTorch operations: only a dispatch mode or a tracer sees the launch."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paged_attention_triton import TritonAttentionBackend
from split_attention_triton import SplitTritonAttentionBackend
from test_paged_attention import make_case


class Watcher(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [TritonAttentionBackend, SplitTritonAttentionBackend])
def test_a_watched_launch_computes_the_same(kind, device):
    """Kernels for other constants are other operations, and stay what they are."""
    names = {"_paged_attention_kernel"}
    if kind is SplitTritonAttentionBackend:
        names = {"_plan_items_kernel", "_split_attention_kernel", "_merge_splits_kernel"}
    for block_size in (16, 4, 16):
        case = make_case([(2, 270)], block_size, torch.float32, device=device)
        expected = case.attend(case.plan(kind()))
        with Watcher() as watcher:
            output = case.attend(case.plan(kind()))
        assert torch.equal(output, expected)
        kernels = [name for name in watcher.seen if name.startswith("kernels.")]
        found = {name.removeprefix("kernels.").rpartition("_")[0] for name in kernels}
        assert found == names, kernels
        # The operations inside a kernel are not PyTorch's, so only the launch is seen.
        assert watcher.seen[-1] == kernels[-1]
