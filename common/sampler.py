"""From logits to tokens: every constraint of `SamplingParams`, for the whole batch at once.

    raw logits --> log-probabilities, where asked for
        | min_tokens: EOS and stop tokens impossible; repetition, presence, frequency penalties
        +--> greedy rows: the highest; of equals, the lowest id
        | temperature, min-p, top-k, top-p
        | softmax                                    `sampling_probs` ends here (for chapter 5)
        +--> inverse of the cumulative distribution at a uniform number

One order ranks tokens everywhere: the higher logit first, of equals the lower id. So `top_k=1`
and a tiny `top_p` are exactly greedy, and top-k keeps exactly k.

Randomness is counter-based: the uniform number is a hash of (seed, output position, stream). There
is no generator whose state could depend on batch mates, slots, preemption or the number of drafts,
and a rank or a restart draws the same numbers. vLLM keeps a `torch.Generator` for each seeded
request and draws a whole row of exponential noise from it.

A logit row is used as float64 if it is float64, otherwise as float32; cumulative sums are float64
or integers. A row without a finite maximum (NaN, +inf, or no token allowed) is a `ValueError` that
names its request. Repetition penalty: Keskar et al. 2019 (arXiv 1909.05858); top-p: Holtzman et al.
2019 (arXiv 1904.09751); min-p: Nguyen et al. 2024 (arXiv 2407.01082); the hash: splitmix64 (Steele
et al. 2014).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import torch
import torch.nn.functional as F

from engine_core import SamplerOutput
from request import SamplingParams

NEG_INF = float("-inf")


@dataclass(slots=True)
class SamplingBatch:
    """What the sampler knows of each row of logits. Several rows may belong to one request, each
    with its own history. Lists are only read; `output_token_ids` may be the live ones."""

    req_ids: list[str]
    params: list[SamplingParams]
    seeds: list[int]
    prompt_token_ids: list[list[int]]
    output_token_ids: list[list[int]]
    eos_token_ids: list[Sequence[int]]  # empty where EOS is ignored


class HasSampling(Protocol):
    @property
    def sampling(self) -> SamplingBatch: ...


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability in the raw distribution of the model, before penalties and
    temperature, its rank there (1: none is likelier), and the likeliest tokens, best first."""

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(slots=True)
class SamplingPlan:
    """The parameters of a batch as tensors and row lists. It changes only when the batch does."""

    params: list[SamplingParams]
    device: torch.device
    greedy: list[int] = field(init=False)
    narrow: list[int] = field(init=False)  # drawn among few tokens: top-k
    wide: list[int] = field(init=False)  # drawn among all
    penalties: list[int] = field(init=False)
    min_tokens: list[int] = field(init=False)
    logprobs: list[int] = field(init=False)

    def __post_init__(self) -> None:
        rows = list(enumerate(self.params))
        self.greedy = [i for i, p in rows if p.is_greedy]
        random = [i for i, p in rows if not p.is_greedy]
        self.narrow = [i for i in random if 0 < self.params[i].top_k <= _NARROW]
        self.wide = [i for i in random if not 0 < self.params[i].top_k <= _NARROW]
        self.penalties = [
            i
            for i, p in rows
            if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
        ]
        self.min_tokens = [i for i, p in rows if p.min_tokens > 0]
        self.logprobs = [i for i, p in rows if p.logprobs is not None]

    @property
    def is_plain_greedy(self) -> bool:
        return not (self.narrow or self.wide or self.penalties or self.min_tokens or self.logprobs)

    def values(self, name: str, rows: list[int]) -> torch.Tensor:
        values = [getattr(self.params[i], name) for i in rows]
        return torch.tensor(values, dtype=torch.float64).to(self.device, non_blocking=True)


