"""From logits to tokens: every constraint of `SamplingParams`, for the whole batch at once.

    raw logits --> log-probabilities, where asked for
        | min_tokens: EOS and stop tokens impossible; repetition, presence, frequency penalties
        +--> greedy rows: the highest; of equals, the lowest id
        | temperature, min-p, top-k, top-p
        | softmax                                    `sampling_probs` ends here (for chapter 5)
        +--> inverse of the cumulative distribution at a uniform number

A logit row is used as float64 if it is float64, otherwise as float32; cumulative sums are float64
or integers. A row without a finite maximum (NaN, +inf, or no token allowed) is an error of its
request and of no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from common.sampling import sampling_constraints as constraints
from common.sampling.counter_random import TOKEN_STREAM, sample_from_probs, uniforms
from input_batch import RunnerRequest
from request import SamplingParams
from scheduler_interface import NO_FINITE_LOGITS, StepOutput

if TYPE_CHECKING:
    from common.sampling.token_counts import TokenCounts

_NARROW = 256  # a top-k up to this is handled apart from the rest of the vocabulary


@dataclass(slots=True)
class SamplingBatch:
    """What the sampler knows of each row of logits. Several rows may belong to one request, each
    with its own history: prompt, outputs, and drafts. Lists are only read; `output_token_ids` may
    be the live ones, which only grow."""

    req_ids: list[str] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    prompt_token_ids: list[list[int]] = field(default_factory=list)
    output_token_ids: list[list[int]] = field(default_factory=list)
    # Those that stand before the row's token (chapter 5).
    draft_token_ids: list[list[int]] = field(default_factory=list)
    eos_token_ids: list[Sequence[int]] = field(default_factory=list)  # empty where EOS is ignored
    num_unseen: int = 0  # tokens between the history and the row's own, the same for all rows

    def add(
        self, request: RunnerRequest, draft_token_ids: list[int], eos_token_ids: Sequence[int]
    ) -> None:
        """A row for the token that follows those of the request, and these drafts."""
        params = request.params
        self.req_ids.append(request.req_id)
        self.params.append(params)
        self.seeds.append(params.seed or 0)
        self.prompt_token_ids.append(request.prompt_token_ids)
        self.output_token_ids.append(request.output_token_ids)
        self.draft_token_ids.append(draft_token_ids)
        self.eos_token_ids.append(() if params.ignore_eos else eos_token_ids)

    def num_outputs(self, row: int) -> int:
        """The output position of the row's token."""
        num_seen = len(self.output_token_ids[row]) + len(self.draft_token_ids[row])
        return num_seen + self.num_unseen

    def select(self, rows: Sequence[int]) -> SamplingBatch:
        """Some of the rows."""
        columns = [getattr(self, f.name) for f in fields(self)[:-1]]
        selected = ([column[i] for i in rows] for column in columns)
        return SamplingBatch(*selected, num_unseen=self.num_unseen)

    def uniforms(self, rows: Sequence[int], stream: int) -> torch.Tensor:
        """The uniform number of each of the rows' tokens, float64 on the CPU."""
        seeds = torch.tensor([self.seeds[i] for i in rows], dtype=torch.int64)
        positions = torch.tensor([self.num_outputs(i) for i in rows], dtype=torch.int64)
        return uniforms(seeds, positions, stream)


