"""Chapter 5 in 38 lines: accept or reject. Run it: `python 05_spec_decode/small_speculation.py`.

See 05_spec_decode/README.md#the-idea-in-one-small-file"""

import random
from collections import Counter

import torch

from rejection_sampler import rejection_sample

TOKENS = "xyz"
DRAFT = {"x": 0.2, "y": 0.7, "z": 0.1}  # q: the cheap model's distribution
TARGET = [{"x": 0.5, "y": 0.3, "z": 0.2}, {"x": 0.1, "y": 0.8, "z": 0.1}]  # p, at its two positions
BONUS = {"x": 0.6, "y": 0.2, "z": 0.2}  # p after both draft tokens


def draw(weights, u):
    """The token at the point `u` of all weights laid end to end."""
    point = u * sum(weights.values())
    for token, weight in weights.items():
        point -= weight
        if point < 0:
            return token
    return max(weights, key=weights.get)  # rounding: `u` was at the end


def verify(proposed, accept_u, sample_u):
    """Return the draft tokens up to the first rejection, and one token from the target."""
    tokens = []
    for d, p, u, v in zip(proposed, TARGET, accept_u, sample_u):
        if u >= p[d] / DRAFT[d]:  # accepted with probability min(1, p/q)
            residual = {t: max(p[t] - DRAFT[t], 0) for t in TOKENS}
            return [*tokens, draw(residual, v)]
        tokens.append(d)
    return [*tokens, draw(BONUS, sample_u[-1])]


rng = random.Random(5)
rounds = []
for _ in range(20_000):
    proposed = [draw(DRAFT, rng.random()) for _ in TARGET]
    numbers = [rng.random() for _ in range(5)]  # two to accept with, three to draw with
    rounds.append((proposed, numbers[:2], numbers[2:], verify(proposed, numbers[:2], numbers[2:])))
for proposed, _, _, tokens in rounds[:4]:
    print(f"proposed {' '.join(proposed)}   output {' '.join(tokens)}")
counts = Counter(tokens[0] for *_, tokens in rounds)
for token in TOKENS:
    share = counts[token] / len(rounds)
    print(f"first token {token}: {share:.2f} of all, p says {TARGET[0][token]:.2f}")
    assert abs(share - TARGET[0][token]) < 0.02

# Compare with the chapter's function, which verifies a whole batch.
p = torch.tensor([[*row.values()] for row in (*TARGET, BONUS)], dtype=torch.float64)
q = torch.tensor([[*DRAFT.values()]] * 2, dtype=torch.float64)
for proposed, accept_u, sample_u, tokens in rounds[:500]:
    drafts = torch.tensor([TOKENS.index(token) for token in proposed])
    u, v = torch.tensor(accept_u, dtype=torch.float64), torch.tensor(sample_u, dtype=torch.float64)
    real = rejection_sample(p, drafts, q, torch.tensor([0, 3]), 2, u, v)
    ids = real.token_ids[0, : int(real.num_sampled[0])].tolist()
    assert [TOKENS[i] for i in ids] == tokens
print("rejection_sampler.py says the same")