class Sampler:
    """Chooses each row's next token. `vocab_size`: logits beyond it are padding and never win.

    Keeps nothing but the last batch's parameters in tensor form."""

    def __init__(self, vocab_size: int | None = None) -> None:
        self.vocab_size = vocab_size
        self._plan: SamplingPlan | None = None

    def sample(self, logits: torch.Tensor, batch: HasSampling) -> SamplerOutput:
        """One token for each row of `logits` [R, vocab_size or wider]; R may be 0."""
        sampling = batch.sampling
        plan = self._plan_of(sampling, logits.device)
        raw = _as_float(logits[:, : self.vocab_size])
        if plan.is_plain_greedy:
            tokens = _greedy(raw).tolist()
        else:
            tokens = self._sample(raw, sampling, plan).tolist()
        _check_drawn(tokens, sampling)
        output = SamplerOutput({})
        for req_id, token in zip(sampling.req_ids, tokens, strict=True):
            output.token_ids.setdefault(req_id, []).append(token)
        if plan.logprobs:
            rows = plan.logprobs
            num_top = [sampling.params[i].logprobs for i in rows]
            found = token_logprobs(_rows(raw, rows), [tokens[i] for i in rows], num_top)
            for i, entry in zip(rows, found, strict=True):
                output.logprobs.setdefault(sampling.req_ids[i], []).append(entry)
        return output

    def _plan_of(self, sampling: SamplingBatch, device: torch.device) -> SamplingPlan:
        plan = self._plan  # comparing the lists is quick: the same objects are equal
        if plan is None or plan.device != device or plan.params != sampling.params:
            plan = self._plan = SamplingPlan(list(sampling.params), device)
        return plan

    def _sample(
        self, raw: torch.Tensor, sampling: SamplingBatch, plan: SamplingPlan
    ) -> torch.Tensor:
        logits = _penalised(raw, sampling, plan)
        if len(plan.greedy) == len(logits):
            return _greedy(logits)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if plan.greedy:
            tokens[plan.greedy] = _greedy(_rows(logits, plan.greedy))
        for rows, probs, ids in _distributions(logits, plan):
            seeds = torch.tensor([sampling.seeds[i] for i in rows])
            positions = torch.tensor([len(sampling.output_token_ids[i]) for i in rows])
            drawn = sample_from_probs(probs, uniforms(seeds, positions).to(logits.device))
            if ids is not None:
                drawn = ids.gather(1, drawn[:, None])[:, 0]
            tokens[rows] = torch.where(probs[:, 0].isnan(), -1, drawn)
        return tokens


def sampling_probs(
    logits: torch.Tensor, sampling: SamplingBatch, plan: SamplingPlan | None = None
) -> torch.Tensor:
    """The distribution [R, V] each row's token is drawn from, after every constraint. A greedy
    row is one-hot. A row without a finite maximum is all NaN. `logits` [R, V] without padding."""
    plan = plan or SamplingPlan(list(sampling.params), logits.device)
    logits = _penalised(_as_float(logits), sampling, plan)
    probs = torch.zeros_like(logits)
    if plan.greedy:
        tokens = _greedy(_rows(logits, plan.greedy))
        one_hot = F.one_hot(tokens.clamp(min=0), logits.shape[1]).to(logits.dtype)
        one_hot[tokens < 0] = float("nan")
        probs[plan.greedy] = one_hot
    for rows, row_probs, ids in _distributions(logits, plan):
        if ids is None:
            probs[rows] = row_probs
        else:
            is_nan = row_probs[:, :1].isnan()
            filled = probs[rows].scatter(1, ids, row_probs.to(probs.dtype))
            probs[rows] = filled.masked_fill(is_nan, float("nan"))
    return probs


# -- constraints. Each takes logits [R, V] and one value for each row, and returns new logits.


def apply_penalties(
    logits: torch.Tensor,
    is_known: torch.Tensor,
    output_counts: torch.Tensor,
    repetition_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
) -> torch.Tensor:
    """`is_known` [R, V]: the token is in the prompt or the output; its logit is divided by the
    repetition penalty if positive, else multiplied. `output_counts` [R, V]: how often it is in the
    output; presence is subtracted if at all, frequency times the count. Penalties [R]."""
    repetition, presence, frequency = (
        penalty.to(logits.dtype)[:, None]
        for penalty in (repetition_penalty, presence_penalty, frequency_penalty)
    )
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(is_known, repeated, logits)
    return logits - frequency * output_counts - presence * (output_counts > 0)


