"""Launches as PyTorch operations: only a dispatch mode or a tracer sees the launch."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from paged_attention_triton import TritonAttentionBackend, write_kv_launch
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


def fake_case():
    """A write of two tokens, on a GPU that is not there."""
    launch = write_kv_launch(1, 16, 4, torch.float32, 16, 16, (64, 16, 16))
    key, value = (torch.empty(2, 1, 16, device="cuda") for _ in range(2))
    caches = [torch.empty(3, 4, 1, 16, device="cuda") for _ in range(2)]
    return launch, [key, value, *caches, torch.empty(2, dtype=torch.int64, device="cuda")]


@pytest.mark.parametrize("at", range(5))
def test_fake_tensors_are_launched_on_and_one_of_another_device_or_dtype_is_found(at):
    """A write of two tokens, on a GPU that is not there."""
    launch = write_kv_launch(1, 16, 4, torch.float32, 16, 16, (64, 16, 16))
    with FakeTensorMode(), torch.inference_mode(), torch.device("cuda"):
        new, cache, slots = torch.empty(2, 1, 16), torch.empty(3, 4, 1, 16), torch.arange(2)
        arguments = [new, new, cache, cache, slots]
        launch((2,), *arguments)
        name, right = list(launch.arguments)[at], arguments[at]
        for other, match in (
            (torch.empty_like(right, device="cpu"), r"cpu.*cuda:0"),
            (torch.empty_like(right, dtype=torch.int32), f"{name} must be .*torch.int32"),
        ):
            arguments[at] = other
            with pytest.raises(ValueError, match=match):
                launch((2,), *arguments)
