"""A model whose layers are kernels has the logits of the plain one, and launches what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.assembly.assembly import set_regions
from common.engine_config import SHIPPED_CHECKPOINT
from common.models.loader import load_model
from common.tests.model_cases import save_case
from common.tests.paged_harness import PagedHarness
from compiled_attention import HeadMajorKVCache
from mixed_attention_triton import MixedTritonAttentionBackend
from paged_attention import PagedKVCache
from paged_attention_triton import TritonAttentionBackend

pytestmark = pytest.mark.needs("triton")

LAYOUTS = {"slots": PagedKVCache, "heads": HeadMajorKVCache}  # what lies first in a block
CPU = torch.device("cpu")
# A prompt, a decode of it beside another prompt, and then a chunk and two decodes: (request, first
# position, number of tokens).
STEPS = ([(0, 0, 9)], [(1, 0, 5), (0, 9, 1)], [(2, 0, 7), (0, 10, 1), (1, 5, 1)], [(2, 7, 6)])


def all_logits(harness: PagedHarness) -> list[torch.Tensor]:
    """Logits of all steps; in the last one, only two rows."""
    torch.manual_seed(0)
    tokens = torch.randint(2, 80, (3, 20)).tolist()
    steps = [[(r, at, tokens[r][at : at + n]) for r, at, n in work] for work in STEPS]
    rows = [None] * (len(steps) - 1) + [[5, 2]]
    return [harness.step(*one).double().cpu() for one in zip(steps, rows, strict=True)]


@pytest.mark.sample(every=2, first=1)  # bfloat16 and float32; slots and heads
@pytest.mark.parametrize(
    ("name", "layout", "dtype", "tolerance"),  # of the largest logit
    [
        ("shipped", "slots", torch.float32, 1e-5),
        ("qwen2-untied", "slots", torch.bfloat16, 3e-2),
        ("qwen2", "slots", torch.float32, 1e-5),
        ("qwen3-biases", "heads", torch.float32, 1e-5),
        ("llama-biases", "heads", torch.float32, 1e-5),
        ("gemma3", "slots", torch.bfloat16, 2e-1),  # its attention is sharp
        ("gemma3-biases", "heads", torch.float32, 1e-5),
        ("olmo3", "slots", torch.float32, 1e-5),
    ],
)
def test_the_logits_are_those_of_float64(
    name, layout, dtype, tolerance, tmp_path: Path, device: torch.device, launched: list[str]
) -> None:
    """In caches full of NaN, whose blocks lie in either order."""
    path = SHIPPED_CHECKPOINT if name == "shipped" else save_case(name, tmp_path)
    plain = load_model(path, torch.float64, CPU).model
    expected = all_logits(PagedHarness(plain, 3))
    assert not launched
    model = load_model(path, dtype, device).model
    set_regions(model, is_compiled=False, is_triton=True)
    backend = TritonAttentionBackend() if layout == "heads" else MixedTritonAttentionBackend()
    found = all_logits(PagedHarness(model, 3, kind=LAYOUTS[layout], backend=backend))
    for one, reference in zip(found, expected, strict=True):
        assert one.shape == reference.shape and not one.isnan().any()
        assert (one - reference).abs().max() <= tolerance * reference.abs().max()
        assert dtype != torch.float32 or torch.equal(one.argmax(-1), reference.argmax(-1))
    assert "_write_kv_kernel" not in launched, "it is part of rotate_and_write"