class HasSampling(Protocol):
    """A batch, as a sampler sees it."""

    sampling: SamplingBatch
    draft_token_ids: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability in the raw distribution of the model, before penalties and
    temperature, its rank there (1: none is likelier), and the likeliest tokens, best first."""

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


class SamplingPlan:
    """The rows of a batch by what they need. It changes only when the batch does."""

    def __init__(self, params: list[SamplingParams], device: torch.device) -> None:
        self.params, self.device = params, device
        self.greedy: list[int] = []
        self.narrow: list[int] = []  # drawn among few tokens: top-k
        self.wide: list[int] = []  # drawn among all
        for i, p in enumerate(params):
            drawn = self.narrow if 0 < p.top_k <= _NARROW else self.wide
            (self.greedy if p.is_greedy else drawn).append(i)
        self.min_tokens = [i for i, p in enumerate(params) if p.min_tokens > 0]
        self.penalties = [i for i, p in enumerate(params) if _has_penalties(p)]

    def values(self, name: str, rows: list[int]) -> torch.Tensor:
        values = [getattr(self.params[i], name) for i in rows]
        return torch.tensor(values, dtype=torch.float64).to(self.device, non_blocking=True)


def _has_penalties(params: SamplingParams) -> bool:
    rest = params.presence_penalty or params.frequency_penalty
    return params.repetition_penalty != 1 or rest != 0


class Sampler:
    """Chooses each row's next token. `vocab_size`: logits beyond it are padding and never win.

    Keeps the last batch's parameters by what they need, and token counts where there are penalties.
    Neither changes what is sampled."""

    def __init__(self, vocab_size: int | None = None) -> None:
        self.vocab_size = vocab_size
        self._plan: SamplingPlan | None = None

    @cached_property
    def counts(self) -> TokenCounts:
        from common.sampling.token_counts import TokenCounts

        return TokenCounts()

    def sample(self, logits: torch.Tensor, batch: HasSampling) -> StepOutput:
        """One token for each row of `logits` [R, vocab_size or wider]; R may be 0."""
        raw = self.raw_logits(logits)
        tokens = self.draw(raw, batch.sampling).tolist()  # the host waits here
        return self.emit(raw, batch.sampling, range(len(raw)), tokens)

    def raw_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Without padding lanes, in the dtype that is computed in."""
        return _as_float(logits[:, : self.vocab_size])

    def draw(self, raw: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
        """The token [R] of each row of `raw_logits`; -1 where the highest is not finite."""
        plan = self._plan  # comparing the lists is quick: the same objects are equal
        if plan is None or plan.device != raw.device or plan.params != sampling.params:
            plan = self._plan = SamplingPlan(list(sampling.params), raw.device)
        logits = _forbid_stops(raw, sampling, plan) if plan.min_tokens else raw
        if plan.penalties:
            logits = _penalise(logits, sampling, plan, self.counts)
        if len(plan.greedy) == len(logits):
            return _greedy(logits)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if plan.greedy:
            tokens[plan.greedy] = _greedy(_rows(logits, plan.greedy))
        for rows, probs, ids in _distributions(logits, plan):
            u = sampling.uniforms(rows, TOKEN_STREAM).to(logits.device)
            drawn = sample_from_probs(probs, u)
            if ids is not None:
                drawn = ids.gather(1, drawn[:, None])[:, 0]
            tokens[rows] = torch.where(probs[:, 0].isnan(), -1, drawn)
        return tokens

    def emit(
        self, raw: torch.Tensor, sampling: SamplingBatch, rows: Sequence[int], tokens: list[int]
    ) -> StepOutput:
        """What becomes of `tokens`, the one of each of `rows`. A -1 is an error of its request."""
        output = StepOutput()
        asking = []
        for row, token in zip(rows, tokens, strict=True):
            req_id = sampling.req_ids[row]
            if token < 0:
                output.errors[req_id] = NO_FINITE_LOGITS
                continue
            output.token_ids.setdefault(req_id, []).append(token)
            if sampling.params[row].logprobs is not None:
                asking.append((row, token))
        if asking:
            _add_logprobs(output, raw, sampling, *map(list, zip(*asking)))
        return output


def sampling_probs(
    logits: torch.Tensor, sampling: SamplingBatch, counts: TokenCounts | None = None
) -> torch.Tensor:
    """The distribution [R, V] each row's token is drawn from, after every constraint. A greedy
    row is one-hot. A row without a finite maximum is all NaN. `logits` [R, V] without padding.
    `counts` are kept from call to call; without them the histories are counted anew."""
    plan = SamplingPlan(list(sampling.params), logits.device)
    logits = _as_float(logits)
    if plan.min_tokens:
        logits = _forbid_stops(logits, sampling, plan)
    if plan.penalties:
        logits = _penalise(logits, sampling, plan, counts or Sampler().counts)
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


# -- log-probabilities


def _add_logprobs(
    output: StepOutput,
    raw: torch.Tensor,
    sampling: SamplingBatch,
    rows: list[int],
    tokens: list[int],
) -> None:
    num_top = [sampling.params[row].logprobs or 0 for row in rows]
    for row, entry in zip(rows, token_logprobs(_rows(raw, rows), tokens, num_top), strict=True):
        output.logprobs.setdefault(sampling.req_ids[row], []).append(entry)


def token_logprobs(
    raw_logits: torch.Tensor, tokens: list[int], num_top: list[int]
) -> list[TokenLogprobs]:
    """For each row of `raw_logits` [R, V]: its chosen token and its `num_top` likeliest ones."""
    logprobs = raw_logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])
    ranks = (1 + (logprobs > chosen).sum(dim=-1)).tolist()
    width = max(1, min(max(num_top), logprobs.shape[1]))
    ids = constraints.top_ids(raw_logits, width)
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


