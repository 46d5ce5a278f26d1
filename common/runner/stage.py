"""One stage of a pipeline: the engine's runner over a part of the layers.

    first     token ids --> embedding, layers --> hidden                            to the next
    between   hidden    --> layers            --> hidden                            to the next
    last      hidden    --> layers, norm, head --> logits --> sampler --> tokens    to the driver

Every stage applies every plan, so each stage knows all requests, rows and block tables, and lays
out the same tokens in the same order. Only `hidden` [num_tokens, hidden_size] goes from one stage
to the next. Only the last stage has a sampler, token counts for penalties, and draft tokens.

A stage does not wait until the next one has received `hidden`: it continues with its next plan.

See common/parallel/README.md#pipeline-parallel"""

from __future__ import annotations

import torch

from common.runner.model_runner import PagedBatch, PagedModelRunner
from common.sampling.runner_plugin import UploadBuffer
from common.sampling.sampler import AsyncStepOutput, BatchSampler
from common.sampling.sampling_columns import SamplingBatch
from scheduler_interface import StepOutput


class StageRunner(PagedModelRunner):
    """A `ModelRunner` for one stage, which `model.collectives` identifies."""

    @torch.inference_mode()
    def forward(self, batch: PagedBatch) -> torch.Tensor:
        """Return the logits in the last stage, and the sent `hidden` in the others."""
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
        """Compute the stage's layers, between receiving and sending."""
        return super().forward(batch)


class NoSampler(BatchSampler):
    """The sampler of a stage that is not the last: samples nothing."""

    def stage(self, sampling: SamplingBatch, upload: UploadBuffer) -> AsyncStepOutput:
        return _NotSampled()


class _NotSampled(AsyncStepOutput):
    def __init__(self) -> None:
        self.tokens = torch.empty(0, dtype=torch.int64)
        self.req_ids = []
        self.times = {}

    def begin(self, logits: torch.Tensor) -> AsyncStepOutput:
        return self

    def wait(self) -> StepOutput:
        return StepOutput(times=self.times)
