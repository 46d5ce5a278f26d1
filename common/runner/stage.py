"""One stage of a pipeline: the engine's own runner, over some of the layers.

    first     token ids --> embedding, layers --> hidden                            to the next
    between   hidden    --> layers            --> hidden                            to the next
    last      hidden    --> layers, norm, head --> logits --> sampler --> tokens    to the driver

Every stage applies every plan, so each knows all requests, rows and block tables, and lays out the
same tokens in the same order; nothing but `hidden` [num_tokens, hidden_size] goes from one to the
next. Only the last one has a sampler, penalties' counts and guesses.

A stage that has sent does not wait until the next one has received: it goes on with its next plan.
"""

from __future__ import annotations

import torch

from common.runner.model_runner import PagedBatch, PagedModelRunner
from common.sampling.runner_plugin import UploadBuffer
from common.sampling.sampler import AsyncStepOutput, BatchSampler
from common.sampling.sampling_columns import SamplingBatch
from scheduler_interface import StepOutput


class StageRunner(PagedModelRunner):
    """A `ModelRunner`. `model.collectives` knows which stage this is."""

    @torch.inference_mode()
    def forward(self, batch: PagedBatch) -> torch.Tensor:
        """The last stage's logits; of the others what they have sent."""
        collectives = self.model.collectives
        if not collectives.ranks.is_first_stage:
            shape = (len(batch.positions), self.model.config.hidden_size)
            batch.hidden = collectives.receive(shape, self.model.embed_weight.dtype)
        out = self.compute(batch)
        if not collectives.ranks.is_last_stage:
            collectives.send(out)
        return out

    def sample(self, batch: PagedBatch, logits: torch.Tensor) -> AsyncStepOutput:
        is_last = self.model.collectives.ranks.is_last_stage
        return super().sample(batch, logits) if is_last else batch.pending_output.begin(logits)

    def compute(self, batch: PagedBatch) -> torch.Tensor:
        """Between receiving and sending."""
        return super().forward(batch)


class NoSampler(BatchSampler):
    """Of a stage that is not the last."""

    def stage(self, sampling: SamplingBatch, upload: UploadBuffer) -> AsyncStepOutput:
        return _NotSampled()


class _NotSampled(AsyncStepOutput):
    def __init__(self) -> None:
        self.tokens, self.req_ids, self.times = torch.empty(0, dtype=torch.int64), [], {}

    def begin(self, logits: torch.Tensor) -> AsyncStepOutput:
        return self

    def wait(self) -> StepOutput:
        return StepOutput(times=self.times)