def apply_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """`(logits - their maximum) / temperature` [R] > 0. The highest logit becomes 0, so that no
    temperature, however small, overflows. A row without a finite maximum becomes NaN."""
    limits = torch.finfo(logits.dtype)
    temperature = temperature.clamp(limits.tiny, limits.max).to(logits.dtype)
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None])


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keep tokens at least `min_p` [R] times as probable as the most probable one."""
    lowest = logits.amax(dim=-1, keepdim=True) + min_p.log().to(logits.dtype)[:, None]
    return logits.masked_fill(logits < lowest, NEG_INF)


def apply_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keep exactly the `top_k` [R] highest; 0 or more than V keeps all. Of equal logits the lower
    ids stay."""
    vocab_size = logits.shape[1]
    num_kept = top_k.to(torch.int64).clamp(max=vocab_size)
    num_kept = torch.where(num_kept == 0, vocab_size, num_kept)
    highest = logits.topk(int(num_kept.max())).values
    return _keep_highest(logits, num_kept, highest)


def apply_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the fewest tokens, most probable first, whose probabilities sum to `top_p` [R] or more:
    the token that reaches it stays. Of equal logits the lower ids come first. 1 keeps all."""
    vocab_size = logits.shape[1]
    probs = logits.softmax(dim=-1)
    # Few tokens usually suffice, and finding a few is much quicker than sorting all on a CPU.
    width = vocab_size if logits.is_cuda else min(64, vocab_size)
    while True:
        highest, ids = logits.topk(width)
        reached = probs.gather(1, ids).to(torch.float64).cumsum(dim=-1)
        if width == vocab_size or bool(((reached[:, -1] >= top_p) | (top_p >= 1)).all()):
            break
        width = min(16 * width, vocab_size)
    num_kept = 1 + (reached[:, :-1] < top_p[:, None]).sum(dim=-1)
    kept = _keep_highest(logits, num_kept, highest)
    return torch.where(top_p[:, None] >= 1, logits, kept)


def _keep_highest(
    logits: torch.Tensor, num_kept: torch.Tensor, highest: torch.Tensor
) -> torch.Tensor:
    is_masked = ~_highest_mask(logits, num_kept, highest)
    return logits.masked_fill(is_masked & ~highest[:, :1].isnan(), NEG_INF)  # NaN must show


def _highest_mask(
    logits: torch.Tensor, num_kept: torch.Tensor, highest: torch.Tensor
) -> torch.Tensor:
    """True for the `num_kept` [R] highest of each row. `highest` [R, >= num_kept]: a row's highest
    logits, descending. (topk itself does not say which of equal ones it takes.)"""
    last = highest.gather(1, num_kept[:, None] - 1)
    above, equal = logits > last, logits == last
    num_equal_kept = num_kept[:, None] - above.sum(dim=-1, keepdim=True)
    if bool((equal.sum(dim=-1, keepdim=True) > num_equal_kept).any()):
        equal &= equal.cumsum(dim=-1) <= num_equal_kept
    return above | equal


def top_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The ids of the `k` <= V highest logits of each row [R, k], ascending. Of equal logits the
    lower ids. A row without a finite maximum gives any ids."""
    highest, ids = logits.topk(min(k + 1, logits.shape[1]))
    if k < logits.shape[1]:
        ids = ids[:, :k].clone()
        is_tie = (highest[:, k - 1] == highest[:, k]) & highest[:, 0].isfinite()
        if tied := is_tie.nonzero()[:, 0].tolist():
            num_kept = torch.full((len(tied),), k, device=logits.device)
            mask = _highest_mask(logits[tied], num_kept, highest[tied])
            ids[tied] = mask.nonzero()[:, 1].view(len(tied), k)
    return ids.sort(dim=-1).values


# -- drawing

_NARROW = 256  # a top-k up to this is handled apart from the rest of the vocabulary
_BLOCK = 128  # tokens that are first drawn together
_SCALE = 2.0**52  # probabilities as integers, whose sums are exact in any order


