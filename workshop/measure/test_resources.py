"""The gate: every kernel, compiled for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from workshop.measure.bench.bench_record import ROOT
from workshop.measure.resources import Resources

pytestmark = pytest.mark.needs("triton")

CLEAN = Resources("some_kernel", "bfloat16", 90, 0, 1024, True, "mma")


@pytest.mark.timeout(900)  # seconds of one core, which may be busy with other tests
def test_no_kernel_spills_and_all_fit_and_use_the_tensor_cores() -> None:
    """One launch in 16, in which nearly every kernel and dtype occurs, and every family. Without
    the interpreter; what was compiled before is kept in build/."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(ROOT / "build" / "triton")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "workshop.resources", "16"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[0]) >= 15 and "[80, 90, 100]" in result.stdout


COMPLAINTS = [  # a change, and what is said
    ({"stack_bytes": 8}, "has 8 bytes of stack"),
    ({"stack_bytes": 64, "kind": "float32"}, None),
    ({"stack_bytes": 72, "architecture": 80}, "has 72 bytes of stack"),
    ({"shared_bytes": (227 << 10) + 1}, "bytes of shared memory"),
    ({"shared_bytes": (99 << 10) + 1, "architecture": 89}, "bytes of shared memory"),
    ({"tensor_cores": ""}, "does not use the tensor cores"),
    ({"tensor_cores": "", "kind": "float32"}, None),
    ({"tensor_cores": "", "has_product": False}, None),
    ({"inexact": "div.full.f32"}, "has div.full.f32"),
]


def test_what_is_complained_of() -> None:
    for change, complaint in COMPLAINTS:
        found = list(replace(CLEAN, **change).complaints())
        assert [complaint in one for one in found if complaint] == [True] * bool(complaint), change
