"""Group rows by the matrices they are multiplied with: experts, or adapters.

owners of rows    7 2 7 2 2            whose matrices each row needs
order             1 3 4 | 0 2          rows of one owner next to each other, in their old order
segments          (2, 0, 3) (7, 3, 5)  owner, start, stop: one product each

See common/models/experts/README.md#how-does-a-token-choose"""

from __future__ import annotations

import numpy as np

Segments = list[tuple[int, int, int]]


def in_order(owners: np.ndarray) -> tuple[np.ndarray, Segments]:
    """Return `order` [num_rows] int64 for `owners` [num_rows] int64, and the segment of each
    owner's rows in it, the smallest owner first."""
    order = np.argsort(owners, kind="stable")
    found, starts = np.unique(owners[order], return_index=True)
    stops = [*starts.tolist(), len(order)][1:]
    return order, list(zip(found.tolist(), starts.tolist(), stops, strict=True))
