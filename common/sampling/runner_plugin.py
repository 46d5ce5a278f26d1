"""Runner plugins: features on the runner's side, notified of events by hooks.

    a request starts, and ends     admit, release     its row, and the data in its message
    tokens are written             appended           once a step, for all rows
    more rows are needed           grow
    a step is laid out             stage              arrays into the step's one upload
    the device computes            before_sampling    host work during the forward pass: one more
                                                      upload, in such steps only

Data of a request is stored in columns of the plugin, by row. Data of a step is stored in the batch,
because two steps can be in flight. Hooks are called in the order of the plugin list, which is in
the assembly, and only if the plugin's class defines them: that is looked up once.

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from base_scheduler import overrides
from batch_layout import Queries, all_to_device
from scheduler_interface import NewRequestData

NO_TOKEN = "no token may come next"  # because of a request's rules


class UploadBuffer:
    """Arrays that are sent to a device in one copy."""

    def __init__(self, device: torch.device, arrays: Iterable[np.ndarray] = ()) -> None:
        self.device = device
        self.arrays = list(arrays)
        self.tensors: Sequence[torch.Tensor] = ()  # the same arrays on the device, after `send`
        self._places: list[tuple[object, str, int]] = []  # of `fill`

    def add(self, array: np.ndarray) -> Callable[[], torch.Tensor]:
        """Add an array. Returns a function that returns its tensor: call it after `send`."""
        index = len(self.arrays)
        self.arrays.append(np.ascontiguousarray(array))  # as kernels need it
        return lambda: self.tensors[index]

    def fill(self, part: object) -> None:
        """Add each array among the attributes of `part`. `send` puts its tensor in its place."""
        for name, value in vars(part).items():
            if isinstance(value, np.ndarray):
                self._places.append((part, name, len(self.arrays)))
                self.arrays.append(np.ascontiguousarray(value))

    def send(self) -> None:
        self.take(all_to_device(self.device, self.arrays))

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the tensors of the arrays, which another part has sent."""
        self.tensors = tensors
        for part, name, index in self._places:
            setattr(part, name, tensors[index])


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
    drafts: Mapping[str, Sequence[int]]  # as in the plan


class RunnerPlugin:
    """The base class of plugins. A hook may not change its arguments."""

    name: str = ""  # its data in a request is `NewRequestData.features[name]`, if any

    def grow(self, num_rows: int) -> None:
        """Grow the columns to `num_rows`, which is never fewer than before. Existing rows are
        unchanged."""

    def admit(self, row: int, new: NewRequestData) -> None:
        """Assign the row to this request."""

    def release(self, row: int) -> None:
        """Free the row. After a step that failed, called for every row, used or not."""

    def appended(
        self, state: HasTokens, rows: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> None:
        """Handle a plan's new tokens: positions `[starts[i], stops[i])` of each row. The
        prompt is not included, unless its request was preempted: then all tokens are passed again.
        A pending token (below 0) is passed again too, when its value is known."""

    def concerns(self, rows: np.ndarray) -> bool:
        """Whether the plugin stages anything, or changes logits before sampling, in a step of these
        rows. If not, its hooks are skipped, so a step that uses no plugin costs nothing."""
        return True

    def stage(self, step: StepRows, upload: UploadBuffer) -> Callable[[], Any] | None:
        """Add the rows' arrays for the device to `upload`. The returned function is called after
        the upload, and its result is stored in the batch as `staged[name]`."""

    def column(self, rows: np.ndarray) -> np.ndarray:
        """Return an integer for each row; 0 is the padding. Called instead of `stage` in a step of
        one token per row that is replayed from a graph, if graphs with this plugin's name were
        captured (`graphs.py`)."""
        raise NotImplementedError

    def before_sampling(
        self, step: StepRows, upload: UploadBuffer
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Prepare a change of the logits while the device computes the forward pass. The returned
        function gets the logits [num_logit_rows, vocab_size or wider] after the upload, and returns
        the logits to sample from. None: no change in this step."""

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


class RunnerPlugins:
    """The plugin list, and for each hook the plugins that define it."""

    def __init__(self, plugins: Iterable[RunnerPlugin]) -> None:
        self.plugins = tuple(plugins)
        self.grow = [p.grow for p in self.plugins if overrides(p, RunnerPlugin.grow)]
        self.admit = [p.admit for p in self.plugins if overrides(p, RunnerPlugin.admit)]
        self.release = [p.release for p in self.plugins if overrides(p, RunnerPlugin.release)]
        self.appended = [p.appended for p in self.plugins if overrides(p, RunnerPlugin.appended)]
        self._early = [p for p in self.plugins if overrides(p, RunnerPlugin.stage)]
        self._late = [p for p in self.plugins if overrides(p, RunnerPlugin.before_sampling)]
        self.num_possible = [
            p.num_possible for p in self.plugins if overrides(p, RunnerPlugin.num_possible)
        ]
        self._may_come = [p.may_come for p in self.plugins if overrides(p, RunnerPlugin.may_come)]

    def staging(self, rows: np.ndarray) -> list[RunnerPlugin]:
        """Return the plugins that stage something for a step of these rows."""
        return [plugin for plugin in self._early if plugin.concerns(rows)]

    def see_step(self, rows: np.ndarray) -> bool:
        return any(plugin.concerns(rows) for plugin in (*self._early, *self._late))

    def stage(self, step: StepRows, upload: UploadBuffer) -> dict[str, Callable[[], Any]]:
        """Return the functions that make the batch's staged data, by plugin name. Call them after
        the upload."""
        concerned = self.staging(step.queries.rows)
        staged = {plugin.name: plugin.stage(step, upload) for plugin in concerned}
        return {name: found for name, found in staged.items() if found is not None}

    def missing_reason(self, row: int, outputs: Sequence[int], vocab_size: int) -> str | None:
        """Return the rules that together allow no token after these outputs, or None."""
        rules: dict[str, np.ndarray] = {}
        for may_come in self._may_come:
            rules |= may_come(row, outputs, vocab_size)

        def terminate_all(names: list[str]) -> bool:
            return bool(names) and not np.logical_and.reduce([rules[n] for n in names]).any()

        names = list(rules)
        if not terminate_all(names):
            return None
        for name in rules:
            others = [n for n in names if n != name]
            if terminate_all(others):
                names = others
        return f"{' and '.join(names)}: {NO_TOKEN}"

    def before_sampling(self, step: StepRows, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits to sample from. The given logits may not be computed yet."""
        concerned = [p for p in self._late if p.concerns(step.queries.rows)]
        upload = UploadBuffer(logits.device)
        found = [plugin.before_sampling(step, upload) for plugin in concerned]
        if upload.arrays:
            upload.send()
        for change in found:
            logits = logits if change is None else change(logits)
        return logits
