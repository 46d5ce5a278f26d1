"""Evening 6: prompts in chunks, mixed batches, and split attention."""

from __future__ import annotations

from workshop.practice.examples.example_tools import Lines, request


def sizes() -> Lines:
    from chunk_policy import ChunkedPrefill

    one = request("r", 500)
    for threshold in (None, 100):
        policy = ChunkedPrefill(threshold)
        for num, budget in ((500, 2048), (500, 300), (80, 2048), (500, 60)):
            given = policy.num_tokens_to_schedule(one, num, budget, max_step_tokens=2048)
            yield f"threshold {threshold}, {num} uncomputed, {budget} left: {given}"


def starts() -> Lines:
    from chunk_policy import ChunkedPrefill

    policy = ChunkedPrefill(long_prefill_token_threshold=100, max_long_partial_prefills=2)
    running = request("running", 500)
    running.num_computed_tokens = 100
    policy.begin_step([running], lambda one: one.num_tokens - one.num_computed_tokens)
    yield "long is more than 100; 2 long ones at once; one is running"
    for num in (100, 101, 20, 300, 400):
        yield f"may a prompt of {num} start? {policy.can_start(request('r', 9), num)}"
    free = ChunkedPrefill(100)
    yield f"without a limit, 500? {free.can_start(request('r', 9), 500)}"


def masks() -> Lines:
    import numpy as np
    import torch

    from attention_plan import DecodeGroup

    keys = torch.zeros(4, 4, 1, 2)
    tables = torch.tensor([[1, 2], [3, 0]])
    rows, starts, seq_lens = map(np.array, ([0, 1], [0, 3, 4], [6, 4]))
    group = DecodeGroup(rows, starts, seq_lens, tables, 1, keys)
    yield f"rows of the query: {group.tokens.tolist()}"
    if group.mask is None:
        yield "no mask"
        return
    for name, mask in zip(("6 keys, 3 queries", "4 keys, 1 query"), group.mask[:, 0]):
        yield name + ":"
        yield from ("  " + " ".join("x" if seen else "." for seen in row) for row in mask == 0)


def merged() -> Lines:
    import torch

    from mixed_attention import Partial

    def part(scores: torch.Tensor, values: torch.Tensor) -> Partial:
        lse = scores.logsumexp(-1, keepdim=True)
        return Partial((scores - lse).exp() @ values, lse)

    values = torch.tensor([[1.0], [2.0], [5.0]]).double()
    for shown in ([0.0, 0.0, 0.0], [1.0, 2.0, 4.0], [800.0, 801.0, 799.0]):
        scores = torch.tensor([shown]).double()
        both = part(scores[:, :2], values[:2])
        both.merge(part(scores[:, 2:], values[2:]))
        whole = part(scores, values)
        yield (
            f"scores {shown}: {both.output.item():.4f} (at once {whole.output.item():.4f}), "
            f"log-sum-exp {both.lse.item():.4f}"
        )
