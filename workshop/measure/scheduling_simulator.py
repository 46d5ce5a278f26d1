"""A clock instead of a model: the effect of a scheduler on its users, simulated in a second.

The scheduler is real, its KV manager and prefix cache too; only the forward pass is replaced by the
time that it would have taken:

    step time = base + per_token * tokens computed + per_request * requests
                     + per_context * positions that attention reads

`fit_cost_model` finds the four numbers from measured steps, so a simulation represents one machine
and one model. Costs outside the formula are not simulated: cache misses of the processor, the
variation of the sampler, the cost of the scheduler itself. Results are labelled simulated wherever
they are shown.

Requests end where their workload says, usually long before `max_tokens`, as real ones do; the
scheduler does not know where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from base_scheduler import BaseScheduler
from request import Request, SamplingParams
from scheduler_interface import SchedulerOutput, StepOutput

NUM_IDLE_STEPS = 5  # in a row, with unfinished requests: the scheduler is stuck
STOP, GO_ON = 0, 1  # the only two tokens that are sampled here


@dataclass(frozen=True, slots=True)
class CostModel:
    """The coefficients of a step's time, in milliseconds."""

    base_ms: float
    per_token_ms: float
    per_request_ms: float
    per_context_ms: float

    def step_ms(self, num_tokens: int, num_requests: int, num_context: int) -> float:
        return (
            self.base_ms
            + self.per_token_ms * num_tokens
            + self.per_request_ms * num_requests
            + self.per_context_ms * num_context
        )


def fit_cost_model(steps: Sequence[tuple[int, int, int, float]]) -> tuple[CostModel, float]:
    """Fit `(tokens, requests, context positions, milliseconds)` of measured steps. Returns the
    model and the median relative error of its predictions. No number is negative. Least squares of
    the relative error, so that short steps count as much as long ones."""
    rows = np.array([(1, *step[:3]) for step in steps], dtype=float)
    times = np.array([step[3] for step in steps])
    relative = rows / times[:, None]
    values = solve_not_negative(relative.T @ relative, relative.sum(axis=0), ridge=1e-12)
    error = float(np.median(np.abs(rows @ values / times - 1)))
    return CostModel(*map(float, values)), error


def solve_not_negative(gram: np.ndarray, target: np.ndarray, *, ridge: float) -> np.ndarray:
    """Solve least squares from its normal equations, `gram @ coefficients = target`, without
    negative coefficients: while there are any, the most negative one is left out. With a `ridge`,
    features that never varied share their explanation."""
    size = np.sqrt(np.maximum(gram.diagonal(), 1e-300))
    scaled = gram / np.outer(size, size)
    scaled_target = target / size
    kept = list(range(len(target)))
    solution = np.zeros(len(target))
    while kept:
        part = scaled[np.ix_(kept, kept)] + ridge * np.eye(len(kept))
        found = np.linalg.solve(part, scaled_target[kept])
        worst = int(found.argmin())
        if found[worst] >= 0:
            solution[kept] = found
            break
        del kept[worst]
    return solution / size


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """Arrives at `arrival_s` and produces `num_outputs` tokens, of at most `max_tokens`."""

    arrival_s: float
    prompt_token_ids: list[int]
    num_outputs: int
    max_tokens: int
    priority: int = 0


@dataclass(slots=True)
class SimulatedStep:
    end_s: float
    num_tokens: int
    num_running: int
    num_waiting: int
    num_preempted: int
    kv_tokens_written: int


@dataclass(slots=True)
class Simulation:
    """The result of a simulation. `token_times_s[i]` are the times of request i's tokens."""

    requests: list[SimulatedRequest]
    token_times_s: list[list[float]]
    steps: list[SimulatedStep] = field(default_factory=list)

    @property
    def ttft_s(self) -> list[float]:
        """Seconds from arrival to the first token."""
        both = zip(self.requests, self.token_times_s, strict=True)
        return [times[0] - request.arrival_s for request, times in both]

    @property
    def itl_s(self) -> list[float]:
        """Seconds between two tokens of one request, all of them."""
        return [b - a for times in self.token_times_s for a, b in pairwise(times)]

    @property
    def throughput(self) -> float:
        """Output tokens a second, from the first arrival to the last token."""
        start = min(request.arrival_s for request in self.requests)
        end = max(times[-1] for times in self.token_times_s)
        return sum(map(len, self.token_times_s)) / (end - start)

    def goodput(self, max_ttft_s: float, max_itl_s: float) -> float:
        """Return the share of requests whose first token came within `max_ttft_s`, and whose tokens
        then came at most `max_itl_s` apart, on average."""
        num_good = 0
        for first_s, times in zip(self.ttft_s, self.token_times_s, strict=True):
            mean_s = (times[-1] - times[0]) / max(1, len(times) - 1)
            num_good += first_s <= max_ttft_s and mean_s <= max_itl_s
        return num_good / len(self.requests)


def simulate(
    scheduler: BaseScheduler, requests: Sequence[SimulatedRequest], cost_model: CostModel
) -> Simulation:
    """Serve `requests`, which arrive in order, to their ends. Raises `RuntimeError` if the
    scheduler is stuck."""
    result = Simulation(list(requests), [[] for _ in requests])
    clock_s, num_arrived = 0.0, 0
    while num_arrived < len(requests) or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
            clock_s = max(clock_s, requests[num_arrived].arrival_s)
        while num_arrived < len(requests) and requests[num_arrived].arrival_s <= clock_s:
            scheduler.add_request(_to_request(num_arrived, requests[num_arrived]))
            num_arrived += 1
        output = scheduler.schedule()
        clock_s += _step_ms(output, cost_model) / 1e3
        written = sum(r.num_computed_tokens for r in output.scheduled_requests)
        for done in scheduler.update_from_output(output, _sample(output, requests)):
            result.token_times_s[int(done.request_id)] += [clock_s] * len(done.new_token_ids)
        result.steps.append(
            SimulatedStep(
                clock_s,
                output.total_num_scheduled_tokens,
                len(output.num_scheduled_tokens),
                scheduler.get_request_counts()[1],
                len(output.preempted_requests),
                written,
            )
        )
        last = result.steps[-NUM_IDLE_STEPS:]
        is_idle = all(step.num_tokens == step.num_preempted == 0 for step in last)
        if is_idle and len(last) == NUM_IDLE_STEPS:
            raise RuntimeError(f"no progress: {scheduler.get_request_counts()}")
    return result


def _to_request(index: int, simulated: SimulatedRequest) -> Request:
    params = SamplingParams(
        temperature=0, max_tokens=simulated.max_tokens, stop_token_ids=[STOP], ignore_eos=True
    )
    how = {"arrival_time": simulated.arrival_s, "priority": simulated.priority}
    return Request(str(index), simulated.prompt_token_ids, params, **how)


def _step_ms(output: SchedulerOutput, cost_model: CostModel) -> float:
    if output.is_empty:
        return 0.0
    requests = output.scheduled_requests
    context = sum(request.num_computed_tokens for request in requests)
    return cost_model.step_ms(output.total_num_scheduled_tokens, len(requests), context)


def _sample(output: SchedulerOutput, requests: Sequence[SimulatedRequest]) -> StepOutput:
    """Sample one token for each request whose last known token was in the step."""
    sampled = StepOutput()
    for request in output.scheduled_requests:
        if request.num_computed_tokens == request.num_tokens:
            num_outputs = requests[int(request.request_id)].num_outputs
            is_last = request.num_output_tokens + 1 == num_outputs
            sampled.token_ids[request.request_id] = [STOP if is_last else GO_ON]
    return sampled
