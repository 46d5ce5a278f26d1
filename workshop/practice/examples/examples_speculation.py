"""Evening 5: draft tokens, the rows that verify them, and the replacement of a rejected one."""

from __future__ import annotations

from typing import Any

from workshop.practice.examples.example_tools import Lines


def look_ups() -> Lines:
    from input_batch import RunnerRequest
    from proposers import NgramProposer, ProposerInput
    from request import SamplingParams

    proposer = NgramProposer(num_spec_tokens=2, max_ngram=4, min_ngram=2)
    for number, tokens in enumerate(
        (
            [2, 3, 5, 1, 2, 3, 4, 9, 1, 2, 3],
            [2, 3, 4, 8, 1, 2, 3, 4, 9, 1, 2, 3, 4],
            [7, 8, 5, 1, 7, 8],
            [5, 6, 7],
        )
    ):
        known = RunnerRequest(str(number), SamplingParams(), tokens, [])
        drafts = proposer.propose([ProposerInput(known, 0, len(tokens) - 1)], [2])
        yield f"after {tokens}: {drafts.get(str(number), 'nothing')}"


def judged_rows() -> Lines:
    from spec_decode import SimpleLM, verify_and_sample

    model = SimpleLM(50, seed=3)
    said: list[int] = []
    for _ in range(4):
        said.append(int(model.get_logits([1, 2, 3, *said])[-1].argmax()))
    yield f"after 1, 2, 3 the target says {said}"
    for drafts in (said[:3], [said[0], 49, said[2]], []):
        tokens, num_accepted = verify_and_sample(model, [1, 2, 3], drafts, temperature=0)
        yield f"drafts {drafts}: {num_accepted} accepted, tokens {tokens}"


def _sampled(
    p: list[list[float]], drafts: list[int], q: Any, accept: list[float], u: float, starts: Any = ()
) -> str:
    import torch

    from rejection_sampler import rejection_sample

    verified = rejection_sample(
        torch.tensor(p, dtype=torch.float64),
        torch.tensor(drafts),
        None if q is None else torch.tensor(q, dtype=torch.float64),
        torch.tensor(starts or [0, len(drafts) + 1]),
        len(drafts),
        torch.tensor(accept, dtype=torch.float64),
        torch.full((len(p),), u, dtype=torch.float64),
    )
    rows = zip(verified.token_ids.tolist(), verified.num_sampled.tolist())
    return "; ".join(f"{number - 1} accepted, tokens {tokens[:number]}" for tokens, number in rows)


def accepted() -> Lines:
    p = [[0.6, 0.4, 0.0], [0.1, 0.4, 0.5], [0.2, 0.2, 0.6]]
    q = [[0.8, 0.1, 0.1], [0.3, 0.3, 0.4]]
    yield f"p (of the target) {p}"
    yield f"q (of the draft) {q}"
    for drafts, u in (([0, 1], 0.7), ([0, 1], 0.8), ([1, 1], 0.99), ([2, 1], 0.0), ([0, 3], 0.0)):
        shown = _sampled(p, drafts, q, [u, u], 0.9)
        yield f"drafts {drafts}, random number {u}: {shown}"
    shown = _sampled(p, [1, 0], q, [0.2, 0.9], 0.9)
    yield f"drafts [1, 0], random numbers 0.2 and 0.9: {shown}"


def residuals() -> Lines:
    p, q = [[0.5, 0.3, 0.2], [0.0, 0.0, 1.0]], [[0.8, 0.1, 0.1]]
    yield "p [0.5, 0.3, 0.2], q [0.8, 0.1, 0.1], draft 0 is rejected"
    yield from (f"random number {u}: {_sampled(p, [0], q, [0.99], u)}" for u in (0.0, 0.6, 0.82))
    yield "a draft that was certain (no q)"
    yield from (f"random number {u}: {_sampled(p, [0], None, [0.99], u)}" for u in (0.0, 0.5, 0.7))
    four = [p[0], p[1], [0.2, 0.5, 0.3], p[1]]
    both = _sampled(four, [0, 1], None, [0.99, 0.99], 0.5, [0, 2, 4])
    yield f"two requests with one such draft token each, 0 and 1: {both}"
    p, q = [p[0], [0.1, 0.5, 0.4], p[1]], [[0.4, 0.3, 0.3], [0.8, 0.1, 0.1]]
    yield f"two drafts, of which the second is rejected: {_sampled(p, [0, 0], q, [0.9] * 2, 0.6)}"


# -- exhibits