def sample_from_probs(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The token [R] whose interval of the cumulative distribution holds `u` [R] float64 in [0, 1).

    `probs` [R, V] sum to about 1. Intervals are closed left and open right, so a token of
    probability 0 (or below 2**-52) is never drawn, for no `u`. First the block of tokens is found,
    then the token in it: only [R, V / 128] and [R, 128] numbers need a cumulative sum."""
    vocab_size = probs.shape[1]
    num_whole = vocab_size // _BLOCK
    whole = probs[:, : num_whole * _BLOCK].unflatten(1, (num_whole, _BLOCK))
    rest = probs[:, num_whole * _BLOCK :]
    mass = torch.cat(
        [
            whole.sum(dim=-1),
            rest.sum(dim=-1, keepdim=True),
        ],
        dim=1,
    ).to(torch.float64)
    block, u = _draw(mass, u)
    ids = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(1, ids.clamp(max=vocab_size - 1)).to(torch.float64)
    inside = inside.masked_fill(ids >= vocab_size, 0.0)
    token, _ = _draw(inside / inside.sum(dim=-1, keepdim=True), u)
    return (block * _BLOCK + token).clamp(max=vocab_size - 1)  # a row of NaN is anywhere


def _draw(probs: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index [R] whose interval holds `u`, and where in the interval `u` lies, again in [0, 1).
    `probs` [R, N] float64."""
    ends = (probs * _SCALE).to(torch.int64).cumsum(dim=-1)
    # u < 1 and integers below 2**53: the product rounds to less than the total.
    target = (u * ends[:, -1].to(torch.float64)).to(torch.int64)
    index = torch.searchsorted(ends, target[:, None], right=True)
    index = index.clamp(max=probs.shape[1] - 1)  # for a row of NaN
    end = ends.gather(1, index)
    start = torch.where(index > 0, ends.gather(1, (index - 1).clamp(min=0)), 0)
    within = (target[:, None] - start).to(torch.float64) / (end - start).to(torch.float64)
    return index[:, 0], within[:, 0]


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, stream: int = 0) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64 [R]: a pure function of (seed, position, stream), the same
    on every device. `seeds`, `positions` [R] int64."""
    state = _mix(seeds + _GOLDEN)
    state = _mix(state + (positions + 1) * _GOLDEN)
    state = _mix(state ^ _mix(torch.full_like(state, stream + 1)))
    return _shift_right(state, 11).to(torch.float64) * 2.0**-53


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64. int64 arithmetic wraps, as it must here."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """As if unsigned: zeros come in from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# -- log-probabilities


def token_logprobs(
    raw_logits: torch.Tensor, tokens: list[int], num_top: list[int]
) -> list[TokenLogprobs]:
    """For each row of `raw_logits` [R, V]: its chosen token and its `num_top` likeliest ones."""
    logprobs = raw_logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])
    ranks = (1 + (logprobs > chosen).sum(dim=-1)).tolist()
    width = max(1, min(max(num_top), logprobs.shape[1]))
    ids = top_ids(raw_logits, width)
    order = raw_logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    top = zip(ids.tolist(), logprobs.gather(1, ids).tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, rank, dict(zip(row_ids[:k], row_logprobs[:k])))
        for token, logprob, rank, k, (row_ids, row_logprobs) in zip(
            tokens, chosen[:, 0].tolist(), ranks, num_top, top, strict=True
        )
    ]


# -- the rows that need it


def _penalised(logits: torch.Tensor, sampling: SamplingBatch, plan: SamplingPlan) -> torch.Tensor:
    """Minimum length and penalties. `logits` stay as they are."""
    banned: tuple[list[int], list[int]] = ([], [])
    for i in plan.min_tokens:
        if len(sampling.output_token_ids[i]) < sampling.params[i].min_tokens:
            ids = {*sampling.eos_token_ids[i], *sampling.params[i].stop_token_ids}
            ids = [t for t in ids if t < logits.shape[1]]
            banned[0].extend([i] * len(ids))
            banned[1].extend(ids)
    if banned[0]:
        logits = logits.clone()
        logits[banned] = NEG_INF
    if rows := plan.penalties:
        counts = [
            token_counts([tokens[i] for i in rows], logits.shape[1], logits.device)
            for tokens in (sampling.prompt_token_ids, sampling.output_token_ids)
        ]
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        values = [plan.values(name, rows) for name in names]
        is_known = (counts[0] > 0) | (counts[1] > 0)
        changed = apply_penalties(_rows(logits, rows), is_known, counts[1], *values)
        logits = _with_rows(logits, rows, changed)
    return logits


