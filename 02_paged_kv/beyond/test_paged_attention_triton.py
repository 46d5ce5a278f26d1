"""The kernels against the PyTorch version: on a GPU if there is one, else in the interpreter
(`conftest.py` switches it on)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from paged_attention import write_kv
from paged_attention_triton import TritonAttentionBackend, write_kv_triton
from test_paged_attention import Case, make_case

LENGTHS = [(1, 1), (5, 5), (1, 70), (7, 20)]


def check(case: Case, dtype: torch.dtype = torch.float32) -> None:
    output = case.attend(case.plan(TritonAttentionBackend()))
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(output, case.attend(), atol=tolerance, rtol=0)
    assert not output[sum(case.query_lens) :].any()


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16, 33, 256])
def test_any_mix_of_query_lengths_through_shuffled_tables(block_size, device):
    """Traps 28, 35: what a query may not see, NaN in each unused slot included, is never read."""
    case = make_case(
        LENGTHS, block_size, torch.float32, num_padding_tokens=2, seed=block_size, device=device
    )
    check(case)


@pytest.mark.parametrize("num_kv_heads, num_shared", [(1, 1), (1, 8), (4, 1), (2, 3)])
def test_grouped_query_heads(num_kv_heads, num_shared, device):
    check(
        make_case(
            LENGTHS,
            4,
            torch.float32,
            num_kv_heads=num_kv_heads,
            num_shared=num_shared,
            device=device,
        )
    )


@pytest.mark.parametrize("head_dim", [1, 24, 80, 256])
def test_head_dims_are_padded(head_dim, device):
    case = make_case(LENGTHS, 4, torch.float32, num_kv_heads=1, head_dim=head_dim, device=device)
    check(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, device):
    check(make_case(LENGTHS, 16, dtype, head_dim=16, device=device), dtype)


def test_prompts_longer_than_a_tile_and_keys_longer_than_a_tile(device):
    check(make_case([(70, 70), (40, 150), (1, 200), (64, 65)], 16, torch.float32, device=device))


def test_batches_without_tokens_and_sequences_without_tokens(device):
    check(make_case([], 4, torch.float32, device=device))
    check(make_case([(0, 9), (1, 5), (0, 3), (4, 6)], 4, torch.float32, device=device))


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_written_tokens_stand_in_their_slots_and_nothing_else_changes(block_size, device):
    torch.manual_seed(block_size)
    qkv = torch.randn(6, 3, 3, 5, device=device)  # heads of a fused projection: not contiguous
    key, value = qkv[:, 1], qkv[:, 2]
    slots = torch.randperm(7 * block_size, device=device)[:6]
    slots[2] = slots[5] = -1
    caches = [torch.full((7, block_size, 3, 5), 9.0, device=device) for _ in range(4)]
    write_kv_triton(key, value, caches[0], caches[1], slots)
    write_kv(key, value, caches[2], caches[3], slots)
    assert torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])
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


WITHOUT_TRITON = "import sys; sys.modules['triton'] = None; "
WITHOUT_CUDA = "import torch; torch.cuda.is_available = lambda: False; "
CONSTRUCT = "import paged_attention_triton as module; module.TritonAttentionBackend()"


@pytest.mark.parametrize(
    "setup, message",
    [(WITHOUT_TRITON, "pip install triton"), (WITHOUT_CUDA, "TRITON_INTERPRET=1")],
    ids=["no triton", "no cuda"],
)
def test_importing_works_anywhere_and_asking_for_what_is_missing_says_what_to_do(setup, message):
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run(
        [sys.executable, "-c", setup + CONSTRUCT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode != 0
    assert "RuntimeError" in result.stderr and message in result.stderr
    assert "attention_backend='torch'" in result.stderr
