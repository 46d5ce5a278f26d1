"""Sample tokens from logits, with every constraint of `SamplingParams`, for the whole batch.

    logits
        | a grammar's mask, applied before this module (`grammar_masks.py`): forbidden tokens
        | become impossible
    raw logits --> log-probabilities, where requested
        | allowed_token_ids: all others impossible; bad_words: tokens that would complete one
        | min_tokens: EOS and stop tokens impossible
        | logit_bias; then repetition, frequency, presence penalties
        +--> greedy rows: the highest; if equal, the lowest id
        | temperature, top-k, min-p, top-p
        | softmax                                    `row_probs` (for chapter 5)
        +--> inverse of the cumulative distribution at a uniform number

This is the order of vLLM (0.33), up to the last step, but vLLM applies top-k after min-p: the same
tokens are kept. Biases are added before EOS is ruled out, in one pass: impossible stays impossible.

A batch of greedy rows needs only this file; `distributions.py` has the other steps. Arguments of a
batch are collected before the forward pass (`prepare`), and its arrays are sent to the device in
the step's one copy. The host reads tokens and log-probabilities in one copy too.

A logit row is used as float64 if it is float64, otherwise as float32; cumulative sums are float64
or integers. A row without a finite maximum (NaN, +inf, or no token allowed) is an error of its
request only.

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.sampling.greedy_rows import BAD, as_float, greedy
from common.sampling.runner_plugin import DeviceArgs
from common.sampling.sampling_columns import SamplingBatch
from common.sampling.sampling_rules import LOGPROBS
from scheduler_interface import NO_FINITE_LOGITS, StepOutput, StepTimer

if TYPE_CHECKING:
    from common.sampling.distributions import Logprobs, RowArgs


@dataclass(eq=False)
class SampleArgs(DeviceArgs):
    """The arguments of a batch of rows."""

    req_ids: list[str]  # [R]
    rows: RowArgs | None = None  # None: all rows are greedy
    logprobs: Logprobs | None = None


class Sampler:
    """Samples each row's next token. Logits beyond `vocab_size` are padding and never sampled."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def prepare(self, sampling: SamplingBatch) -> SampleArgs:
        """Return the arguments of these rows, whose arrays are to be sent to the device."""
        args = SampleArgs(sampling.req_ids)
        needs = sampling.batch_needs
        if needs:
            from common.sampling.distributions import Logprobs, prepare

            if needs != LOGPROBS:
                args.rows = prepare(sampling, self.vocab_size)
            if needs & LOGPROBS:
                args.logprobs = Logprobs(sampling)
        return args

    def sample(self, logits: torch.Tensor, args: SampleArgs) -> AsyncStepOutput:
        """Start sampling from `logits` [R, vocab_size or wider]. R can be 0."""
        raw = self.raw_logits(logits)
        return AsyncStepOutput(args, raw, self.draw(raw, args))

    def draw(self, raw: torch.Tensor, args: SampleArgs) -> torch.Tensor:
        """Return the token [R] of each row of `raw` [R, vocab_size]."""
        if args.rows is None:
            return greedy(raw)
        from common.sampling.distributions import sample_rows

        return sample_rows(raw, args.rows)

    def raw_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits without padding. On a GPU they are converted where they are used; on a
        CPU here, because NumPy, which finds the maximum, has no bfloat16."""
        raw = logits[:, : self.vocab_size]
        return raw if raw.is_cuda else as_float(raw)


class AsyncStepOutput:
    """The `StepHandle` of a step whose tokens the host has not read yet. On a GPU its kernels are
    queued and may not have started."""

    def __init__(self, args: SampleArgs, raw: torch.Tensor, tokens: torch.Tensor) -> None:
        self.req_ids = args.req_ids
        self.tokens = tokens  # [R] int64
        self.times: dict[str, float] = {}
        self.add_more: Callable[[StepOutput], None] | None = None  # adds other results
        self.missing_reason: Callable[[str], str | None] | None = None
        self._logprobs = args.logprobs
        if self._logprobs is not None:
            numbers = self._logprobs.numbers(raw, tokens).flatten()
            tokens = torch.cat([tokens.to(torch.float64), numbers])
        self._read = from_device(tokens)

    def read_tokens(self) -> np.ndarray:
        """Return the tokens [R]. The host waits until they are sampled."""
        return self._read()[: len(self.req_ids)]

    def wait(self) -> StepOutput:
        """Return the step's tokens, errors and other results. The host waits for them."""
        clock = StepTimer()
        output = StepOutput(times=self.times)
        req_ids = self.req_ids
        read = self._read()
        ids = read[: len(req_ids)].astype(np.int64, copy=False)
        missing_reason = self.missing_reason  # frees what it holds
        self.missing_reason = None
        output.token_ids = dict(zip(req_ids, ids[:, None].tolist()))
        if len(output.token_ids) < len(ids) or ids.min(initial=0) < 0:
            _sort_out(output, req_ids, ids.tolist())
            for req_id in output.errors:
                if missing_reason and (reason := missing_reason(req_id)):
                    output.errors[req_id] = reason
        if self._logprobs is not None:
            self._logprobs.add_to(output, req_ids, ids, read[len(req_ids) :])
        if self.add_more is not None:
            self.add_more(output)
        clock.lap("sample_ms")
        self.times["sample_ms"] = self.times.get("sample_ms", 0.0) + clock.ms["sample_ms"]
        return output


def _sort_out(output: StepOutput, req_ids: list[str], tokens: list[int]) -> None:
    """Set tokens and errors of requests with several rows or bad rows. A request that got tokens
    before its bad row fails later: the next step computes that row again, without drafts before
    it."""
    output.token_ids = {}
    for req_id, token in zip(req_ids, tokens, strict=True):
        if token >= 0:
            output.token_ids.setdefault(req_id, []).append(token)
        elif token == BAD and req_id not in output.token_ids:
            output.errors[req_id] = NO_FINITE_LOGITS


def from_device(tensor: torch.Tensor) -> Callable[[], np.ndarray]:
    """Start a copy to the host, queued after the work in flight but before any later work. Returns
    the function that waits for the copy and returns the array."""
    if not tensor.is_cuda:
        return tensor.numpy
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    is_over = torch.cuda.Event()
    is_over.record()

    def read() -> np.ndarray:
        is_over.synchronize()
        return copy.numpy()

    return read
