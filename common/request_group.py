"""What a user asked for in one call: `n` sequences that share a prompt, and their output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.output_processor import OutputProcessor
from request import RequestMetrics, RequestOutput, SamplingParams


@dataclass(eq=False, slots=True)
class RequestGroup:
    """A user's request. Each member is one sequence, a `Request` to the scheduler."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    members: list[OutputProcessor] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return all(member.is_finished for member in self.members)

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[member.completion for member in self.members],
            finished=self.is_finished,
            metrics=_merge_metrics([member.metrics for member in self.members]),
            num_cached_tokens=self.members[0].request.num_cached_tokens,
        )


def _merge_metrics(metrics: list[RequestMetrics]) -> RequestMetrics:
    """Of a group: the earliest first time, the latest last one, and all latencies."""
    if len(metrics) == 1:
        return metrics[0]

    def times(name: str) -> list[float]:
        return [t for m in metrics if (t := getattr(m, name)) is not None]

    return RequestMetrics(
        arrival_time=metrics[0].arrival_time,
        first_scheduled_time=min(times("first_scheduled_time"), default=None),
        first_token_time=min(times("first_token_time"), default=None),
        last_token_time=max(times("last_token_time"), default=None),
        inter_token_latencies=[t for m in metrics for t in m.inter_token_latencies],
        num_preemptions=sum(m.num_preemptions for m in metrics),
        finish_detail=next((m.finish_detail for m in metrics if m.finish_detail), None),
    )


def spread_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One `SamplingParams` for each prompt. Raises `ValueError` if there are more or fewer."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    params = list(params)
    if len(params) != num_prompts:
        raise ValueError(
            f"sampling_params holds {len(params)} entries: give one, or one for each of the "
            f"{num_prompts} prompts"
        )
    return params
