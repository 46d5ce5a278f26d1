"""What the user gets back."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request. Seconds of `time.monotonic()`; None: not yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    inter_token_latencies: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    finish_detail: str | None = None  # why it could not be longer, where that was not its own limit

    def record_tokens(self, num_new_tokens: int, now: float) -> None:
        """Tokens that arrive together share one latency: the first of them waited, the others did
        not."""
        if num_new_tokens == 0:
            return
        if self.first_token_time is None:
            self.first_token_time = now
        else:
            self.inter_token_latencies.append(now - self.last_token_time)
        self.inter_token_latencies += [0.0] * (num_new_tokens - 1)
        self.last_token_time = now

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that computed any of its tokens."""
        return (
            None
            if self.first_scheduled_time is None
            else self.first_scheduled_time - self.arrival_time
        )

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One continuation. `finish_reason` is None while it runs, then `"stop"`, `"length"`,
    `"abort"`, or `"error"` if the model gave no usable logits (`metrics.finish_detail` says why).

    `stop_reason`: the stop string or stop token id that ended it; None for EOS and for the other
    reasons."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """What a user gets for one prompt: `n` completions. `prompt` is None when token ids were
    given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "metrics"
        )
        return f"RequestOutput({shown})"
