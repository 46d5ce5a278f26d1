"""The gate: every kernel, compiled for GPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from workshop.measure import resources
from workshop.measure.bench.bench_record import ROOT
from workshop.measure.resources import Resources

pytestmark = pytest.mark.needs("triton")

CLEAN = Resources("some_kernel", "a model", "bfloat16", 90, "64 x 64", 4, 128, 0, 1024, "mma")


def compile_in_another_process(*arguments: str) -> list[Resources]:
    """Without the interpreter. What was compiled before is kept in build/."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    environment["TRITON_CACHE_DIR"] = str(ROOT / "build" / "triton")
    result = subprocess.run(
        [sys.executable, "-m", "workshop.resources", "--json", *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return [Resources(**one) for one in json.loads(result.stdout.splitlines()[-1])]


def check_what_was_compiled(found: list[Resources]) -> None:
    assert len({one.kernel for one in found}) >= 11 and len({one.kind for one in found}) >= 3
    assert resources.FAMILIES.keys() <= {one.family for one in found}
    for one in found:
        assert 8 <= one.registers <= 255 and (one.registers >= 40 or not one.has_product), one
        if one.architecture == 90 and one.has_product and one.kind in ("bfloat16", "float16"):
            is_long = not one.tile.startswith("16 ")
            assert (one.tensor_cores == "wgmma.mma_async") == is_long, one


@pytest.mark.timeout(900)  # seconds of one core, which may be busy with other tests
def test_no_kernel_spills_and_all_fit_and_use_the_tensor_cores():
    """A sample, in which nearly every kernel and dtype occurs, and every family."""
    found = compile_in_another_process("--every", "16")
    check_what_was_compiled(found)
    assert {one.architecture for one in found} == {80, 90, 100}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"stack_bytes": 8}, "has 8 bytes of stack"),
        ({"stack_bytes": 64, "kind": "float32"}, None),
        ({"stack_bytes": 64, "architecture": 100}, None),
        ({"stack_bytes": 72, "architecture": 80}, "has 72 bytes of stack"),
        ({"shared_bytes": (227 << 10) + 1}, "bytes of shared memory"),
        ({"shared_bytes": (99 << 10) + 1, "architecture": 89}, "bytes of shared memory"),
        ({"tensor_cores": ""}, "does not use the tensor cores"),
        ({"tensor_cores": "", "kind": "float32"}, None),
        ({"tensor_cores": "", "tile": ""}, None),
        ({"inexact": "div.full.f32"}, "has div.full.f32"),
    ],
)
def test_what_is_complained_of(change, complaint):
    found = list(replace(CLEAN, **change).complaints())
    assert len(found) == (complaint is not None)
    assert complaint is None or complaint in found[0]
