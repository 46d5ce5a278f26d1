"""How many tokens to guess: as many as pay.

A draft that is accepted saves a pass of the target; one that is rejected costs its share of a pass
and the work of guessing it. With acceptance a, and k drafts for each of B requests,

    tokens(k) = B (1 + a + a^2 + ... + a^k)
    time(k)   = target pass over B (1 + k) tokens  +  k rounds of guessing

and the best k has the highest tokens(k) / time(k). For one request, a pass over five tokens takes
hardly longer than over one: the weights are read once either way. For many requests the processor
is busy already, every draft costs its full share, and the best k is 0: speculation switches itself
off.

`AdaptiveLength` knows nothing of the machine in advance. It fits straight lines to the times that
it sees, keeps each request's recent acceptance, and works out the rate for each k. Now and then it
tries another k for two steps, or it would never see that times have changed; less and less often,
if that leads to nothing. What it decides depends on a clock; no token does.

The formula: Leviathan et al., arXiv 2211.17192, section 3.3. vLLM takes a fixed number, or turns
speculation off from a given batch size on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from acceptance import expected_tokens


@dataclass(slots=True)
class CostLine:
    """`ms = base + slope * size`, fitted to what was seen, the recent past above all: least squares
    in which each new observation makes the old ones weigh `memory` times as much. With one size
    seen, the line is flat. Neither `base` nor `slope` is negative."""

    memory: float = 0.98
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # of w, wx, wy, wxx, wxy

    def observe(self, size: float, ms: float) -> None:
        if self._sums[0] > 3:
            ms = min(ms, 3 * self.predict(size) or ms)  # somebody else had the processor
        new = (1.0, size, ms, size * size, size * ms)
        self._sums = [self.memory * s + x for s, x in zip(self._sums, new, strict=True)]

    def fade(self) -> None:
        """A step without an observation: what was seen last grows old, and the next one counts for
        more. The line stays where it is."""
        if self._sums[0] > 1e-3:
            self._sums = [self.memory * s for s in self._sums]

    @property
    def has_seen(self) -> bool:
        return self._sums[0] > 0

    @property
    def line(self) -> tuple[float, float]:
        """`(base, slope)`."""
        w, x, y, xx, xy = self._sums
        spread = w * xx - x * x
        slope = (w * xy - x * y) / spread if spread > 1e-9 * max(w * xx, 1e-300) else 0.0
        slope = min(max(slope, 0.0), y / x if x else 0.0)
        return (y - slope * x) / w, slope

    def predict(self, size: float) -> float:
        base, slope = self.line
        return base + slope * size


class AdaptiveLength:
    """At most `num_spec_tokens`. `prior`: the acceptance assumed of a request that is new, until
    there are others to go by. Another length is tried after `probe_every` steps at first; up to
    sixteen times as many, as long as the best length stays the same."""

    def __init__(
        self,
        num_spec_tokens: int,
        *,
        prior: float = 0.7,
        memory: float = 0.9,
        probe_every: int = 32,
    ) -> None:
        self.num_spec_tokens = num_spec_tokens
        self.memory = memory
        self.probe_every = probe_every
        self.verify_cost = CostLine()
        self.draft_cost = CostLine()  # of one round
        self._probe = 0  # the length that is tried
        self._until_probe = self._probe_interval = probe_every  # steps; 0 and below: trying
        self._last_best = num_spec_tokens
        self._overall = _Acceptance(prior, 1.0)
        self._requests: dict[str, _Acceptance] = {}

    def acceptance(self, request_id: str) -> float:
        """Its recent share of accepted drafts, of those that were verified; the less is known of
        it, the more that of all requests."""
        own = self._requests.get(request_id)
        if own is None:
            return self._overall.rate
        return (own.weight * own.rate + self._overall.rate) / (own.weight + 1)

    def choose(self, request_ids: Sequence[str]) -> list[int]:
        if not request_ids:
            return []
        rates = [self.acceptance(request_id) for request_id in request_ids]
        if not self.verify_cost.has_seen:
            return [self.num_spec_tokens] * len(request_ids)
        best, tokens_per_ms = self._best(rates)
        if self._is_probing(best):
            return [self._probe] * len(request_ids)
        slope = self.verify_cost.line[1]
        lengths = [self._own_length(rate, best, slope * tokens_per_ms) for rate in rates]
        for request_id, length in zip(request_ids, lengths, strict=True):
            own = self._requests.get(request_id)
            if length == 0 and own is not None:
                own.weight *= self.memory  # or one that looked bad once would never be tried again
        return lengths

    def _is_probing(self, best: int) -> bool:
        """Every so often, two steps with one guess more than the best number and one less, in turn:
        what is measured in the first may be a draft model catching up."""
        if best != self._last_best:
            self._last_best, self._probe_interval = best, self.probe_every
            self._until_probe = min(self._until_probe, self._probe_interval)
        self._until_probe -= 1
        if self._until_probe > 0:
            return False
        if self._until_probe == 0:
            more = best < self.num_spec_tokens and (self._probe <= best or best == 0)
            self._probe = best + 1 if more else max(best - 1, 0)
        elif self._until_probe < -1:
            self._probe_interval = min(2 * self._probe_interval, 16 * self.probe_every)
            self._until_probe = self._probe_interval
            return False
        return True

    def _best(self, rates: list[float]) -> tuple[int, float]:
        """`(drafts for each, tokens per ms)` where the latter is highest; of equals the fewest."""
        num_requests = len(rates)
        best, best_speed = 0, 0.0
        for k in range(self.num_spec_tokens + 1):
            tokens = sum(expected_tokens(rate, k) for rate in rates)
            ms = self.verify_cost.predict(num_requests * (1 + k))
            if self.draft_cost.has_seen:
                ms += k * self.draft_cost.predict(num_requests)
            speed = tokens / max(ms, 1e-9)
            if speed > best_speed * (1 + 1e-9):
                best, best_speed = k, speed
        return best, best_speed

    @staticmethod
    def _own_length(acceptance: float, most: int, price: float) -> int:
        """Drafts up to the first whose chance to count is below its price: the tokens that the time
        for verifying it is worth."""
        length, chance = 0, acceptance
        while length < most and chance >= price:
            length += 1
            chance *= acceptance
        return length

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        own = self._requests.get(request_id)
        if own is None:
            own = self._requests[request_id] = _Acceptance(self._overall.rate, 2.0)
        own.observe(num_drafted, num_accepted, self.memory)
        self._overall.observe(num_drafted, num_accepted, 0.99)

    def observe_step(
        self, num_requests: int, num_tokens: int, num_rounds: int, verify_ms: float, draft_ms: float
    ) -> None:
        self.verify_cost.observe(num_tokens, verify_ms)
        if num_rounds:
            self.draft_cost.observe(num_requests, draft_ms / num_rounds)
        else:
            self.draft_cost.fade()

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)


@dataclass(slots=True)
class _Acceptance:
    """A share of successes, of which old ones fade. Starts at `rate`, as if seen `weight` times."""

    rate: float
    weight: float

    def observe(self, num_drafted: int, num_accepted: int, memory: float) -> None:
        num_tried = num_accepted + (num_accepted < num_drafted)  # none is tried behind a rejection
        if num_tried:
            weight = memory * self.weight
            self.rate = (weight * self.rate + num_accepted) / (weight + num_tried)
            self.weight = weight + num_tried
