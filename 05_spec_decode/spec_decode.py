"""Speculative decoding on its own: two toy models and one step. For the loop:
`testing/toy_generation.py`.

A *draft* model proposes k tokens, one after the other. The *target* model reads the context and all
draft tokens in one pass, which takes hardly longer than a pass over one token (the weights are read
once either way), and returns its own distribution at each position:

    fed to the target     c0   c1   c2   d0   d1   d2      context c, drafts d
    its rows of logits    .    .    p0   p1   p2   p3
                                    |    |    |    '- after all drafts: the bonus token
                                    |    |    '- verifies d2
                                    |    '- verifies d1
                                    '- verifies d0: the row of the token *before* it

Draft tokens are verified from the first on. The first one that is rejected is replaced by a token
of the target, and the draft tokens after it are discarded. `rejection_sampler.py` has the rules.

Invariants: a step is one target pass and emits 1 to k + 1 tokens. They have the target's
distribution, and at temperature 0 are the target's own tokens, however bad the draft tokens: a bad
draft token costs time, never quality.

There is no KV cache here, so each pass reads everything again. An engine must free the KV of
rejected draft tokens, and requests with different numbers of them share a pass:
`speculating_runner.py`, `beyond/draft_model_proposer.py`.

Source: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.

See 05_spec_decode/README.md#a-whole-step-on-a-toy-model"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from acceptance import SpecDecodeStats
from inverse_cdf import draw
from rejection_sampler import rejection_sample, rejection_sampling_batched
from request import require


class LanguageModel(Protocol):
    def get_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return [seq_len, vocab_size]: row i predicts the token after `token_ids[i]`."""
        ...


class SimpleLM:
    """One layer of causal attention with random weights, float64. It is not trained, but its tokens
    depend on all tokens before them and on their order, as a real model's do."""

    def __init__(self, vocab_size: int, hidden_size: int = 64, *, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        generator = torch.Generator().manual_seed(seed)
        shapes = [(vocab_size, hidden_size), *[(hidden_size, hidden_size)] * 3]
        shapes.append((hidden_size, vocab_size))
        # embedding, query, key, value, lm_head: every entry N(0, 1)
        self.weights = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        self._frequencies = torch.arange(1, hidden_size + 1).double()  # radians per position

    def noisy_copy(self, noise: float, seed: int = 0) -> SimpleLM:
        """A draft model for this one. With `noise` 0 it is the same model, with 1 an unrelated one;
        agreement falls in between."""
        # Far from seeds that a caller chooses: the noise must not equal the weights.
        copy = SimpleLM(self.vocab_size, self.hidden_size, seed=1_000_003 + seed)
        pairs = zip(self.weights, copy.weights)
        copy.weights = [math.sqrt(1 - noise**2) * weight + noise * other for weight, other in pairs]
        return copy

    def get_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return [seq_len, vocab_size] float64."""
        embedding, query, key, value, lm_head = self.weights
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        is_seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        x = embedding[ids] + torch.cos(torch.arange(len(ids))[:, None] * self._frequencies)
        # With random entries of size 1, the product of two vectors is about sqrt(hidden_size).
        scale = self.hidden_size**-0.5
        scores = (x @ query * scale) @ (x @ key * scale).T * scale
        scores = scores.masked_fill(~is_seen, -torch.inf)
        x = x + 2 * scores.softmax(dim=-1) @ (x @ value * scale)
        x = x / x.square().mean(dim=-1, keepdim=True).sqrt()
        return 2 * x @ lm_head * scale


def token_probs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """The probabilities for logits [..., vocab_size], in float64. `temperature` must be > 0,
    however small."""
    require(0 < temperature < math.inf, "temperature", temperature, ">= 0 and finite")
    logits = logits.double()
    return ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)


def sample_token(
    logits: torch.Tensor,  # [vocab_size]
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> int:
    """Sample one token. Temperature 0 is greedy: the most likely token, the lowest id of equals."""
    return int(_sample_rows(logits[None], temperature, generator))


def draft_generate(
    draft_model: LanguageModel,
    context_ids: Sequence[int],
    num_speculative_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[list[int], torch.Tensor]:
    """Return `(draft_token_ids, draft_logits [k, vocab_size])`: draft j was drawn from row j. Takes
    one pass of the draft model per draft token."""
    k = num_speculative_tokens
    if k == 0:  # one pass, only for the size of the vocabulary
        return [], draft_model.get_logits(context_ids)[:0]
    drafts: list[int] = []
    rows = []
    for _ in range(k):
        rows.append(draft_model.get_logits([*context_ids, *drafts])[-1])
        drafts.append(sample_token(rows[-1], temperature, generator))
    return drafts, torch.stack(rows)


def verify_and_sample(
    target_model: LanguageModel,
    context_ids: Sequence[int],
    draft_tokens: Sequence[int],
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    *,
    draft_logits: torch.Tensor | None = None,  # [k, vocab_size]; None: deterministic drafts
    rule: str = "rejection",
) -> tuple[list[int], int]:
    """Return `(tokens, num_accepted)`: the accepted draft tokens and one more token, from one
    target pass.

    With "rejection", the drafts must have been drawn from `draft_logits` at this `temperature`, or
    the output has another distribution. With "matching", or at temperature 0, `draft_logits` is not
    used.
    """
    num_drafts = len(draft_tokens)
    logits = target_model.get_logits([*context_ids, *draft_tokens])[len(context_ids) - 1 :]
    drafts = torch.tensor(draft_tokens, dtype=torch.int64)
    cu_num_logits = torch.tensor([0, num_drafts + 1])  # a batch of one request
    if rule == "matching" or temperature == 0:
        sampled = _sample_rows(logits, temperature, generator)
        verified = rejection_sampling_batched(sampled, drafts, cu_num_logits, num_drafts)
    else:
        verified = rejection_sample(
            token_probs(logits, temperature),
            drafts,
            None if draft_logits is None else token_probs(draft_logits, temperature),
            cu_num_logits,
            num_drafts,
            accept_u=_uniform(num_drafts, generator),
            sample_u=_uniform(num_drafts + 1, generator),
        )
    tokens = verified.token_ids[0, : int(verified.num_sampled[0])].tolist()
    return tokens, len(tokens) - 1


def speculative_decode_step(
    target_model: LanguageModel,
    draft_model: LanguageModel,
    context_ids: Sequence[int],
    num_speculative_tokens: int = 4,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    *,
    rule: str = "rejection",
) -> tuple[list[int], SpecDecodeStats]:
    """Propose and verify: return the next 1 to k + 1 tokens."""
    drafts, logits = draft_generate(
        draft_model, context_ids, num_speculative_tokens, temperature, generator
    )
    tokens, num_accepted = verify_and_sample(
        target_model, context_ids, drafts, temperature, generator, draft_logits=logits, rule=rule
    )
    stats = SpecDecodeStats()
    stats.observe(len(drafts), num_accepted)
    return tokens, stats


def _sample_rows(
    logits: torch.Tensor, temperature: float, generator: torch.Generator | None
) -> torch.Tensor:
    """Sample [R] int64 from [R, vocab_size], with one random number per row."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    tokens, _ = draw(token_probs(logits, temperature), _uniform(len(logits), generator))
    return tokens


def _uniform(size: int, generator: torch.Generator | None) -> torch.Tensor:
    return torch.rand(size, dtype=torch.float64, generator=generator)