def _forbid_stops(
    logits: torch.Tensor, sampling: SamplingBatch, plan: SamplingPlan
) -> torch.Tensor:
    """EOS and stop tokens are impossible before `min_tokens`. `logits` stay as they are."""
    rows: list[int] = []
    forbidden: list[int] = []
    for i in plan.min_tokens:
        if sampling.num_outputs(i) < sampling.params[i].min_tokens:
            ids = {*sampling.eos_token_ids[i], *sampling.params[i].stop_token_ids}
            ids = [t for t in ids if t < logits.shape[1]]
            rows += [i] * len(ids)
            forbidden += ids
    if rows:
        logits = logits.clone()
        logits[rows, forbidden] = constraints.NEG_INF
    return logits


def _penalise(
    logits: torch.Tensor, sampling: SamplingBatch, plan: SamplingPlan, counts: TokenCounts
) -> torch.Tensor:
    rows = plan.penalties
    columns = (sampling.prompt_token_ids, sampling.output_token_ids, sampling.draft_token_ids)
    prompts, outputs, drafts = ([column[i] for i in rows] for column in columns)
    is_known, counted = counts.count(prompts, outputs, drafts, logits.shape[1], logits.device)
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    values = [plan.values(name, rows) for name in names]
    changed = constraints.apply_penalties(_rows(logits, rows), is_known, counted, *values)
    return _with_rows(logits, rows, changed)


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
        ids = constraints.top_ids(row_logits, min(width, logits.shape[1]))
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

    logits = constrain(constraints.apply_top_k, "top_k", lambda k: 0 < k < logits.shape[1])
    logits = constraints.apply_temperature(logits, plan.values("temperature", rows))
    logits = constrain(constraints.apply_min_p, "min_p", lambda p: p > 0)
    logits = constrain(constraints.apply_top_p, "top_p", lambda p: p < 1)
    return logits.softmax(dim=-1)


def _greedy(logits: torch.Tensor) -> torch.Tensor:
    """The highest logit's lowest id [R]; -1 where the highest is not finite."""
    if logits.is_cuda:
        highest, tokens = logits.max(dim=-1)
    else:  # NumPy's argmax is vectorised and ten times as quick; both take the first of equals
        tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
        highest = logits.gather(1, tokens[:, None])[:, 0]
    return torch.where(highest.isfinite(), tokens, -1)


def _as_float(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.to(torch.float32)


def _rows(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return x if len(rows) == len(x) else x[rows]


def _with_rows(x: torch.Tensor, rows: list[int], new: torch.Tensor) -> torch.Tensor:
    if len(rows) == len(x):
        return new
    return x.index_copy(0, torch.tensor(rows, device=x.device), new)
