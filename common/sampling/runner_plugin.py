"""A feature on the runner's side: an object in a list, which is told what happens to rows.

    a request comes, and goes      admit, release     its row, and what its message says
    tokens are written             appended           once a step, for all rows
    more rows are needed           grow
    a step is laid out             stage              arrays into the step's one upload
    the device computes            before_sampling    what the host works out meanwhile: one more
                                                      upload, in such steps only

What belongs to a request stands in columns of the plugin, by row; what belongs to a step stands in
the batch: two steps may be on their way at once. Hooks are called in the order of the list, which
stands in the assembly, and only if the plugin's class defines them: that is looked up once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from base_scheduler import overrides
from batch_layout import Queries, all_to_device
from scheduler_interface import NewRequestData

NO_TOKEN = "no token may come next"  # by rules that a request brings


class UploadBuffer:
    """Arrays that go to a device in one copy."""

    def __init__(self, device: torch.device, arrays: Iterable[np.ndarray] = ()) -> None:
        self.device, self.arrays = device, list(arrays)
        self.tensors: Sequence[torch.Tensor] = ()  # the same, where they have been sent

    def add(self, array: np.ndarray) -> Callable[[], torch.Tensor]:
        """Its tensor, for whoever asks when it is there."""
        index = len(self.arrays)
        self.arrays.append(np.ascontiguousarray(array))  # as kernels like it
        return lambda: self.tensors[index]

    def send(self) -> None:
        self.tensors = all_to_device(self.device, *self.arrays)


class HasTokens(Protocol):
    """Columns of the runner's state, a row for each request."""

    token_ids: np.ndarray  # [num_rows, max_len] int32: prompt, outputs, drafts of this step
    num_tokens: np.ndarray  # [num_rows] int64: prompt and outputs
    num_prompt_tokens: np.ndarray  # [num_rows] int64

    def fill_in(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Ids on the device, with those in place that are below 0: they are pending."""
        ...

    def known(self, token_id: int) -> int:
        """One of them on the host, which waits for it if it is pending. Below 0: there is none."""
        ...


class StepRows(NamedTuple):
    """Who is in a step, in the order of the batch. Each query has `num_tokens` tokens of the
    model's input and `num_logit_rows` rows of logits, one behind the other."""

    state: HasTokens
    req_ids: Sequence[str]  # [num_queries]
    queries: Queries
    drafts: Mapping[str, Sequence[int]]  # as the plan has them


class RunnerPlugin:
    """What a hook is called with may not be changed."""

    name: str = ""  # what a request brings to it is `NewRequestData.features[name]`, if anything

    def grow(self, num_rows: int) -> None:
        """There are so many rows from now on, as many as before or more. They stay what they
        were."""

    def admit(self, row: int, new: NewRequestData) -> None:
        """The row is this request's from now on."""

    def release(self, row: int) -> None:
        """The row is nobody's. After an interrupt it is said again, or of a row of which nothing
        had been said."""

    def appended(
        self, state: HasTokens, rows: np.ndarray, start_columns: np.ndarray, stops: np.ndarray
    ) -> None:
        """A plan has brought positions `[firsts[i], stops[i])` of each row. The prompt is not among
        them, unless its request was preempted: then all comes once more. So does a token that was
        pending, below 0, when its value is known."""

    def concerns(self, rows: np.ndarray) -> bool:
        """Has it anything to stage, or to change before sampling, in a step of these rows? If not,
        it is not asked for it, and a step that concerns nobody costs nothing."""
        return True

    def stage(self, step: StepRows, upload: UploadBuffer) -> Callable[[], Any] | None:
        """Put into `upload` what the device has to know of the rows. What is returned is called
        when it is there; what comes of that stands in the batch, `staged[name]`."""

    def column(self, rows: np.ndarray) -> np.ndarray:
        """Instead of `stage`, in a step of one token for each of these rows that is replayed from a
        graph: an integer for each, where 0 is that of padding. Asked if graphs of this plugin's
        name were captured (`graphs.py`)."""
        raise NotImplementedError

    def before_sampling(
        self, step: StepRows, upload: UploadBuffer
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The forward pass has begun, and the host has time. What is returned gets the logits
        [num_logit_rows, vocab_size or wider] when `upload` is there, and what it returns is sampled
        from. None: nothing in this step."""

    def num_possible(self, state: HasTokens, row: int, drafts: Sequence[int]) -> int:
        """How many of these guesses could come true, one behind the other? More need not be
        verified."""
        return len(drafts)

    def may_come(
        self, row: int, outputs: Sequence[int], vocab_size: int
    ) -> Mapping[str, np.ndarray]:
        """By the name of each rule, which tokens [vocab_size] it allows behind these outputs. Asked
        where no token could be sampled."""
        return {}


class BroughtByFew(RunnerPlugin):
    """One to which few requests bring something: of each row what was made of it, or None."""

    def __init__(self) -> None:
        self.brought: list[Any] = []
        self.has_one = np.zeros(0, dtype=bool)

    def grow(self, num_rows: int) -> None:
        num_more = num_rows - len(self.brought)
        self.brought += [None] * num_more
        self.has_one = np.append(self.has_one, np.zeros(num_more, dtype=bool))

    def put(self, row: int, value: object) -> None:
        self.brought[row], self.has_one[row] = value, value is not None

    def concerns(self, rows: np.ndarray) -> bool:
        return bool(self.has_one[rows].any())


class RunnerPlugins:
    """The list, and of each hook those that have it."""

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
        """Those that stage something for a step of these rows."""
        return [plugin for plugin in self._early if plugin.concerns(rows)]

    def see_step(self, rows: np.ndarray) -> bool:
        return any(plugin.concerns(rows) for plugin in (*self._early, *self._late))

    def stage(self, step: StepRows, upload: UploadBuffer) -> dict[str, Callable[[], Any]]:
        """What stands in the batch when `upload` is there, by the names of plugins."""
        concerned = self.staging(step.queries.rows)
        staged = {plugin.name: plugin.stage(step, upload) for plugin in concerned}
        return {name: found for name, found in staged.items() if found is not None}

    def missing_reason(self, row: int, outputs: Sequence[int], vocab_size: int) -> str | None:
        """The rules that together leave no token behind these outputs, if they do."""
        rules: dict[str, np.ndarray] = {}
        for may_come in self._may_come:
            rules |= may_come(row, outputs, vocab_size)

        def terminate_all(names: list[str]) -> bool:
            return bool(names) and not np.logical_and.reduce([rules[n] for n in names]).any()

        names = list(rules)
        if not terminate_all(names):
            return None
        for name in rules:
            if terminate_all(others := [n for n in names if n != name]):
                names = others
        return f"{' and '.join(names)}: {NO_TOKEN}"

    def before_sampling(self, step: StepRows, logits: torch.Tensor) -> torch.Tensor:
        """What is sampled from, of logits that may not have been computed yet."""
        concerned = [p for p in self._late if p.concerns(step.queries.rows)]
        upload = UploadBuffer(logits.device)
        found = [plugin.before_sampling(step, upload) for plugin in concerned]
        if upload.arrays:
            upload.send()
        for change in found:
            logits = logits if change is None else change(logits)
        return logits
