"""The outputs that users get: token ids become text, for each continuation (`OutputProcessor`) and
for all `n` of a request (`RequestGroup`).

    EngineCoreOutput -> OutputProcessor -> CompletionOutput    one continuation
                        RequestGroup    -> RequestOutput       the `n` continuations of a prompt

The scheduler finishes a request at a token (EOS, a stop token, the last one allowed). A stop
*string* can only be found here, in the text. If a step yields several tokens (chapter 5), those
after a stop string never get here, because `DraftPlugin` calls `num_wanted`.

See common/README.md"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from common.requests.tokenizer import IncrementalDetokenizer, Tokenizer
from request import FINISH_REASONS, Request, RequestStatus
from scheduler_interface import EngineCoreOutput

T = TypeVar("T")


@dataclass(slots=True)
class RequestMetrics:
    """The times of a request's events, of all its `n` samples together. Seconds of
    `time.monotonic()`; None: not yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    inter_token_latencies: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    finish_detail: str | None = None  # why it ended, if not by its own limits

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


class OutputProcessor:
    """The output side of one `Request`. `completion` grows with it: its `token_ids` is the
    request's list, and `decode` brings its text up to date. Without a tokenizer, text stays empty
    and stop strings are not allowed. `min_tokens`: stop strings before are text. `metrics` are
    those of the whole group."""

    group: RequestGroup

    def __init__(
        self,
        request: Request,
        index: int,
        tokenizer: Tokenizer | None,
        metrics: RequestMetrics,
        min_tokens: int = 0,
    ) -> None:
        params = request.sampling_params
        tokenizer = tokenizer if params.detokenize else None
        if tokenizer is None and params.stop:
            raise ValueError(
                f"stop must be empty without a tokenizer and detokenize=True, got {params.stop!r}"
            )
        self.request = request
        self.request_id = request.request_id
        self.metrics = metrics
        self._last_token_time: float | None = None
        self._detokenizer = None
        if tokenizer is not None:
            self._begin = partial(
                IncrementalDetokenizer,
                tokenizer,
                request.prompt_token_ids,
                params.stop,
                params.skip_special_tokens,
                min_tokens,
                params.include_stop_str_in_output,
            )
            self._detokenizer = self._begin()
        self._is_decoding = False  # True: or a call was interrupted
        self.looks_for_stop = bool(params.stop)
        logprobs = None if params.logprobs is None else []
        self.completion = CompletionOutput(index, "", request.output_token_ids, logprobs)

    @property
    def is_finished(self) -> bool:
        return self.completion.finish_reason is not None

    def process(self, result: EngineCoreOutput, now: float) -> bool:
        """Process one step's tokens. Returns True if a stop string ended the request, which the
        scheduler does not know yet."""
        stop_string = None
        if self.looks_for_stop:
            stop_string = self.decode(result.finish_reason == "stop")
        if self.completion.logprobs is not None:
            self.completion.logprobs += result.logprobs or []
        if result.new_token_ids:
            self._record_tokens(len(result.new_token_ids), now)
        if stop_string is not None:
            self._finish("stop", stop_string)
        elif result.finish_reason is not None:
            self._finish(result.finish_reason, result.stop_reason, result.finish_detail)
        return stop_string is not None

    def _record_tokens(self, num_new_tokens: int, now: float) -> None:
        """Record a step's tokens. Of tokens that arrive together, the first gets the latency since
        the last token, and the others get 0."""
        metrics = self.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        if self._last_token_time is not None:
            metrics.inter_token_latencies.append(now - self._last_token_time)
        metrics.inter_token_latencies += [0.0] * (num_new_tokens - 1)
        self._last_token_time = now
        metrics.last_token_time = now

    def num_wanted(self, token_ids: list[int]) -> int:
        """Return how many of these tokens, not yet processed, are up to the end of a stop string,
        or all of them without one."""
        if self._detokenizer is None or not self.looks_for_stop:
            return len(token_ids)
        return self._detokenizer.num_until_stop(token_ids)

    def end(self, status: RequestStatus, detail: str | None) -> None:
        """Finish a request that was aborted or cannot be served; `detail` says why. The tokens
        generated so far are kept."""
        self._finish(FINISH_REASONS[status], detail=detail)

    def take_delta(self) -> str:
        """Return the text that has become final since the last call."""
        self.decode()
        return "" if self._detokenizer is None else self._detokenizer.take_delta()

    def decode(self, has_stop_token: bool | None = None) -> str | None:
        """Decode the tokens that are not text yet, except a last one that stopped the request,
        which has no text unless the output includes stops. Returns the stop string that the last
        decoded token completes, or None. Decodes all again if the call before was interrupted, or
        is the one that this call is made from, by a signal handler."""
        if self._detokenizer is None:
            return None
        if self._is_decoding:
            num_sent = self._detokenizer.num_sent
            self._detokenizer = self._begin()
            self._detokenizer.num_sent = num_sent
        self._is_decoding = True
        detokenizer = self._detokenizer
        completion = self.completion
        if has_stop_token is None:
            is_string = isinstance(completion.stop_reason, str)
            has_stop_token = completion.finish_reason == "stop" and not is_string
        token_ids = completion.token_ids
        num_hidden = has_stop_token and not detokenizer.includes_stop
        stop_string = None
        for token_id in token_ids[detokenizer.num_tokens : len(token_ids) - num_hidden]:
            stop_string = detokenizer.append(token_id)
        if self.is_finished:
            detokenizer.finish()
        completion.text = detokenizer.text
        self._is_decoding = False
        return stop_string

    def _finish(
        self, reason: str, stop_reason: int | str | None = None, detail: str | None = None
    ) -> None:
        if detail is not None:
            self.metrics.finish_detail = detail
        self.completion.finish_reason = reason
        self.completion.stop_reason = stop_reason


class RequestGroup:
    """A user's request while it runs. Each of its sequences is a `Request` in the scheduler.
    `is_returned`: `LLMEngine.step` returns its output."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], arrival_time: float
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs: list | None = None
        self.metrics = RequestMetrics(arrival_time)
        self.sequences: list[OutputProcessor] = []
        self.is_returned = True

    def add(self, sequence: OutputProcessor) -> None:
        self.sequences.append(sequence)
        sequence.group = self

    @property
    def finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def num_cached_tokens(self) -> int:
        return self.sequences[0].request.num_cached_tokens

    def output(self) -> RequestOutput:
        """Return the output so far. Its completions and metrics are extended by later steps."""
        for sequence in self.sequences:
            sequence.decode()
        requests = [sequence.request for sequence in self.sequences]
        self.metrics.num_preemptions = sum(request.num_preemptions for request in requests)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sequence.completion for sequence in self.sequences],
            finished=self.finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs,
        )


def spread(name: str, given: Any, num_prompts: int, kind: type[T]) -> list[T]:
    """Return one entry for each prompt; `given` is one for all, None, or a sequence with one for
    each. Raises `ValueError` if the sequence has another length."""
    if given is None or isinstance(given, kind):
        return [given] * num_prompts  # pyright: ignore[reportReturnType]
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ValueError(f"{name} must be a {kind.__name__}, or one for each prompt, got {given!r}")
    if len(given) != num_prompts:
        raise ValueError(f"{name} must be one for each of {num_prompts} prompts, got {len(given)}")
    return list(given)
