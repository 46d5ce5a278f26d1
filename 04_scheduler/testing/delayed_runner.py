"""A runner that delivers its tokens late, as a device does, for tests without a device.

A step is computed immediately, but its output is withheld until a caller waits for it. In the
meantime other plans can arrive that refer to its tokens by `PENDING`. Only this runner knows these
tokens, as only the device would.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scheduler_interface import PENDING, FinishedStep, RunnerInput


class DelayedRunner:
    """A `ModelRunner`. `runner` gets plans without pending tokens."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self._sampled: dict[str, list[int]] = {}  # by the last step
        self.num_pending = 0  # pending tokens that plans referred to, over all steps

    @property
    def state(self) -> Any:
        return self.runner.state

    def execute(self, plan: RunnerInput) -> FinishedStep:
        cached, new_token_ids = plan.scheduled_cached_reqs, []
        for req_id, tokens in zip(cached.req_ids, cached.new_token_ids, strict=True):
            assert PENDING not in tokens[:-1], f"{req_id!r}: only the last token can be unknown"
            if tokens and tokens[-1] == PENDING:
                tokens = [*tokens[:-1], *self._sampled[req_id]]
                self.num_pending += 1
            new_token_ids.append(tokens)
        known = replace(cached, new_token_ids=new_token_ids, pending_req_ids=[])
        output = self.runner.execute(replace(plan, scheduled_cached_reqs=known)).wait()
        self._sampled = {req_id: list(tokens) for req_id, tokens in output.token_ids.items()}
        return FinishedStep(output)
