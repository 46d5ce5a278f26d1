"""The kernels against float64: on a GPU if there is one, else in the interpreter (`conftest.py`
switches it on). What both versions promise is in `test_split_attention_triton.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from paged_attention import write_kv
from paged_attention_triton import TritonAttentionBackend, write_kv_triton
from test_decode_attention import TOLERANCE, head_major
from test_paged_attention import Case, make_case

LENGTHS = [(1, 1), (5, 5), (1, 70), (7, 20)]


def check(case: Case, backend: type[TritonAttentionBackend]) -> Any:
    """The plan, if the output is right."""
    plan = case.plan(backend())
    output, num_tokens = case.attend(plan), sum(case.query_lens)
    assert output.dtype == case.query.dtype
    error = (output[:num_tokens].double().cpu() - case.expected()).abs()
    assert not error.isnan().any() and (error <= TOLERANCE[output.dtype]).all()
    assert not output[num_tokens:].any(), "rows of padding tokens are zero"
    return plan


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16, 33, 256])
def test_any_mix_of_query_lengths_through_shuffled_tables(block_size, device):
    """Traps 28, 35: what a query may not see, NaN in each unused slot included, is never read."""
    case = make_case(
        LENGTHS, block_size, torch.float32, num_padding_tokens=2, seed=block_size, device=device
    )
    check(case, TritonAttentionBackend)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("layout", [torch.clone, head_major], ids=["block major", "head major"])
def test_written_tokens_stand_in_their_slots_and_nothing_else_changes(block_size, layout, device):
    torch.manual_seed(block_size)
    qkv = torch.randn(6, 3, 3, 5, device=device)  # a fused projection: tokens lie apart
    key, value = qkv[:, 1].contiguous(), qkv[:, 2]
    slots = torch.randperm(7 * block_size, device=device)[:6]
    slots[2] = slots[5] = -1
    expected = [torch.full((7, block_size, 3, 5), 9.0, device=device) for _ in range(2)]
    caches = [layout(cache) for cache in expected]
    write_kv_triton(key, value, *caches, slots)
    write_kv(key, value, *expected, slots)
    assert all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))
    assert not torch.equal(caches[0], torch.full_like(caches[0], 9.0))


def test_what_the_kernels_cannot_do_is_refused(device):
    check_refusals(TritonAttentionBackend(), device)


def check_refusals(backend: TritonAttentionBackend, device: str) -> None:
    with pytest.raises(ValueError, match="float64"):
        make_case([(1, 4)], 4, torch.float64, device=device).plan(backend)
    with pytest.raises(ValueError, match="head_dim 300"):
        make_case([(1, 4)], 4, torch.float32, head_dim=300, device=device).plan(backend)
    case = make_case([(1, 4)], 4, torch.float32, device=device)
    case.key_cache = case.key_cache.transpose(0, 1)
    with pytest.raises(ValueError, match="contiguous"):
        case.attend(case.plan(backend))


ASK = """
try:
    import paged_attention_triton as module
    module.TritonAttentionBackend()
except RuntimeError as error:
    print(error)
"""
WITHOUT = "import sys, torch; torch.cuda.is_available = lambda: False; sys.modules['triton'] = None"
WITH = "for name in ('triton', 'triton_or_none', 'paged_attention_triton'): del sys.modules[name]"


def test_importing_works_anywhere_and_asking_for_what_is_missing_says_what_to_do():
    """In a process without the interpreter: without Triton, and then with it, without CUDA."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", f"{WITHOUT}\n{ASK}\n{WITH}\n{ASK}"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert "pip install triton" in first and "TRITON_INTERPRET=1" in second
    assert all("attention_backend='torch'" in error for error in (first, second))
