"""The dtypes that this processor multiplies natively.

See common/README.md"""

from __future__ import annotations

import platform

import torch


def is_bfloat16_fast() -> bool:
    """Whether bfloat16 matrices beat float32 ones on this CPU: AVX-512 BF16 or AMX, on x86.

    oneDNN's own check accepts any AVX-512, where it converts to float32 and back."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
