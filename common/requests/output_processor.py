"""The outputs that users get: token ids become text, for each continuation (`OutputProcessor`) and
for all `n` of a request (`RequestGroup`).

    EngineCoreOutput -> OutputProcessor -> CompletionOutput    one continuation
                        RequestGroup    -> RequestOutput       the `n` continuations of a prompt

The scheduler finishes a request at a token (EOS, a stop token, the last one allowed). A stop
*string* can only be found here, in the text. If a step yields several tokens (chapter 5), those
after a stop string never get here, because `DraftPlugin` calls `num_wanted`.

See common/README.md"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from common.requests.tokenizer import IncrementalDetokenizer, Tokenizer
from request import FINISH_REASONS, Request, RequestStatus, require
from scheduler_interface import EngineCoreOutput

T = TypeVar("T")


@dataclass(slots=True)
class RequestMetrics:
    """The times of a request's events. Seconds of `time.monotonic()`; None: not yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    inter_token_latencies: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    finish_detail: str | None = None  # why it ended, if not by its own limits

    def record_tokens(self, num_new_tokens: int, now: float) -> None:
        """Record a step's tokens. Of tokens that arrive together, the first gets the latency since
        the last token, and the others get 0."""
        if num_new_tokens == 0:
            return
        if self.last_token_time is None:
            self.first_token_time = now
        else:
            self.inter_token_latencies.append(now - self.last_token_time)
        if num_new_tokens > 1:
            self.inter_token_latencies += [0.0] * (num_new_tokens - 1)
        self.last_token_time = now

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that computed any of its tokens."""
        scheduled = self.first_scheduled_time
        return None if scheduled is None else scheduled - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One continuation. `finish_reason` is None while it runs, then `"stop"`, `"length"`,
    `"abort"`, or `"error"` if the model gave no usable logits (`metrics.finish_detail` says why).

    `stop_reason` is the stop string or stop token id that ended it; None for EOS and for the other
    finish reasons."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of its tokens' log-probabilities, or None if they were not requested."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """The output for one prompt: `n` completions. `prompt` is None if it was token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(repr=False)
    num_cached_tokens: int = 0
    prompt_logprobs: list | None = None  # one entry per prompt token; the first is None


class GrowingCompletion(CompletionOutput):
    """A completion whose `text` is decoded and joined only when it is read. At each step, a token
    would cost as much as all tokens before it. A copy is an ordinary completion."""

    __slots__ = ("_text", "source")
    source: OutputProcessor | None  # of the text, until the final text was read

    @property
    def text(self) -> str:
        if self.source is not None:
            text = self.source.read_text()
            if self.finish_reason is None:
                return text
            self.text = text
        return self._text

    @text.setter
    def text(self, text: str) -> None:
        self._text = text
        self.source = None

    def __reduce__(self) -> tuple:
        return CompletionOutput, tuple(getattr(self, f.name) for f in fields(CompletionOutput))


