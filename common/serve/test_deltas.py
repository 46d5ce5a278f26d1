"""Deltas of a growing request: each token and text once, and no text before it is complete."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.requests.output_processor import CompletionOutput, RequestMetrics
from common.serve.deltas import CompletionDelta, DeltaSource, RequestDelta


class Growing:
    """A request of two continuations, and what the engine makes of it."""

    def __init__(self, **fields: Any) -> None:
        self.texts = ["", ""]
        self.own = [CompletionOutput(i, "", [], []) for i in range(2)]
        members = [
            SimpleNamespace(completion=one, take_delta=lambda i=i: self._take_text(i))
            for i, one in enumerate(self.own)
        ]
        self.group = SimpleNamespace(
            request_id="x",
            sequences=members,
            prompt_token_ids=[7, 8, 9],
            prompt_logprobs=None,
            num_cached_tokens=2,
            finished=False,
            metrics=RequestMetrics(1.0),
        )
        vars(self.group).update(fields)
        self.source = DeltaSource(self.group)  # pyright: ignore[reportArgumentType]

    def _take_text(self, i: int) -> str:
        text, self.texts[i] = self.texts[i], ""
        return text

    def grow(
        self, i: int, token_id: int, reason: str | None = None, stop_reason: Any = None
    ) -> None:
        one = self.own[i]
        one.token_ids.append(token_id)
        assert one.logprobs is not None
        one.logprobs.append(float(token_id))
        self.texts[i] += str(token_id)
        one.finish_reason, one.stop_reason = reason, stop_reason


def test_each_token_is_handed_over_once_and_so_is_each_end() -> None:
    request = Growing()
    first = request.source.accepted()
    assert first.prompt_token_ids == [7, 8, 9] and not first.completions and not first.finished
    for token_id in (3, 4):
        request.grow(0, token_id)
    delta = request.source.take()
    assert delta.completions == {0: CompletionDelta(0, "34", [3, 4], [3.0, 4.0])}
    assert not delta.finished and delta.metrics is None and delta.num_cached_tokens == 2
    request.grow(0, 5, "stop", "5")
    request.grow(1, 6)
    assert request.source.take().completions == {
        0: CompletionDelta(0, "5", [5], [5.0], "stop", "5"),
        1: CompletionDelta(1, "6", [6], [6.0]),
    }
    assert request.source.take().completions == {}
    request.own[1].finish_reason, request.group.finished = "error", True  # without a token
    delta = request.source.take()
    assert delta.completions == {1: CompletionDelta(1, "", [], [], "error")}
    assert delta.finished and delta.metrics is request.group.metrics


def test_a_continuation_waits_for_the_prompts_scores() -> None:
    """The first one computes them for all. Another, found in the cache, has a token before that."""
    request = Growing(prompt_logprobs=[None, 1.0])
    request.grow(1, 6)
    assert request.source.take().completions == {}
    request.group.prompt_logprobs.append(2.0)
    request.grow(0, 5)
    delta = request.source.take()
    assert set(delta.completions) == {0, 1} and delta.prompt_logprobs == [None, 1.0, 2.0]
    request = Growing(prompt_logprobs=[None])
    request.grow(0, 5, "abort")
    request.group.finished = True
    assert request.source.take().completions[0].finish_reason == "abort", "however it ends"


@pytest.mark.parametrize("last", [True, False])
def test_joined_deltas_keep_the_fields_of_both(last: bool) -> None:
    scores, times = [None, 1.0], RequestMetrics(1.0)
    total = RequestDelta("x", {0: CompletionDelta(0, "a", [1], [0.5])}, [7], scores)
    error = ValueError("no")
    later = {0: CompletionDelta(0, "b", [2], [0.25], "stop", 2), 1: CompletionDelta(1, "c", [3])}
    total.extend(RequestDelta("x", later, None, None, 5, last, times, error))
    joined = {0: CompletionDelta(0, "ab", [1, 2], [0.5, 0.25], "stop", 2), 1: later[1]}
    assert total == RequestDelta("x", joined, [7], scores, 5, last, times, error)
    total = RequestDelta("x", {}, [7])
    total.extend(RequestDelta("x", {}, None, scores))
    assert total.prompt_logprobs is scores
