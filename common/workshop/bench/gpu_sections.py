"""What the GPU report measures, in order.

    ceilings             a large copy and a large matrix product; once more at the end
    numbers              every kernel against float64, or the PyTorch version's tokens
    kernels              every kernel's share of its ceiling, over a grid
    MODE: workload       the published workload; in every mode of the engine
    MODE: waits          of the host for the device
    MODE: decode steps   the engine's step against the roofline
    the model alone      the same step without a host
    transformers         the same workload

Each of them has a share of the time (`gpu_budget.py`)."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from common.workshop.bench.gpu_arithmetic import Ceilings
from common.workshop.bench.gpu_budget import Planned, Section
from common.workshop.bench.gpu_decode import measure_decode, measure_forward
from common.workshop.bench.gpu_engine import MODES, Engines, count_waits, measure_workload
from common.workshop.bench.gpu_inputs import Cell, Lab
from common.workshop.bench.gpu_kernels import GROUPS
from common.workshop.bench.gpu_transformers import measure_transformers
from common.workshop.bench.gpu_work import KernelGroup

NUM_ROUNDS_OF_CEILINGS = 15
ROOM = 1.3  # of memory that a cell takes, for what is made on the way
# Shares of the time: of the engine's sections in eager mode as in the others.
SHARES = {"workload": 0.09, "waits": 0.015, "decode steps": 0.07}


def plan_sections(lab: Lab) -> dict[str, Planned]:
    engines = Engines(lab)
    plan = {
        "ceilings": Planned(0.02, partial(measure_ceilings, lab)),
        "numbers": Planned(0.2, partial(check_numbers, lab)),
        "kernels": Planned(0.16, partial(measure_kernels, lab)),
    }
    measures = {
        "workload": measure_workload,
        "waits": count_waits,
        "decode steps": measure_decode,
    }
    for mode in MODES:
        for name, measure in measures.items():
            whole = partial(dropping, engines, partial(measure, engines, mode))
            plan[f"{mode}: {name}"] = Planned(SHARES[name], whole)
        if mode == "eager":
            alone = partial(dropping, engines, partial(measure_forward, engines))
            plan["the model alone"] = Planned(0.06, alone)
    plan["transformers"] = Planned(0.1, partial(measure_transformers, engines))
    plan["ceilings again"] = Planned(0.02, partial(measure_ceilings_again, lab, engines))
    return plan


def dropping(engines: Engines, measure: Callable[[Section], None], section: Section) -> None:
    """After an error the next section begins with another engine."""
    try:
        measure(section)
    except BaseException:
        with suppress(Exception):  # the first one counts
            engines.drop()
        raise


# -- the two ceilings


def measure_ceilings(lab: Lab, section: Section) -> None:
    """Both buffers and all matrices are larger than a cache, and random: zeros are faster."""
    sizes, device = lab.sizes, lab.device
    num_bytes = min(sizes.copy_bytes, device.free_bytes() // 8)
    source = lab.normal(num_bytes // 2, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    n = sizes.matrix_size
    a, b = lab.normal(n, n, dtype=torch.bfloat16), lab.normal(n, n, dtype=torch.bfloat16)
    product = torch.empty_like(a)
    calls: dict[str, Callable[[], Any]] = {
        "copy": partial(target.copy_, source),
        "matrix": partial(torch.mm, a, b, out=product),
    }
    times = device.time_in_turn(calls, NUM_ROUNDS_OF_CEILINGS, flushes=False)
    copied, multiplied = 2 * source.nbytes, 2 * n**3
    found = {
        "copy_gb_per_s": [round(copied / ms / 1e6, 2) for ms in times["copy"]],
        "matrix_tflop_per_s": [round(multiplied / ms / 1e9, 3) for ms in times["matrix"]],
    }
    section.results |= {"copy_bytes": source.nbytes, "matrix_size": n} | found
    if not torch.equal(source, target):
        raise AssertionError("what was copied is not what was there")
    lab.ceilings = ceilings_of(section.results)


def ceilings_of(results: dict[str, Any]) -> Ceilings:
    return Ceilings(
        statistics.median(results["copy_gb_per_s"]),
        statistics.median(results["matrix_tflop_per_s"]),
    )


def measure_ceilings_again(lab: Lab, engines: Engines, section: Section) -> None:
    """Whether the device is what it was at the start: nothing is set beside these."""
    engines.drop()
    before = lab.ceilings
    measure_ceilings(lab, section)
    lab.ceilings = before


# -- kernels


def check_numbers(lab: Lab, section: Section) -> None:
    rows = section.results["checks"] = []
    for group in GROUPS:
        if not section.has_time(group.name):
            continue
        with section.attempt(group.name), torch.inference_mode():
            for comparison in group.check(lab):
                note_check(section, rows, comparison.judge())
        lab.device.release()


def note_check(section: Section, rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    rows.append(row)
    if not row["is_right"]:
        error = f"error {row['error']}, tolerated {row['tolerance']}"
        section.fail(f"{row['kernel']}, {row['dtype']}, {row['what']}: {row.get('why', error)}")


def measure_kernels(lab: Lab, section: Section) -> None:
    """The first cell of each group, then the second of each, and so on."""
    section.results |= {"checks": [], "cells": []}
    order = [(i, group, cell) for group in GROUPS for i, cell in enumerate(group.cells(lab.sizes))]
    for _, group, cell in sorted(order, key=lambda entry: entry[0]):
        what = f"{group.name}, {group.describe(lab.sizes, cell)}"
        if not section.has_time(what):
            continue
        needed, free = ROOM * group.num_bytes(lab, cell), lab.device.free_bytes()
        if needed > free:
            section.note(f"left out, {needed / 1e9:.1f} GB do not fit in {free / 1e9:.1f}: {what}")
            continue
        with section.attempt(what), torch.inference_mode():
            measure_cell(lab, section, group, cell)
        lab.device.release()


def measure_cell(lab: Lab, section: Section, group: KernelGroup, cell: Cell) -> None:
    works = group.make(lab, cell)
    for work in works.values():
        for comparison in work.check() if work.check is not None else ():
            note_check(section, section.results["checks"], comparison.judge())
    calls = {name: record(lab, section, name, work.call) for name, work in works.items()}
    times = lab.device.time_in_turn(calls, lab.sizes.repeats)
    for name, work in works.items():
        section.results["cells"].append(
            {
                "group": group.name,
                "kernel": name,
                "cell": list(cell),
                "what": group.describe(lab.sizes, cell),
                "ms": times[name],
                **lab.measured.describe(work.cost),
            }
        )


def record(lab: Lab, section: Section, name: str, call: Callable[[], Any]) -> Callable[[], Any]:
    """As a graph. Where that fails, which is noted, as it is."""
    try:
        return lab.device.record_graph(call)
    except RuntimeError as error:
        section.note(f"{name} is timed with its launches, not as a graph: {error}")
        return call


def restore(lab: Lab, record: dict[str, Any]) -> None:
    """In a new process: what the sections that are done leave to the others."""
    results = record["sections"].get("ceilings", {}).get("results", {})
    if results.get("matrix_tflop_per_s"):
        lab.ceilings = ceilings_of(results)
