"""Trim the tokens after a stop string, which a step of several tokens can run past.

Only the text shows where the stop string ends, and only the engine has the text. So a runner that
verifies draft tokens (chapter 5) is wrapped in `TrimmingRunner`: its tokens are trimmed before they
are counted, their blocks published, or new drafts proposed.

See 05_spec_decode/README.md#8-how-the-engine-uses-it"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.requests.output_processor import OutputProcessor
from scheduler_interface import ModelRunner, RunnerInput, StepHandle, StepOutput


class TrimmingRunner:
    """A `ModelRunner` that trims. `sequences` are the engine's open requests, by id."""

    def __init__(self, runner: ModelRunner, sequences: Mapping[str, OutputProcessor]) -> None:
        self.runner = runner
        self.sequences = sequences

    def execute(self, plan: RunnerInput) -> TrimmedStep:
        # Only requests with drafts can get several tokens. They are looked up now, because another
        # request can have the same id when the step ends.
        names = [name for name in plan.scheduled_draft_token_ids if name in self.sequences]
        return TrimmedStep(
            self.runner.execute(plan), {name: self.sequences[name] for name in names}
        )


@dataclass(frozen=True, slots=True)
class TrimmedStep:
    step: StepHandle
    sequences: Mapping[str, OutputProcessor]

    def wait(self) -> StepOutput:
        output = self.step.wait()
        for req_id, tokens in output.token_ids.items():
            if len(tokens) > 1 and (sequence := self.sequences.get(req_id)) is not None:
                num_wanted = sequence.num_wanted(tokens)
                del tokens[num_wanted:]
                if req_id in output.logprobs:
                    del output.logprobs[req_id][num_wanted:]
        return output
