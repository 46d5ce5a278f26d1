"""The visible side of a request while it grows."""

from __future__ import annotations

import pytest

from common.requests.output_processor import (
    OutputProcessor,
    RequestGroup,
    RequestOutput,
)
from request import Request, SamplingParams
from scheduler_interface import EngineCoreOutput

GROUP = RequestGroup("a", None, [5], arrival_time=0.0)
TEXT = "def café(n):\n    return '😀' * n  # naïve\n" * 3


@pytest.fixture
def ids(shipped_tokenizer) -> list[int]:
    return shipped_tokenizer.encode(TEXT)


@pytest.fixture
def processor(shipped_tokenizer) -> OutputProcessor:
    params = SamplingParams(max_tokens=1000, stop=["naïve\ndef"])
    return OutputProcessor(GROUP, Request("a", [5], params), 0, shipped_tokenizer)


def take(processor: OutputProcessor, *token_ids: int, reason: str | None = None, **more) -> bool:
    """As a step does: the scheduler appends, then the processor is told."""
    processor.request.output_token_ids.extend(token_ids)
    return processor.process(EngineCoreOutput("a", list(token_ids), reason, **more), now=0.0)


def test_text_is_right_whenever_it_is_read(processor, ids, shipped_tokenizer) -> None:
    completion = processor.completion
    for n, token in enumerate(ids, 1):
        take(processor, token)
        if processor.is_finished:
            break
        if n % 3:  # not at every step: what was not read is not lost
            processor.decode()
            whole = shipped_tokenizer.decode(ids[:n])
            assert completion.text == whole.rstrip("\ufffd")
    assert completion.text == TEXT[: TEXT.index("naïve\ndef")]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "naïve\ndef")


def test_a_run_is_processed_up_to_the_end_of_a_stop_string_and_no_further(
    shipped_tokenizer, ids
) -> None:
    """The caller that knows the tokens asks for the length and trims (`DraftPlugin`): a token kept
    after a stop string would be counted, and never shown."""

    def make() -> OutputProcessor:
        params = SamplingParams(max_tokens=1000, stop=["naïve\ndef"], logprobs=0)
        return OutputProcessor(GROUP, Request("a", [5], params), 0, shipped_tokenizer)

    processor = make()
    num_wanted = processor.num_wanted(ids)
    assert 1 < num_wanted < len(ids) and processor.completion.token_ids == []
    run = ids[:num_wanted]
    logprobs = [object() for _ in ids[:num_wanted]]
    assert take(processor, *run, logprobs=logprobs)
    assert processor.completion.token_ids == run
    assert processor.completion.logprobs == logprobs
    assert processor.completion.stop_reason == "naïve\ndef"
    with pytest.raises(RuntimeError, match="stop string"):
        take(make(), *ids)
    for num_known in range(1, num_wanted):  # some of them end within a character
        take(processor := make(), *ids[:num_known])
        assert processor.num_wanted(ids[num_known:]) == num_wanted - num_known


def test_an_interrupt_or_a_handler_within_decoding_changes_no_text(
    ids, shipped_tokenizer, monkeypatch
) -> None:
    token_bytes = shipped_tokenizer.token_bytes
    request = Request("a", [5], SamplingParams(max_tokens=1000))
    processor = OutputProcessor(GROUP, request, 0, shipped_tokenizer)
    take(processor, *ids[:4])
    processor.decode()
    take(processor, *ids[4:9])

    def interrupted(*_) -> bytes:
        raise KeyboardInterrupt

    def handled(*arguments) -> bytes:
        monkeypatch.undo()
        processor.decode()  # as a signal handler does that aborts the request
        return token_bytes(*arguments)

    monkeypatch.setattr(shipped_tokenizer, "token_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        processor.decode()
    monkeypatch.setattr(shipped_tokenizer, "token_bytes", handled)
    processor.decode()
    text = shipped_tokenizer.decode(ids[:9]).rstrip("\ufffd")
    assert processor.completion.text == text == processor.take_delta()
    take(processor, ids[9])
    assert processor.take_delta() == shipped_tokenizer.decode(ids[:10])[len(text) :]


# -- metrics and results


def test_latencies_are_the_gaps_between_tokens_of_each_sample(shipped_tokenizer):
    group = RequestGroup("r", None, [5], arrival_time=10.0)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    for i in range(2):
        request = Request(f"r#{i}", [5], params)
        group.sequences.append(OutputProcessor(group, request, i, shipped_tokenizer))
    first, second = group.sequences
    metrics = group.metrics
    assert metrics.queue_time is None and metrics.time_to_first_token is None
    metrics.first_scheduled_time = 11.0

    def step(sequence: OutputProcessor, num_tokens: int, now: float) -> None:
        sequence.request.output_token_ids.extend([7] * num_tokens)
        sequence.process(EngineCoreOutput(sequence.request_id, [7] * num_tokens), now)

    step(first, 0, 12.0)  # a step that computed, and sampled nothing
    assert metrics.first_token_time is None
    step(first, 1, 13.0)
    step(second, 1, 16.0)
    step(first, 3, 17.0)  # three at once: the first waited, the others did not
    step(second, 1, 18.0)
    step(first, 1, 19.0)
    assert metrics.queue_time == 1.0
    assert metrics.time_to_first_token == 3.0
    assert metrics.inter_token_latencies == [4.0, 0.0, 0.0, 2.0, 2.0]
    assert metrics.last_token_time == 19.0
    first.request.num_preemptions = 2
    second.request.num_preemptions = 1
    output = group.output()
    assert output.metrics.num_preemptions == 3 and not output.finished
    assert len(output.outputs[0].text) == 5 * len(shipped_tokenizer.decode([7]))
    assert "metrics" not in repr(RequestOutput("r", "a", [5], [], True, metrics)), "no clocks"
