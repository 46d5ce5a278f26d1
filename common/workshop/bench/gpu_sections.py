"""What the GPU report measures, in order.

    ceilings             a large copy and a large matrix product; once more at the end
    numbers              every kernel against float64, or the PyTorch version's tokens
    kernels              every kernel's share of its ceiling, over a grid
    MODE: workload       the published workload; in every mode of the engine
    MODE: waits          of the host for the device
    MODE: decode steps   the engine's step against the roofline
    the model alone      the same step without a host
    transformers         the same workload

How each of them is kept apart from the others: `gpu_budget.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from common.workshop.bench.gpu_budget import Planned, Section
from common.workshop.bench.gpu_device import release, time_call
from common.workshop.bench.gpu_engine import (
    MODES,
    Engines,
    count_waits_of,
    measure_decode,
    measure_forward,
    measure_transformers,
    measure_workload,
)
from common.workshop.bench.gpu_inputs import Call, Lab, describe_batch
from common.workshop.bench.gpu_kernels import GROUPS, KernelGroup

# Of the whole result's size; the largest single error may be so large relative to the largest
# number of the result, twice.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def plan_sections(lab: Lab) -> dict[str, Planned]:
    engines = Engines(lab)
    plan = {
        "ceilings": Planned(0.02, partial(measure_ceilings, lab)),
        "numbers": Planned(0.2, partial(check_numbers, lab)),
        "kernels": Planned(0.16, partial(measure_kernels, lab)),
    }
    for mode in MODES:
        plan[f"{mode}: workload"] = Planned(0.09, partial(measure_workload, engines, mode))
        plan[f"{mode}: waits"] = Planned(0.015, partial(count_waits_of, engines, mode))
        plan[f"{mode}: decode steps"] = Planned(0.07, partial(measure_decode, engines, mode))
        if mode == "eager":
            plan["the model alone"] = Planned(0.06, partial(measure_forward, engines))
    plan["transformers"] = Planned(0.1, partial(measure_transformers, engines))
    plan["ceilings again"] = Planned(0.02, partial(measure_ceilings, lab))
    return plan


# -- the two ceilings


def measure_ceilings(lab: Lab, section: Section) -> None:
    """Both buffers and all matrices are larger than a cache, and random: zeros are faster."""
    n, kind = lab.sizes.matrix_size, torch.bfloat16
    source = lab.normal(lab.sizes.copy_bytes // 2, dtype=kind)
    target = torch.empty_like(source)
    a, b = lab.normal(n, n, dtype=kind), lab.normal(n, n, dtype=kind)
    product = torch.empty_like(a)
    copied = time_call(partial(target.copy_, source), lab.device)["ms"]
    multiplied = time_call(partial(torch.mm, a, b, out=product), lab.device)["ms"]
    if not torch.equal(source, target):
        raise AssertionError("what was copied is not what was there")
    # Median, lowest, highest.
    gb = [float(f"{2 * source.nbytes / copied[i] / 1e6:.5g}") for i in (0, 2, 1)]
    tflop = [float(f"{2 * n**3 / multiplied[i] / 1e9:.5g}") for i in (0, 2, 1)]
    section.results |= {"copy_bytes": source.nbytes, "matrix_size": n}
    section.results |= {"copy_gb_per_s": gb, "matrix_tflop_per_s": tflop}


# -- kernels


def judge(found: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    """`expected` is float64, or what has to be equal, which numbers of `found`'s dtype have to be.
    `error`: the norm of the difference relative to the expected; else how many are others. NaN
    where nothing is expected to be is an error of infinity, written as None."""
    wrong = {"error": None, "tolerance": 0, "is_right": False}
    if found.shape != expected.shape:
        return wrong | {"why": f"{tuple(found.shape)}, not {tuple(expected.shape)}"}
    others = (found.isnan() != expected.isnan()).sum().item()
    if found.dtype == expected.dtype:
        others += (found.nan_to_num() != expected.nan_to_num()).sum().item()
        return wrong | {"error": others, "is_right": others == 0}
    if others or found.dtype not in TOLERANCE:
        return wrong | {"why": f"{others} are no numbers, or should be none; {found.dtype}"}
    expected = expected.nan_to_num()
    difference = found.double().nan_to_num() - expected
    norm = difference.norm().item() / max(expected.norm().item(), 1e-30)
    worst = difference.abs().max().item() / max(expected.abs().max().item(), 1e-30)
    tolerance = TOLERANCE[found.dtype]
    is_right = norm <= tolerance and worst <= 2 * tolerance
    return {"error": norm, "largest_error": worst, "tolerance": tolerance, "is_right": is_right}


def check(section: Section, name: str, work: Call, dtype: torch.dtype) -> None:
    """One row for each of its results."""
    expected = work.expected()
    for tensor in expected.values():  # what is made next and not written is likely to be NaN
        torch.full_like(tensor.float(), torch.nan)
    for found, (what, right) in zip(work.call(), expected.items()):
        row = {"kernel": name, "dtype": str(dtype)[6:], "what": what} | judge(found, right)
        section.results["checks"].append(row)
        if not row["is_right"]:
            error = f"error {row['error']}, tolerated {row['tolerance']}"
            section.fail(f"{name}, {row['dtype']}, {what}: {row.get('why', error)}")


def describe_place(place: Any) -> str:
    return f"{place:,}" if isinstance(place, int) else describe_batch(place)


def check_numbers(lab: Lab, section: Section) -> None:
    section.results["checks"] = []
    for group in GROUPS:
        for place in group.checked(lab.sizes):
            for dtype in group.dtypes:
                what = f"{group.name}, {describe_place(place)}, {dtype}"
                if section.has_time(what):
                    with section.attempt(what), torch.inference_mode():
                        for name, work in group.make(lab, place, dtype).items():
                            check(section, name, work, dtype)


def measure_kernels(lab: Lab, section: Section) -> None:
    """The first place of each group, then the second of each, and so on."""
    section.results |= {"checks": [], "cells": []}
    places = [(i, g, p) for g in GROUPS for i, p in enumerate(g.timed(lab.sizes))]
    for _, group, place in sorted(places, key=lambda entry: entry[0]):
        what = f"{group.name}, {describe_place(place)}"
        if section.has_time(what):
            with section.attempt(what), torch.inference_mode():
                measure_place(lab, section, group, place)
            release(lab.device)


def cell_of(place: Any) -> list[int] | None:
    """Sequences and keys of each, where all of them decode at the same place."""
    if isinstance(place, int) or set(place) != {(1, place[0][1])}:
        return None
    return [len(place), place[0][1]]


def measure_place(lab: Lab, section: Section, group: KernelGroup, place: Any) -> None:
    where: dict[str, Any] = {
        "group": group.name,
        "cell": cell_of(place),
        "what": describe_place(place),
    }
    dtype = lab.dtype if lab.dtype in group.dtypes else group.dtypes[0]
    for name, work in group.make(lab, place, dtype).items():
        check(section, name, work, dtype)
        timed = time_call(work.call, lab.device)
        described = lab.ceilings.describe(work.cost)
        section.results["cells"].append(where | {"kernel": name} | timed | described)
