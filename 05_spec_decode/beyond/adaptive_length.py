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
times or acceptance otherwise. Its decisions depend on a clock; no token does.

The formula: Leviathan et al., arXiv 2211.17192, section 3.3. vLLM (0.33) takes a fixed
number, or one for each range of batch sizes.

See 05_spec_decode/README.md#draft-tokens-in-a-scheduler"""

from __future__ import annotations

from acceptance import expected_tokens
from draft_plugin import FixedLength


class CostLine:
    """`ms = base + slope * size`, fitted to observations by least squares, mostly to recent ones:
    each new observation multiplies the weight of the old ones by `memory`. If only one size was
    seen, the line is flat. Neither `base` nor `slope` is negative."""

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self._sums = [0.0] * 5  # of w, wx, wy, wxx, wxy

    @property
    def has_seen(self) -> bool:
        return self._sums[0] > 0

    def observe(self, size: float, ms: float) -> None:
        if self._sums[0] > 3:
            ms = min(ms, 3 * self.predict(size) or ms)  # another process used the processor
        new = (1.0, size, ms, size * size, size * ms)
        self._sums = [self.memory * s + x for s, x in zip(self._sums, new, strict=True)]

    def predict(self, size: float) -> float:
        w, x, y, xx, xy = self._sums
        spread = w * xx - x * x
        slope = (w * xy - x * y) / spread if spread > 1e-9 * w * xx else 0.0
        slope = min(max(slope, 0.0), y / x)
        return (y - slope * x) / w + slope * size


class AdaptiveLength(FixedLength):
    """Chooses at most `num_spec_tokens`, the same for all requests. `prior` is the acceptance that
    is assumed at first. Another length is tried every `probe_every` steps."""

    def __init__(
        self,
        num_spec_tokens: int,
        *,
        prior: float = 0.7,
        memory: float = 0.98,
        probe_every: int = 64,
    ) -> None:
        super().__init__(num_spec_tokens)
        self.memory = memory
        self.probe_every = probe_every
        self.verify_cost = CostLine(memory)
        self.draft_cost = CostLine(memory)  # of one round
        self.acceptance = prior  # the recent share of accepted draft tokens, among those verified
        self._weight = 1.0  # in draft tokens
        self._num_steps = 0

    def choose(self, num_requests: int) -> int:
        if not num_requests or not self.verify_cost.has_seen:
            return self.num_spec_tokens
        best = self._best(num_requests)
        self._num_steps += 1
        num_probes, step = divmod(self._num_steps, self.probe_every)
        if num_probes == 0 or step > 1:
            return best
        # One draft token more and one less, in turn. In the first of the two steps a draft model
        # may still be catching up.
        is_more = best == 0 or (best < self.num_spec_tokens and num_probes % 2)
        return best + 1 if is_more else best - 1

    def _best(self, num_requests: int) -> int:
        """The length with the most tokens per ms; among equals the shortest."""
        speeds = []
        for k in range(self.num_spec_tokens + 1):
            ms = self.verify_cost.predict(num_requests * (1 + k))
            if self.draft_cost.has_seen:
                ms += k * self.draft_cost.predict(num_requests)
            speeds.append(expected_tokens(self.acceptance, k) / max(ms, 1e-9))
        fast_enough = max(speeds) * (1 - 1e-9)
        return next(k for k, speed in enumerate(speeds) if speed >= fast_enough)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        num_tried = num_accepted + (num_accepted < num_drafted)  # none is tried after a rejection
        weight = self.memory * self._weight
        self.acceptance = (weight * self.acceptance + num_accepted) / (weight + num_tried)
        self._weight = weight + num_tried

    def observe_step(
        self, num_requests: int, num_tokens: int, num_rounds: int, verify_ms: float, draft_ms: float
    ) -> None:
        self.verify_cost.observe(num_tokens, verify_ms)
        if num_rounds:
            self.draft_cost.observe(num_requests, draft_ms / num_rounds)
