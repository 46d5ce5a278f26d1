"""The values that leave the engine's thread, made once per step. Other threads never read a request
that is still growing, so no text is decoded while a step appends to it.

See common/serve/README.md"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.requests.output_processor import OutputProcessor, RequestGroup, RequestMetrics
from common.sampling.distributions import TokenLogprobs


@dataclass(slots=True)
class CompletionDelta:
    """New tokens of one continuation, and the new text that is final. An incomplete character, or
    text that can become a stop string, comes with a later delta."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def extend(self, later: CompletionDelta) -> None:
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is not None:
            self.logprobs += later.logprobs or []
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


@dataclass(slots=True)
class RequestDelta:
    """New output of a request since its previous delta. The first reports acceptance and has the
    prompt; the last has `finished` and `metrics`. `completions` has the continuations with new
    output, by index. `error`: the reason why the request cannot continue; no delta follows it."""

    request_id: str
    completions: dict[int, CompletionDelta] = field(default_factory=dict)
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list | None = None
    num_cached_tokens: int = 0
    finished: bool = False
    metrics: RequestMetrics | None = None
    error: Exception | None = None

    def extend(self, later: RequestDelta) -> None:
        """Merge a later delta into this one, for a slow reader."""
        for index, completion in later.completions.items():
            if index in self.completions:
                self.completions[index].extend(completion)
            else:
                self.completions[index] = completion
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.num_cached_tokens = later.num_cached_tokens
        self.finished = later.finished
        self.metrics = later.metrics
        self.error = later.error


class DeltaSource:
    """Makes the deltas of one request, and tracks the output already sent. Belongs to the engine's
    thread."""

    def __init__(self, group: RequestGroup) -> None:
        self.group = group
        self._num_sent = [0] * len(group.sequences)
        self._is_closed = [False] * len(group.sequences)

    def accepted(self) -> RequestDelta:
        return RequestDelta(self.group.request_id, prompt_token_ids=self.group.prompt_token_ids)

    def take(self) -> RequestDelta:
        group = self.group
        scores = self.group.prompt_logprobs
        delta = RequestDelta(group.request_id, num_cached_tokens=group.num_cached_tokens)
        delta.finished = group.finished
        delta.metrics = group.metrics if group.finished else None
        # One continuation computes the prompt's scores for all. The others, whose prompt is found
        # in the cache, can have output earlier.
        if scores is None or len(scores) == len(group.prompt_token_ids) or group.finished:
            completions = [self._take(i, sequence) for i, sequence in enumerate(group.sequences)]
            delta.completions = {
                completion.index: completion for completion in completions if completion is not None
            }
            delta.prompt_logprobs = scores
        return delta

    def _take(self, i: int, sequence: OutputProcessor) -> CompletionDelta | None:
        completion = sequence.completion
        start = self._num_sent[i]
        is_over = completion.finish_reason is not None
        if self._is_closed[i] or (len(completion.token_ids) == start and not is_over):
            return None
        self._is_closed[i] = is_over
        token_ids = completion.token_ids[start:]
        logprobs = completion.logprobs
        self._num_sent[i] += len(token_ids)
        return CompletionDelta(
            completion.index,
            sequence.take_delta(),
            token_ids,
            None if logprobs is None else logprobs[start:],
            completion.finish_reason,
            completion.stop_reason,
        )