class OutputProcessor:
    """The output side of one `Request`. `completion` is always up to date, and users can keep it;
    its `token_ids` is the request's list. Without a tokenizer, text stays empty and stop strings
    are not allowed. `min_tokens`: stop strings before are text."""

    group: RequestGroup

    def __init__(
        self, request: Request, index: int, tokenizer: Tokenizer | None, min_tokens: int = 0
    ) -> None:
        params = request.sampling_params
        prompt = request.prompt_token_ids
        for name in ("detokenize", "include_stop_str_in_output"):
            value = getattr(params, name)
            require(isinstance(value, bool), name, value, "True or False")
        tokenizer = tokenizer if params.detokenize else None
        if tokenizer is None and params.stop:
            raise ValueError(
                f"stop must be empty without a tokenizer and detokenize=True, got {params.stop!r}"
            )
        self.request = request
        self.request_id = request.request_id
        self.metrics = RequestMetrics(request.arrival_time)
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                prompt,
                params.stop,
                params.skip_special_tokens,
                min_tokens,
                params.include_stop_str_in_output,
            )
        self.looks_for_stop = bool(params.stop)
        logprobs = None if params.logprobs is None else []
        self.completion = GrowingCompletion(index, "", request.output_token_ids, logprobs)
        self.completion.source = self

    @property
    def is_finished(self) -> bool:
        return self.completion.finish_reason is not None

    def process(self, result: EngineCoreOutput, now: float) -> bool:
        """Process one step's tokens. Returns True if a stop string ended the request, which the
        scheduler does not know yet."""
        completion = self.completion
        stop_string = None
        if self.looks_for_stop and self._detokenizer is not None:
            stop_string = self._decode(self._detokenizer, result.finish_reason == "stop")
        if completion.logprobs is not None:
            completion.logprobs += result.logprobs or []
        self.metrics.record_tokens(len(result.new_token_ids), now)
        self.metrics.num_preemptions = self.request.num_preemptions
        if stop_string is not None:
            self._finish("stop", stop_string)
        elif result.finish_reason is not None:
            self.metrics.finish_detail = result.finish_detail
            self._finish(result.finish_reason, result.stop_reason)
        return stop_string is not None

    def num_wanted(self, token_ids: list[int]) -> int:
        """Return how many of these tokens, not yet processed, are up to the end of a stop string,
        or all of them without one."""
        if self._detokenizer is None or not self.looks_for_stop:
            return len(token_ids)
        return self._detokenizer.num_until_stop(token_ids)

    def end(self, status: RequestStatus, detail: str | None) -> None:
        """Finish a request that was aborted or cannot be served; `detail` says why. The tokens
        generated so far are kept."""
        self.metrics.finish_detail = detail
        self._finish(FINISH_REASONS[status])

    def take_delta(self) -> str:
        """Return the text that has become final since the last call."""
        return self._read(lambda detokenizer: detokenizer.take_delta())

    def read_text(self) -> str:
        """Return all text so far. Decodes only the tokens that were not decoded before."""
        return self._read(lambda detokenizer: detokenizer.text)

    def _read(self, getter: Callable[[IncrementalDetokenizer], str]) -> str:
        if self._detokenizer is None:
            return ""
        reason = self.completion.finish_reason
        stop_reason = self.completion.stop_reason
        self._decode(self._detokenizer, reason == "stop" and not isinstance(stop_reason, str))
        if reason is not None:
            self._detokenizer.finish()
        return getter(self._detokenizer)

    def _decode(self, detokenizer: IncrementalDetokenizer, has_stop_token: bool) -> str | None:
        """Decode the tokens that are not text yet, except a last one that stopped the request,
        which has no text unless the output includes stops. Returns the stop string that the last
        decoded token completes, or None."""
        match = None
        token_ids = self.request.output_token_ids
        num_hidden = has_stop_token and not detokenizer.includes_stop
        for token_id in token_ids[detokenizer.num_tokens : len(token_ids) - num_hidden]:
            match = detokenizer.append(token_id)
        return None if match is None else match.stop_string

    def _finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.completion.finish_reason = reason
        self.completion.stop_reason = stop_reason


class RequestGroup(RequestOutput):
    """A user's request while it runs. Each member is one sequence, a `Request` in the scheduler.
    The group is the user's output too: fields are built when they are read, so a step builds
    nothing that is not read. A copy is an ordinary output."""

    __slots__ = ("sequences",)
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other: object) -> bool:
        return self is other

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int]) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.sequences: list[OutputProcessor] = []
        self.outputs = []
        self.prompt_logprobs = None

    def add(self, sequence: OutputProcessor) -> None:
        self.sequences.append(sequence)
        self.outputs.append(sequence.completion)
        sequence.group = self

    @property
    def finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def metrics(self) -> RequestMetrics:
        metrics = [sequence.metrics for sequence in self.sequences]
        return metrics[0] if len(metrics) == 1 else _merge_metrics(metrics)

    @property
    def num_cached_tokens(self) -> int:
        return self.sequences[0].request.num_cached_tokens

    def __reduce__(self) -> tuple:
        return RequestOutput, tuple(getattr(self, f.name) for f in fields(RequestOutput))


def _merge_metrics(metrics: list[RequestMetrics]) -> RequestMetrics:
    """Return a group's metrics: the earliest first times, the latest last one, all latencies."""

    def known(name: str) -> list:
        return [value for m in metrics if (value := getattr(m, name)) is not None]

    return RequestMetrics(
        metrics[0].arrival_time,
        min(known("first_scheduled_time"), default=None),
        min(known("first_token_time"), default=None),
        max(known("last_token_time"), default=None),
        [t for m in metrics for t in m.inter_token_latencies],
        sum(m.num_preemptions for m in metrics),
        next(iter(known("finish_detail")), None),
    )


def spread(name: str, given: Any, num_prompts: int, kind: type[T]) -> list[T]:
    """Return one entry for each prompt; `given` is one for all, None, or a sequence with one for
    each. Raises `ValueError` if the sequence has another length."""
    if given is None or isinstance(given, kind):
        return [given] * num_prompts  # pyright: ignore[reportReturnType]
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ValueError(f"{name} must be a {kind.__name__}, or one for each prompt, got {given!r}")
    if len(given) != num_prompts:
        raise ValueError(
            f"{name} must have one entry, or one for each of the {num_prompts} prompts, got "
            f"{len(given)}"
        )
    return list(given)
