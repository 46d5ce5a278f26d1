"""From token ids back to text, for one continuation: detokenise, find stop strings, collect
log-probabilities.

The scheduler ends a request at a token (EOS, a stop token, the last one allowed). A stop *string*
can only be seen here, in the text. Tokens are taken one at a time, so the earliest event decides
how a request ended and where text, token ids and log-probabilities are cut, even when a step yields
several tokens (chapter 5)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from common.tokenizer import IncrementalDetokenizer, Tokenizer
from request import CompletionOutput, Request, RequestMetrics
from scheduler_interface import EngineCoreOutput


class GrowingCompletion(CompletionOutput):
    """A completion whose `text` is joined when somebody reads it: joined at each step, a token
    would cost as much as all tokens before it. A copy of it is an ordinary completion."""

    __slots__ = ("_detokenizer", "_text")

    def __init__(
        self, *values: Any, detokenizer: IncrementalDetokenizer | None = None, **named: Any
    ) -> None:
        super().__init__(*values, **named)
        self._detokenizer = detokenizer

    @property
    def text(self) -> str:
        return self._text if self._detokenizer is None else self._detokenizer.text

    @text.setter
    def text(self, text: str) -> None:
        self._text, self._detokenizer = text, None

    def __reduce__(self) -> tuple:
        return CompletionOutput, tuple(getattr(self, f.name) for f in fields(CompletionOutput))


class OutputProcessor:
    """The visible side of one `Request`. `completion` is always up to date and is the user's to
    keep.

    Without a tokenizer, text stays empty and stop strings cannot be asked for.
    """

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None) -> None:
        params = request.sampling_params
        if tokenizer is None and params.stop:
            raise ValueError(f"stop is {params.stop!r}: stop strings need a tokenizer")
        self.request = request
        self.metrics = RequestMetrics(request.arrival_time)
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                request.prompt_token_ids,
                stop=params.stop,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
        logprobs = None if params.logprobs is None else []
        self.completion = GrowingCompletion(index, "", [], logprobs, detokenizer=self._detokenizer)

    @property
    def is_finished(self) -> bool:
        return self.completion.finish_reason is not None

    def process(self, result: EngineCoreOutput, now: float) -> bool:
        """Take one step's tokens. True if a stop string ended the request, which the scheduler does
        not know yet."""
        num_kept, matched = self._detokenise(result)
        completion = self.completion
        completion.token_ids += result.new_token_ids[:num_kept]
        if completion.logprobs is not None:
            completion.logprobs += (result.logprobs or [])[:num_kept]
        self.metrics.record_tokens(num_kept, now)
        self.metrics.num_preemptions = self.request.num_preemptions
        if matched is None:
            self.metrics.finish_detail = result.finish_detail
        if matched is not None:
            completion.finish_reason, completion.stop_reason = "stop", matched
        else:
            completion.finish_reason, completion.stop_reason = (
                result.finish_reason,
                result.stop_reason,
            )
        self._finish_text()
        return matched is not None

    def num_wanted(self, token_ids: list[int]) -> int:
        """How many tokens of a run that is not processed yet come before a stop string's end."""
        if self._detokenizer is None or not self.request.sampling_params.stop:
            return len(token_ids)
        return self._detokenizer.num_until_stop(token_ids)

    def abort(self) -> None:
        """The user or the engine ended it. What has been generated stays."""
        self.completion.finish_reason = "abort"
        self._finish_text()

    def take_delta(self) -> str:
        """Text that has become final since the last call."""
        return "" if self._detokenizer is None else self._detokenizer.take_delta()

    def _detokenise(self, result: EngineCoreOutput) -> tuple[int, str | None]:
        """`(tokens kept, stop string found)`. The token that stopped the request has no text."""
        num_new = len(result.new_token_ids)
        if self._detokenizer is None:
            return num_new, None
        num_visible = num_new - (result.finish_reason == "stop")
        for i, token_id in enumerate(result.new_token_ids[:num_visible]):
            match = self._detokenizer.append(token_id)
            if match is not None:
                return i + 1, match.stop_string
        return num_new, None

    def _finish_text(self) -> None:
        if self._detokenizer is not None and self.is_finished:
            self._detokenizer.finish()
            self.completion.text = self._detokenizer.text
