"""Runner plugins: features on the runner's side, notified of events by hooks.

    a request starts, and ends     admit, release     its row, and the data in its message
    more rows are needed           grow
    a step is laid out             stage              arrays into the step's one upload
    the device computes            before_sampling    host work during the forward pass

Data of a request is stored in columns of the plugin, by row. Data of a step is stored in the batch,
because two steps can be in flight. Hooks are called in the order of the plugin list, which is in
the assembly.

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from batch_layout import Queries, all_to_device
from scheduler_interface import NewRequestData

NO_TOKEN = "no token may come next"  # because of a request's rules


class DeviceArgs:
    """The base of dataclasses whose arrays become tensors when `UploadBuffer.send` is called."""


class UploadBuffer:
    """Arrays that are sent to a device in one copy: the given ones, and those of `fill`."""

    def __init__(self, device: torch.device, arrays: Sequence[np.ndarray] = ()) -> None:
        self.device = device
        self.arrays = list(arrays)
        self._num_given = len(arrays)
        self._places: list[tuple[object, str]] = []

    def fill(self, part: DeviceArgs) -> None:
        """Add each array of `part`, and of the `DeviceArgs` inside it, alone or in lists."""
        for name, value in vars(part).items():
            if isinstance(value, np.ndarray):
                self._places.append((part, name))
                self.arrays.append(np.ascontiguousarray(value))  # as kernels need it
            elif isinstance(value, DeviceArgs):
                self.fill(value)
            elif isinstance(value, list) and value and isinstance(value[0], DeviceArgs):
                for inner in value:
                    self.fill(inner)

    def send(self) -> list[torch.Tensor]:
        """Replace the arrays of `fill` with their tensors, and return the tensors of the given
        ones."""
        tensors = all_to_device(self.device, self.arrays)
        for (part, name), tensor in zip(self._places, tensors[self._num_given :], strict=True):
            setattr(part, name, tensor)
        return tensors[: self._num_given]


class HasTokens(Protocol):
    """Columns of the runner's state, a row for each request."""

    token_ids: np.ndarray  # [num_rows, max_len] int32: prompt, outputs, drafts of this step
    num_tokens: np.ndarray  # [num_rows] int64: prompt and outputs
    num_prompt_tokens: np.ndarray  # [num_rows] int64

    def fill_in(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return ids on the device, with the pending ones (below 0) filled in."""
        ...

    def known(self, token_id: int) -> int:
        """Return one id on the host, which waits for a pending token. Below 0: no token."""
        ...


class StepRows(NamedTuple):
    """The requests of a step, in the order of the batch. Each query has `num_tokens` consecutive
    tokens of the model's input and `num_logit_rows` consecutive rows of logits."""

    state: HasTokens
    req_ids: Sequence[str]  # [num_queries]
    queries: Queries
    drafts: dict[str, list[int]]  # as in the plan


class RunnerPlugin:
    """The base class of plugins. A hook may not change its arguments."""

    name: str = ""  # its data in a request is `NewRequestData.features[name]`, if any
    is_in_forward = False  # whether the forward pass uses what it stages

    def grow(self, num_rows: int) -> None:
        """Grow the columns to `num_rows`, which is never fewer than before. Existing rows are
        unchanged."""

    def admit(self, row: int, new: NewRequestData) -> None:
        """Assign the row to this request."""

    def release(self, row: int) -> None:
        """Free the row. After a step that failed, called for every row, used or not."""

    def concerns(self, rows: np.ndarray) -> bool:
        """Whether a step of these rows uses what the plugin stages."""
        return False

    def stage(self, step: StepRows) -> DeviceArgs | None:
        """Return what is stored in the batch as `staged[name]`; None for nothing."""

    def column(self, rows: np.ndarray) -> np.ndarray:
        """Return an integer for each row; 0 is the padding. Called instead of `stage` in a step of
        one token per row that is replayed from a graph, if graphs with this plugin's name were
        captured (`graphs.py`)."""
        raise NotImplementedError

    def before_sampling(self, step: StepRows, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits to sample from, [num_logit_rows, vocab_size or wider], while the device
        computes the given ones."""
        return logits

    def num_possible(self, state: HasTokens, row: int, drafts: Sequence[int]) -> int:
        """Return how many of these drafts could be accepted, from the first one on. The others are
        not verified."""
        return len(drafts)

    def may_come(
        self, row: int, outputs: Sequence[int], vocab_size: int
    ) -> Mapping[str, np.ndarray]:
        """Return, by rule name, the tokens that the rule allows after these outputs, bool
        [vocab_size]. Called where no token could be sampled."""
        return {}


class BroughtByFew(RunnerPlugin):
    """A plugin that few requests use. `brought` has a row's value, or None."""

    def __init__(self) -> None:
        self.brought: list[Any] = []
        self.has_one = np.zeros(0, dtype=bool)

    def grow(self, num_rows: int) -> None:
        num_new = num_rows - len(self.brought)
        self.brought += [None] * num_new
        self.has_one = np.append(self.has_one, np.zeros(num_new, dtype=bool))

    def put(self, row: int, value: object) -> None:
        self.brought[row] = value
        self.has_one[row] = value is not None

    def concerns(self, rows: np.ndarray) -> bool:
        return bool(self.has_one[rows].any())


def missing_reason(may_come: Mapping[str, np.ndarray]) -> str | None:
    """Return the rules that together allow no token, given what each allows. None: some token."""
    names = list(may_come)
    if not names or np.logical_and.reduce(list(may_come.values())).any():
        return None
    for name in may_come:
        others = [may_come[other] for other in names if other != name]
        if others and not np.logical_and.reduce(others).any():
            names.remove(name)
    return f"{' and '.join(names)}: {NO_TOKEN}"
