"""Log-probabilities of a prompt's own tokens: `prompt_logprobs`.

    position     0      1      2      3
    token        a      b      c      d       the prompt
    hidden       h0     h1     h2     h3      h3: a token is sampled, as usual
    scored              b      c      d       by h0, h1, h2: raw distributions, as for outputs
    entries     None    b      c      d       `RequestOutput.prompt_logprobs`

Each chunk of a prompt scores its positions. In a step that scores tokens, all tokens go through the
last layer; in other steps only the sampled rows do. Logits are computed for at most 256 rows at a
time, which the memory plan includes: for a whole step they would be larger than the model.

A cached prefix has no hidden states, so a request with `prompt_logprobs` reads no cached prefix.
Its KV is published as usual. If a prompt has `n` samples, only the first one requests the scores.
Positions scored before a preemption are not scored again.

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from common.models.model_config import SCORED
from common.sampling.runner_plugin import RunnerPlugin, StepRows, UploadBuffer
from scheduler_interface import NewRequestData

if TYPE_CHECKING:
    from common.sampling.scored_prompts import ScoredPrompts


class PromptLogprobs(RunnerPlugin):
    """The plugin. `features["prompt_logprobs"]` is the number of top tokens per entry; -1: all."""

    name = SCORED

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._columns = np.zeros((3, 0), dtype=np.int64)

    def grow(self, num_rows: int) -> None:
        more = np.zeros((3, num_rows - self._columns.shape[1]), dtype=np.int64)
        self._columns = np.concatenate([self._columns, more], axis=1)
        # Positions [next, end) whose next token has not been scored yet.
        self._next, self._end, self._num_top = self._columns

    def admit(self, row: int, new: NewRequestData) -> None:
        num_top = new.features.get(self.name)
        self._columns[:, row] = 0
        if num_top is not None:
            self._end[row] = len(new.prompt_token_ids) - 1
            self._num_top[row] = self.vocab_size if num_top < 0 else min(num_top, self.vocab_size)

    def concerns(self, rows: np.ndarray) -> bool:
        return bool((self._next[rows] < self._end[rows]).any())

    def stage(self, step: StepRows, upload: UploadBuffer) -> Callable[[], ScoredPrompts] | None:
        from common.sampling.scored_prompts import ScoredPrompts

        rows, starts, num_tokens, _ = step.queries
        first_positions = np.maximum(starts, self._next[rows])
        lens = np.minimum(starts + num_tokens, self._end[rows]) - first_positions
        scored = np.flatnonzero(lens > 0)
        if not len(scored):  # preempted: these positions were already scored
            return None
        lens = lens[scored]
        first_positions = first_positions[scored]
        rows = rows[scored]
        within = np.arange(lens.sum()) - np.repeat(lens.cumsum() - lens, lens)
        first_rows = (num_tokens.cumsum() - num_tokens - starts)[scored] + first_positions
        positions = np.repeat(first_positions, lens) + within
        tokens = step.state.token_ids[np.repeat(rows, lens), positions + 1].astype(np.int64)
        self._next[rows] = first_positions + lens
        at = upload.add(np.repeat(first_rows, lens) + within)
        sent = upload.add(tokens)
        names = [step.req_ids[i] for i in scored.tolist()]
        runs = list(zip(names, lens.tolist(), self._num_top[rows].tolist(), strict=True))
        return lambda: ScoredPrompts(at(), sent(), tokens, runs, self.vocab_size)
