"""The runner's side of adapters: the adapter of each row of a step.

The scheduler sends the digest of a request's adapter once, when the request is admitted. Each
runner assigns slots (`adapter_slots.py`); all ranks assign the same, without communication.

See 04_scheduler/beyond/ADAPTERS.md#how-is-a-mixed-batch-computed"""

from __future__ import annotations

import numpy as np

from common.features.adapters.adapter_slots import AdaptedModel, AdapterSlots, Ordered, StepAdapters
from common.sampling.runner_plugin import BroughtByFew, StepRows
from scheduler_interface import NewRequestData


class AdapterColumns(BroughtByFew):
    """The adapter of each row. A step without adapters stages nothing."""

    name = AdaptedModel.name
    is_in_forward = True

    def __init__(self, slots: AdapterSlots) -> None:
        super().__init__()
        self.slots = slots

    def admit(self, row: int, new: NewRequestData) -> None:
        digest = new.features.get(self.name)
        assert digest is None or digest in self.slots.taken, f"{new.req_id}: no adapter {digest}"
        self.put(row, digest)

    def column(self, rows: np.ndarray) -> np.ndarray:
        """Return the slot of each row, and load the rows' adapters into these slots."""
        digests = [self.brought[row] for row in rows.tolist()]
        slot_of = self.slots.bring_in(digest for digest in digests if digest is not None)
        return np.array([0 if d is None else slot_of[d] for d in digests], dtype=np.int64)

    def stage(self, step: StepRows) -> StepAdapters:
        slots = self.column(step.queries.rows)
        return StepAdapters(
            slots=self.slots,
            tokens=ordered(np.repeat(slots, step.queries.num_tokens)),
            sampled=ordered(np.repeat(slots, step.queries.num_logit_rows)),
        )


def ordered(slots: np.ndarray) -> Ordered:
    """Order rows by slot, and by row within a slot, without rows that have no adapter. The result
    can be empty, because a step with only unfinished prompt chunks samples from no row."""
    order = np.argsort(slots, kind="stable")
    order = order[np.count_nonzero(slots == 0) :]
    found, starts = np.unique(slots[order], return_index=True)
    stops = [*starts.tolist(), len(order)][1:]
    segments = list(zip(found.tolist(), starts.tolist(), stops, strict=True))
    if not segments or np.array_equal(order, np.arange(len(slots))):
        return Ordered(None, segments)
    return Ordered(order, segments)