def token_counts(
    token_ids: Sequence[Sequence[int]], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """How often each token is in each list [R, vocab_size] int32. Ids beyond the vocabulary are
    left out."""
    rows = torch.tensor([len(ids) for ids in token_ids])
    rows = torch.arange(len(token_ids)).repeat_interleave(rows)
    ids = torch.tensor(list(chain.from_iterable(token_ids)), dtype=torch.int64)
    flat = (rows * vocab_size + ids)[ids < vocab_size].to(device)
    counts = torch.zeros(len(token_ids) * vocab_size, dtype=torch.int32, device=device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return counts.view(len(token_ids), vocab_size)


def _distributions(
    logits: torch.Tensor, plan: SamplingPlan
) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor | None]]:
    """`(rows, probs [len(rows), C], ids)` of the rows that draw. `ids` [len(rows), C], ascending,
    name the tokens of the columns; None: the columns are the vocabulary.

    Rows with a small top-k leave the wide tensors at once. In float64 their sums do not depend, to
    1e-16, on the width their batch mates ask for."""
    if rows := plan.narrow:
        row_logits = _rows(logits, rows)
        width = max(plan.params[i].top_k for i in rows)
        ids = top_ids(row_logits, min(width, logits.shape[1]))
        yield rows, _probs(row_logits.gather(1, ids).to(torch.float64), rows, plan), ids
    if rows := plan.wide:
        yield rows, _probs(_rows(logits, rows), rows, plan), None


def _probs(logits: torch.Tensor, rows: list[int], plan: SamplingPlan) -> torch.Tensor:
    """Temperature, min-p, top-k, top-p and softmax. `logits` [len(rows), C].

    top-k goes first: which tokens are the k highest does not depend on the temperature, and min-p
    and top-k commute, since each keeps all tokens above some rank."""
    params = [plan.params[i] for i in rows]

    def constrain(
        apply: Callable[..., torch.Tensor], name: str, is_asked: Callable[[float], bool]
    ) -> torch.Tensor:
        asking = [j for j, p in enumerate(params) if is_asked(getattr(p, name))]
        if not asking:
            return logits
        values = plan.values(name, [rows[j] for j in asking])
        return _with_rows(logits, asking, apply(_rows(logits, asking), values))

    logits = constrain(apply_top_k, "top_k", lambda k: 0 < k < logits.shape[1])
    logits = apply_temperature(logits, plan.values("temperature", rows))
    logits = constrain(apply_min_p, "min_p", lambda p: p > 0)
    logits = constrain(apply_top_p, "top_p", lambda p: p < 1)
    return logits.softmax(dim=-1)


def _greedy(logits: torch.Tensor) -> torch.Tensor:
    """The highest logit's lowest id [R]; -1 where the highest is not finite."""
    if logits.is_cuda:
        highest, tokens = logits.max(dim=-1)
    else:  # NumPy's argmax is vectorised and ten times as quick; both take the first of equals
        tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
        highest = logits.gather(1, tokens[:, None])[:, 0]
    return torch.where(highest.isfinite(), tokens, -1)


def _check_drawn(tokens: list[int], sampling: SamplingBatch) -> None:
    if tokens and min(tokens) < 0:
        names = [r for r, token in zip(sampling.req_ids, tokens, strict=True) if token < 0]
        raise ValueError(
            f"logits of {names} have no finite maximum: they hold NaN or infinity, or every token "
            "is ruled out"
        )


def _as_float(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.to(torch.float32)


def _rows(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return x if len(rows) == len(x) else x[rows]


def _with_rows(x: torch.Tensor, rows: list[int], new: torch.Tensor) -> torch.Tensor:
    if len(rows) == len(x):
        return new
    return x.index_copy(0, torch.tensor(rows, device=x.device), new)
