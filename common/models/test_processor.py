"""bfloat16 is chosen where the processor multiplies it, and nowhere else."""

from __future__ import annotations

import platform

import pytest
import torch

from common.models.processor import is_bfloat16_fast
from workshop.measure.bench.bench_models import choose_dtype
from workshop.measure.bench.bench_record import describe_environment


@pytest.mark.parametrize(
    ("machine", "onednn", "avx512_bf16", "amx", "expected"),
    [
        ("x86_64", True, True, False, True),
        ("AMD64", True, False, True, True),
        ("x86_64", True, False, False, False),  # AVX-512 without BF16
        ("x86_64", False, False, False, False),  # AVX2
        ("aarch64", True, False, False, True),
        ("aarch64", False, False, False, False),
    ],
)
def test_who_multiplies_bfloat16(
    machine, onednn, avx512_bf16, amx, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert is_bfloat16_fast() is expected
    assert choose_dtype("auto") == (torch.bfloat16 if expected else torch.float32)
    assert describe_environment()["multiplies_bf16_natively"] is expected
