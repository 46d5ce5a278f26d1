"""A debug switch: preempt a request every N steps, whether memory is short or not.

Preemption is rare and happens at bad moments. A run that preempts at every possible moment must
generate the same tokens as an undisturbed one (`common/tests/test_equivalence_matrix.py`).

See 04_scheduler/beyond/README.md"""

from __future__ import annotations

from base_scheduler import SchedulerPlugin
from request import Request


class ForcedPreemption(SchedulerPlugin):
    """Preempts the last admitted eligible request in every `preempt_every`-th step. Eligible are
    requests that got a token since they were last preempted here, or with `spares_pinned` all
    requests that are not pinned, so every request finishes."""

    def __init__(self, preempt_every: int, spares_pinned: bool = False) -> None:
        self.preempt_every = preempt_every
        self.spares_pinned = spares_pinned
        self._num_steps = 0
        self._num_outputs_then: dict[str, int] = {}

    def begin_step(self) -> None:
        self._num_steps += 1

    def victim(self) -> Request | None:
        if self._num_steps % self.preempt_every:
            return None
        candidates = filter(self._may_be_forced, reversed(self.scheduler.running.values()))
        if request := next(candidates, None):
            self._num_outputs_then[request.request_id] = request.num_output_tokens
        return request

    def _may_be_forced(self, request: Request) -> bool:
        if self.spares_pinned:
            return not self.scheduler.is_pinned(request)
        return request.num_output_tokens > self._num_outputs_then.get(request.request_id, -1)

    def on_finish(self, request: Request) -> None:
        self._num_outputs_then.pop(request.request_id, None)
