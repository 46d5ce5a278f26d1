"""A step of several tokens may run past a stop string: what is behind it is nobody's.

Only the text shows where that is, and the text is the engine's. So a runner whose requests are
guessed on (chapter 5) is wrapped in this one, before anybody counts the tokens or guesses again."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_interface import FinishedStep, ModelRunner, SchedulerOutput


class TrimmingRunner:
    """A `ModelRunner`. `num_wanted(request_id, token_ids)` says how many tokens of a run are in
    front of a stop string's end."""

    def __init__(self, runner: ModelRunner, num_wanted: Callable[[str, list[int]], int]) -> None:
        self.runner = runner
        self.num_wanted = num_wanted

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        output = self.runner.execute(plan).wait()
        for req_id, tokens in output.token_ids.items():
            if len(tokens) > 1:
                num_wanted = self.num_wanted(req_id, tokens)
                del tokens[num_wanted:]
                if req_id in output.logprobs:
                    del output.logprobs[req_id][num_wanted:]
        return FinishedStep(output)
