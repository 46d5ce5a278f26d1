"""Counts that are kept from step to step are those of a recount, whatever happened in between."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import numpy as np
import pytest
import torch

from common.sampling.runner_plugin import UploadBuffer
from common.sampling.sampling_columns import SamplingBatch, SamplingColumns
from common.sampling.token_counts import TokenCounts
from common.tests.sampling_cases import ListedTokens
from request import SamplingParams

VOCAB = 11
CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0.5, frequency_penalty=0.1, seed=1)


def recount(token_ids: Sequence[int], vocab_size: int = VOCAB) -> list[int]:
    return [sum(t == token for t in token_ids) for token in range(vocab_size)]


class Rows:
    """A runner's rows, as lists: prompt and output of each."""

    def __init__(self, num_rows: int) -> None:
        self.columns = SamplingColumns(num_rows)
        self.prompts: list[list[int]] = [[] for _ in range(num_rows)]
        self.outputs: list[list[int]] = [[] for _ in range(num_rows)]

    def admit(self, row: int, prompt: list[int], output: list[int]) -> None:
        if row == len(self.prompts):
            self.columns.grow(row + 1)
            self.prompts.append([])
            self.outputs.append([])
        self.columns.write(row, PARAMS, ())
        self.prompts[row] = prompt
        self.outputs[row] = output

    def batch(
        self, rows: list[int], drafts: dict[int, list[int]], pending: Collection[int] = ()
    ) -> SamplingBatch:
        """One row of logits for each of `rows`, and one for each of its drafts. The last outputs of
        `pending` rows are still on the device."""
        every = [drafts.get(row, []) for row in range(len(self.prompts))]
        tokens = ListedTokens.of(self.prompts, self.outputs, every)
        tokens.take_to_device(pending)
        found = [(row, n) for row in rows for n in range(len(every[row]) + 1)]
        num_outputs = [len(self.outputs[row]) + n for row, n in found]
        return SamplingBatch(
            self.columns,
            [str(row) for row, _ in found],
            np.array([row for row, _ in found]),
            np.array(num_outputs),
            tokens,
            {str(row): ids for row, ids in drafts.items()},
        )


def check(
    counts: TokenCounts,
    rows: Rows,
    parts: list[list[int]],
    drafts: dict[int, list[int]] | None = None,
    pending: Collection[int] = (),
    vocab_size: int = VOCAB,
) -> None:
    """Parts of a batch are all staged before the first is counted."""
    drafts = drafts or {}
    batches = [
        rows.batch(part, {row: drafts[row] for row in part if row in drafts}, pending)
        for part in parts
    ]
    upload = UploadBuffer(CPU)
    staged = [counts.prepare(batch, upload, vocab_size) for batch in batches]
    upload.send()
    for batch, counted in zip(batches, staged):
        is_known, output_counts = counted.count()
        expected, known = [], []
        for row, num_outputs in zip(batch.rows.tolist(), batch.num_outputs.tolist(), strict=True):
            output = (rows.outputs[row] + drafts.get(row, []))[:num_outputs]
            expected.append(recount(output, vocab_size))
            known.append([n > 0 for n in recount(rows.prompts[row] + output, vocab_size)])
        assert output_counts.dtype == torch.int32 and output_counts.tolist() == expected
        assert is_known.dtype == torch.bool and is_known.tolist() == known


@pytest.mark.net
@pytest.mark.parametrize("seed", range(10))
def test_kept_counts_are_those_of_a_recount(seed: int) -> None:
    """Batches of any order and size; tokens come, requests end and leave their row to another, come
    back after a preemption in the same row or another one, with fewer tokens or as many. Another
    vocabulary starts from scratch."""
    rng = random.Random(seed)
    counts = TokenCounts()

    def tokens(num_max: int) -> list[int]:
        return [rng.randrange(VOCAB + 2) for _ in range(rng.randint(0, num_max))]  # 2 are padding

    rows = Rows(4)
    for row in range(4):
        rows.admit(row, [0, *tokens(8)], tokens(3))
    for _ in range(60):
        for row, output in enumerate(rows.outputs):
            match rng.randrange(12):
                case 0:
                    rows.admit(row, [0, *tokens(8)], tokens(3))  # another request in its place
                case 1:  # of the same lengths, too
                    prompt = [(t + 1) % VOCAB for t in rows.prompts[row]]
                    rows.admit(row, prompt, list(reversed(output)))
                case 2:  # two that change places
                    other = rng.randrange(len(rows.prompts))
                    theirs = rows.prompts[other], rows.outputs[other]
                    rows.admit(other, rows.prompts[row], output)
                    rows.admit(row, *theirs)
                case 3:
                    output.clear()  # a shorter one is seen, if it is asked for
                    check(counts, rows, [[row]])
                    output += tokens(3)
                case _:
                    output += tokens(2)
        if rng.random() < 0.2:
            rows.admit(len(rows.prompts), [0, *tokens(8)], [])
        chosen = rng.sample(range(len(rows.prompts)), rng.randint(1, len(rows.prompts)))
        if rng.random() < 0.2:  # staged and never computed: it has counted nothing
            counts.prepare(rows.batch(chosen, {}), UploadBuffer(CPU), VOCAB)
        cut = rng.choice([0, 0, rng.randint(0, len(chosen))])
        parts = [part for part in (chosen[:cut], chosen[cut:]) if part]
        with torch.inference_mode(rng.random() < 0.5):
            if rng.random() < 0.1:
                check(counts, rows, [chosen], vocab_size=3)
            if rng.random() < 0.5:
                drafts = {row: tokens(3) for row in chosen if rng.random() < 0.5}
                check(counts, rows, parts, drafts)
            else:  # with pending tokens there are no drafts
                some = [i for i, output in enumerate(rows.outputs) if output and output[-1] < VOCAB]
                check(counts, rows, parts, pending=[row for row in some if rng.random() < 0.5])
