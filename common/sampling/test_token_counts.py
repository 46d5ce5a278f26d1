"""Counts that are kept from step to step are those of a recount, whatever happened in between."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from common.sampling.sampler import Sampler, SamplingBatch, sampling_probs
from common.sampling.token_counts import TokenCounts
from request import SamplingParams

VOCAB = 11
CPU = torch.device("cpu")


def recount(token_ids: Sequence[int], vocab_size: int = VOCAB) -> list[int]:
    return [sum(t == token for t in token_ids) for token in range(vocab_size)]


def check(counts: TokenCounts, rows: list[tuple[list[int], list[int], list[int]]]) -> None:
    """A row is a prompt, an output and drafts."""
    is_known, output_counts = counts.count(*map(list, zip(*rows)), VOCAB, CPU)
    expected = [recount(output + drafts) for _, output, drafts in rows]
    assert output_counts.dtype == torch.int32 and output_counts.tolist() == expected
    known = [[n > 0 for n in recount([*p, *o, *d])] for p, o, d in rows]
    assert is_known.dtype == torch.bool and is_known.tolist() == known


@pytest.mark.parametrize("seed", range(30))
def test_kept_counts_are_those_of_a_recount(seed: int) -> None:
    """Batches of any order and size; tokens come, requests end, come back after a preemption with
    all their tokens anew, or in other lists; a request has a row for each of its drafts."""
    rng = random.Random(seed)
    counts = TokenCounts()

    def tokens(most: int) -> list[int]:
        return [rng.randrange(VOCAB + 2) for _ in range(rng.randint(0, most))]  # 2 are padding

    live = [(tokens(9), tokens(3)) for _ in range(4)]
    for _ in range(60):
        for i in range(len(live)):
            prompt, output = live[i]
            match rng.randrange(12):
                case 0:
                    live[i] = (tokens(9), tokens(3))  # another request in its place
                case 1:
                    live[i] = (list(prompt), list(output))
                case 2:
                    again = list(output)
                    output.clear()
                    output.extend(again)
                case 3:
                    output.clear()  # a shorter one is seen, if it is asked for
                    check(counts, [(prompt, output, [])])
                    output += tokens(3)
                case _:
                    output += tokens(2)
        if rng.random() < 0.2:
            live.append((tokens(9), []))
        if len(live) > 2 and rng.random() < 0.15:
            live.pop(rng.randrange(len(live)))
        rows = []
        for prompt, output in rng.sample(live, rng.randint(1, len(live))):
            drafts = tokens(3)
            rows += [(prompt, output, drafts[:n]) for n in range(len(drafts) + 1)]
        rng.shuffle(rows)
        check(counts, rows)


def test_another_vocabulary_begins_anew() -> None:
    counts = TokenCounts()
    row = ([1, 2], [2, 5], [])
    check(counts, [row])
    _, narrow = counts.count([row[0]], [row[1]], [row[2]], 3, CPU)
    assert narrow.tolist() == [[0, 0, 1]]
    check(counts, [row])


def test_counts_made_in_inference_mode_are_brought_up_to_date_outside_of_it() -> None:
    counts = TokenCounts()
    prompt, output = [1], [2]
    with torch.inference_mode():
        check(counts, [(prompt, output, [3])])
    output.append(4)
    check(counts, [(prompt, output, [3])])


class Watched(list):
    """Counts the tokens that are read of it."""

    num_read = 0

    def __getitem__(self, item):
        found = super().__getitem__(item)
        self.num_read += len(found) if isinstance(item, slice) else 1
        return found

    def __iter__(self):
        self.num_read += len(self)
        return super().__iter__()


def test_a_step_reads_the_new_tokens_of_a_history_and_no_others() -> None:
    sampler = Sampler(VOCAB)
    prompts = [Watched([i] * 1000) for i in range(3)]
    outputs = [Watched([i] * 500) for i in range(3)]
    params = [SamplingParams(temperature=0.5, frequency_penalty=0.1, seed=i) for i in range(3)]
    batch = SamplingBatch(
        [*"abc"], params, [0, 1, 2], prompts, outputs, [[], [5], [5, 5]], [()] * 3
    )
    logits = torch.zeros(3, VOCAB)

    def num_read() -> int:
        return sum(history.num_read for history in prompts + outputs)

    sampler.draw(logits, batch)
    assert num_read() >= 4500, "the watch works"
    for history in outputs:
        history.append(7)
    before = num_read()
    sampler.draw(logits, batch)
    probs = sampling_probs(logits, batch, sampler.counts)
    assert num_read() - before == 3
    assert torch.equal(probs, sampling_probs(logits, batch)), "and counted anew"
