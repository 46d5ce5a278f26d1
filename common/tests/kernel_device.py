"""Kernels are tested on a GPU if there is one, else in Triton's interpreter.

Triton decides when it is imported, so the switch is set here: a chapter with kernels imports this
in its conftest.py, before any test module.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
