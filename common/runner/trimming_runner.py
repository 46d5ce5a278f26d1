"""A step of several tokens may run past a stop string: what is behind it is nobody's.

Only the text shows where that is, and the text is the engine's. So a runner whose requests are
guessed on (chapter 5) is wrapped in this one, before anybody counts the tokens, publishes their
blocks or guesses again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.requests.output_processor import OutputProcessor
from scheduler_interface import ModelRunner, RunnerInput, StepHandle, StepOutput


class TrimmingRunner:
    """A `ModelRunner`. `members` are those of the engine's open requests, by id."""

    def __init__(self, runner: ModelRunner, members: Mapping[str, OutputProcessor]) -> None:
        self.runner, self.members = runner, members

    def execute(self, plan: RunnerInput) -> TrimmedStep:
        # Only those with drafts can get several tokens. When the step ends, a name may be another
        # request's.
        names = [name for name in plan.scheduled_draft_token_ids if name in self.members]
        return TrimmedStep(self.runner.execute(plan), {name: self.members[name] for name in names})


@dataclass(frozen=True, slots=True)
class TrimmedStep:
    step: StepHandle
    members: Mapping[str, OutputProcessor]

    def wait(self) -> StepOutput:
        output = self.step.wait()
        for req_id, tokens in output.token_ids.items():
            if len(tokens) > 1 and (member := self.members.get(req_id)) is not None:
                num_wanted = member.num_wanted(tokens)
                del tokens[num_wanted:]
                if req_id in output.logprobs:
                    del output.logprobs[req_id][num_wanted:]
        return output
