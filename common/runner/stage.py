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
from common.sampling.sampler import AsyncStepOutput, SampleArgs, Sampler
from common.sampling.sampling_columns import SamplingBatch


class StageRunner(PagedModelRunner):
    """A `ModelRunner` for one stage, which `model.collectives` identifies."""

    @torch.inference_mode()
    def forward(self, batch: PagedBatch) -> torch.Tensor:
        """Return the logits in the last stage, and the sent `hidden` in the others."""
        collectives = self.model.collectives
        if not collectives.ranks.is_first_stage:
            shape = (len(batch.positions), self.model.config.hidden_size)
            batch.hidden = collectives.receive(shape, self.model.embed_weight.dtype)
        out = super().forward(batch)
        if not collectives.ranks.is_last_stage:
            collectives.send(out)
        return out


class NoSampler(Sampler):
    """The sampler of a stage that is not the last: samples nothing."""

    def prepare(self, sampling: SamplingBatch) -> SampleArgs:
        return SampleArgs(req_ids=[])

    def sample(self, logits: torch.Tensor, args: SampleArgs) -> AsyncStepOutput:
        return AsyncStepOutput(args, raw=logits, tokens=torch.empty(0, dtype=torch.int64))
