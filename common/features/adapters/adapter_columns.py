"""The runner's side of adapters: which row of a step has which.

What crosses is the digest of a request's adapter, once, when the request is admitted. The slots are
the runner's own affair (`adapter_slots.py`), so ranks agree on them without a word."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from common.features.adapters.adapter_slots import AdaptedModel, AdapterSlots, Ordered, StepAdapters
from common.models.rows_by_owner import in_order
from common.sampling.runner_plugin import BroughtByFew, StepRows, UploadBuffer
from scheduler_interface import NewRequestData


class AdapterColumns(BroughtByFew):
    """Stages nothing in a step whose rows have no adapters."""

    name = AdaptedModel.name

    def __init__(self, slots: AdapterSlots) -> None:
        super().__init__()
        self.slots = slots

    def admit(self, row: int, new: NewRequestData) -> None:
        digest = new.features.get(self.name)
        assert digest is None or digest in self.slots.taken, f"{new.req_id}: no adapter {digest}"
        self.put(row, digest)

    def column(self, rows: np.ndarray) -> np.ndarray:
        """The slot of each, which then holds its adapter."""
        digests = [self.brought[row] for row in rows.tolist()]
        slot_of = self.slots.bring_in(digest for digest in digests if digest is not None)
        return np.array([0 if d is None else slot_of[d] for d in digests], dtype=np.int64)

    def stage(self, step: StepRows, upload: UploadBuffer) -> Callable[[], Any]:
        slots = self.column(step.queries.rows)
        tokens = ordered(np.repeat(slots, step.queries.num_tokens), upload)
        sampled = ordered(np.repeat(slots, step.queries.num_logit_rows), upload)
        return lambda: StepAdapters(self.slots, tokens(), sampled())


def ordered(slots: np.ndarray, upload: UploadBuffer) -> Callable[[], Ordered]:
    """By slot, in order of rows within each; those without an adapter are left out. Nobody may be
    left: of a step that only cuts prompts no row is sampled from."""
    with_one = np.flatnonzero(slots)
    order, segments = in_order(slots[with_one])
    order = with_one[order]
    if not segments or np.array_equal(order, np.arange(len(slots))):
        return partial(Ordered, None, segments)
    sent: Callable[[], torch.Tensor] = upload.add(order)
    return lambda: Ordered(sent(), segments)
