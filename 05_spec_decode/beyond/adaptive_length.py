"""How many draft tokens to propose: as many as pay off.

A draft token that is accepted saves a pass of the target; one that is rejected costs its share of a
pass and the work of proposing it. With acceptance a, and k draft tokens for each of B requests,

    tokens(k) = B (1 + a + a^2 + ... + a^k)
    time(k)   = target pass over B (1 + k) tokens  +  k rounds of proposing

and the best k has the highest tokens(k) / time(k). For one request, a pass over five tokens takes
hardly longer than over one: the weights are read once either way. For many requests the processor
is busy already, every draft token costs its full share, and the best k is 0: speculation switches
itself off.

`AdaptiveLength` knows nothing of the machine in advance. It fits straight lines to the observed
times, keeps the recent acceptance of all requests, and computes the rate for each k; all requests
get the best one. Now and then it tries another k for two steps, because it could not detect changed
times or acceptance otherwise; it does so less and less often if the best k stays the same. Its
decisions depend on a clock; no token does.

The formula: Leviathan et al., arXiv 2211.17192, section 3.3. vLLM (0.33) takes a fixed
number, or one for each range of batch sizes.

See 05_spec_decode/README.md#a-runner-around-a-runner"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from acceptance import expected_tokens


@dataclass(slots=True)
class CostLine:
    """`ms = base + slope * size`, fitted to observations by least squares, mostly to recent ones:
    each new observation multiplies the weight of the old ones by `memory`. If only one size was
    seen, the line is flat. Neither `base` nor `slope` is negative."""

    memory: float = 0.98
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # of w, wx, wy, wxx, wxy

    def observe(self, size: float, ms: float) -> None:
        if self._sums[0] > 3:
            ms = min(ms, 3 * self.predict(size) or ms)  # another process used the processor
        new = (1.0, size, ms, size * size, size * ms)
        self._sums = [self.memory * s + x for s, x in zip(self._sums, new, strict=True)]

    def fade(self) -> None:
        """Count a step without an observation: old observations lose weight, so the next one counts
        for more. The line does not change."""
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
    """Chooses at most `num_spec_tokens`, the same for all requests. `prior` is the acceptance that
    is assumed at first. Another length is tried after `probe_every` steps at first, and after up to
    sixteen times as many if the best length stays the same."""

    def __init__(
        self,
        num_spec_tokens: int,
        *,
        prior: float = 0.7,
        memory: float = 0.98,
        probe_every: int = 32,
    ) -> None:
        self.num_spec_tokens = num_spec_tokens
        self.memory = memory
        self.probe_every = probe_every
        self.verify_cost = CostLine()
        self.draft_cost = CostLine()  # of one round
        self._probe = 0  # the length being tried
        self._until_probe = self._probe_interval = probe_every  # steps; 0 and below: trying
        self._last_best = num_spec_tokens
        self.acceptance = prior  # the recent share of accepted draft tokens, among those verified
        self._weight = 1.0  # in draft tokens

    def choose(self, request_ids: Sequence[str]) -> list[int]:
        length = self.num_spec_tokens
        if request_ids and self.verify_cost.has_seen:
            length = self._best(len(request_ids))
            if self._is_probing(length):
                length = self._probe
        return [length] * len(request_ids)

    def _is_probing(self, best: int) -> bool:
        """Whether to try another length: at intervals, two steps with one draft token more than the
        best number and one less, in turn. In the first step a draft model may still be catching
        up."""
        if best != self._last_best:
            self._last_best = best
            self._probe_interval = self.probe_every
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

    def _best(self, num_requests: int) -> int:
        """The length with the most tokens per ms; among equals the shortest."""
        best = 0
        best_speed = 0.0
        for k in range(self.num_spec_tokens + 1):
            ms = self.verify_cost.predict(num_requests * (1 + k))
            if self.draft_cost.has_seen:
                ms += k * self.draft_cost.predict(num_requests)
            speed = expected_tokens(self.acceptance, k) / max(ms, 1e-9)
            if speed > best_speed * (1 + 1e-9):
                best = k
                best_speed = speed
        return best

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        num_tried = num_accepted + (num_accepted < num_drafted)  # none is tried after a rejection
        if num_tried:
            weight = self.memory * self._weight
            self.acceptance = (weight * self.acceptance + num_accepted) / (weight + num_tried)
            self._weight = weight + num_tried

    def observe_step(
        self, num_requests: int, num_tokens: int, num_rounds: int, verify_ms: float, draft_ms: float
    ) -> None:
        self.verify_cost.observe(num_tokens, verify_ms)
        if num_rounds:
            self.draft_cost.observe(num_requests, draft_ms / num_rounds)
        else:
            self.draft_cost.fade()

    def remove_request(self, request_id: str) -> None:
        """Nothing is kept by request."""
