"""`AsyncLLM` without HTTP: its outputs are those of `generate`, and a disconnect leaves no
state."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from common.engine import LLMEngine
from common.engine_config import SHIPPED_ADAPTER, EngineStats
from common.features.adapters import adapter_slots
from common.llm import LLM, SamplingParams
from common.serve import async_llm
from common.serve.async_llm import (
    COUNTED_BYTES,
    MAX_DELTAS_PER_TURN,
    AsyncLLM,
    EngineError,
    Mailbox,
    PromptTooLong,
    QueueFull,
)
from common.serve.conftest import SMALL, fail_next, is_idle
from common.serve.deltas import CompletionDelta, EngineUpdate, RequestDelta
from common.serve.engine_loop import EngineStopped

PROMPT = "def fibonacci(n):\n    if n"
FEW, LONG = SamplingParams(max_tokens=2), SamplingParams(max_tokens=1000, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(**SMALL)
    yield llm
    llm.close()


async def whole(
    llm: AsyncLLM, prompt: str | list[int], params: SamplingParams = FEW
) -> RequestDelta:
    total = None
    async for delta in llm.generate(prompt, params):
        if total is None:
            assert delta.prompt_token_ids is not None, "the first has the prompt"
            total = delta
        else:
            assert delta.prompt_token_ids is None
            total.extend(delta)
    assert total is not None
    return total


async def begun(llm: AsyncLLM, prompt: Any = (5, 6), **options: Any) -> Any:
    """Return the deltas of a long request, after the first one."""
    request = llm.generate(prompt, LONG, **options)
    await anext(request)
    return request


async def is_clean(llm: AsyncLLM) -> bool:
    for _ in range(2000):
        if await llm.call(is_idle):
            return llm.num_unfinished == 0
        await asyncio.sleep(0.005)
    return False


async def test_a_request_without_parameters_takes_the_models(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    monkeypatch.setattr(llm, "default_sampling_params", params)
    deltas = [delta async for delta in llm.generate(PROMPT)]
    assert sum(len(c.token_ids) for delta in deltas for c in delta.completions.values()) == 3


async def test_joined_deltas_equal_generate(llm: AsyncLLM, alone: LLM) -> None:
    each = [
        SamplingParams(temperature=0, max_tokens=20, logprobs=2, prompt_logprobs=1),
        SamplingParams(n=3, seed=5, max_tokens=12),
        SamplingParams(temperature=0, max_tokens=40, stop=["return", "n -"]),
        SamplingParams(temperature=0, max_tokens=9, detokenize=False),
        SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[*range(300, 600)]),
        SamplingParams(max_tokens=20, seed=1, temperature=2.0, min_p=0.01),
    ]
    expected = alone.generate([PROMPT] * len(each), each, use_tqdm=False)
    totals = await asyncio.gather(*(whole(llm, PROMPT, params) for params in each))
    for total, output in zip(totals, expected, strict=True):
        assert total.finished and total.metrics is not None
        assert total.prompt_token_ids == output.prompt_token_ids
        assert total.num_cached_tokens <= len(output.prompt_token_ids)
        assert (total.prompt_logprobs is None) == (output.prompt_logprobs is None)
        if output.prompt_logprobs is not None and total.prompt_logprobs is not None:
            assert total.prompt_logprobs[0] is None and len(total.prompt_logprobs) == len(
                output.prompt_logprobs
            )
        for completion in output.outputs:
            part = total.completions[completion.index]
            for name in ("text", "token_ids", "finish_reason", "stop_reason"):
                assert getattr(part, name) == getattr(completion, name), name
            if completion.logprobs is not None:
                assert part.logprobs is not None
                token_logprobs = [entry.logprob for entry in part.logprobs]
                assert token_logprobs == pytest.approx(
                    [entry.logprob for entry in completion.logprobs]
                )


@pytest.mark.parametrize(
    "settings",
    [
        dict(overlap_scheduling=True),
        dict(speculative={"method": "ngram"}, prefix_cache="radix", preempt_every=4),
        pytest.param(dict(tensor_parallel_size=2), marks=pytest.mark.slow),
    ],
    ids=["overlap", "guesses", "ranks"],
)
async def test_engines_of_every_kind_live_in_a_thread(settings: dict, alone: LLM) -> None:
    prompts = [f"{PROMPT} == {i}" for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = [o.outputs[0].token_ids for o in alone.generate(prompts, params, use_tqdm=False)]
    llm = await asyncio.to_thread(lambda: AsyncLLM(**(SMALL | settings)))
    try:
        leaving = await begun(llm, "x")
        totals = await asyncio.gather(*(whole(llm, p, params) for p in prompts))
        await leaving.aclose()
        assert await is_clean(llm)
    finally:
        await asyncio.to_thread(llm.close)
    assert [total.completions[0].token_ids for total in totals] == expected


async def test_a_step_hands_over_once(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    received, receive = list[object](), llm._receive
    recording = lambda engine_update: received.append(engine_update) or receive(engine_update)  # noqa: E731
    monkeypatch.setattr(llm, "_receive", recording)
    steps = (await llm.call(LLMEngine.stats)).num_steps
    received.clear()
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    await asyncio.gather(*(whole(llm, [5 + i, 6], params) for i in range(20)))
    num_handed_over = len(received)
    num_steps = (await llm.call(LLMEngine.stats)).num_steps - steps
    assert num_handed_over <= num_steps + 1 < 20 * 10  # the call's own answer may be one


async def test_what_is_refused_says_why(llm: AsyncLLM) -> None:
    bad = SamplingParams(stop="x", detokenize=False)
    refused: list[tuple[Any, SamplingParams, str]] = [
        ([1] * 5000, FEW, "max_model_len"),
        ([10**9], FEW, "prompt must be token ids"),
        ([], FEW, "at least one token"),
        ("\ud800", FEW, "surrogate"),
        ("x", bad, "detokenize"),
    ]
    for prompt, params, says in refused:
        with pytest.raises(ValueError, match=says):
            await asyncio.wait_for(whole(llm, prompt, params), 10)
    assert await is_clean(llm)


async def test_queue_time_includes_the_wait_for_the_step_that_runs(llm: AsyncLLM) -> None:
    step = asyncio.ensure_future(llm.call(lambda _: time.sleep(0.2)))
    await asyncio.sleep(0)
    metrics = (await whole(llm, PROMPT)).metrics
    await step
    assert metrics is not None and metrics.queue_time is not None and metrics.queue_time > 0.15


async def test_nobody_is_computed_for_who_has_left(llm: AsyncLLM) -> None:
    """Trap 68."""
    await (await begun(llm)).aclose()
    assert await llm.call(lambda engine: engine.core.get_request_counts()) == (0, 0)
    # Routers read the numbers, and the next request may come an hour later.
    for _ in range(500):
        if not (llm.stats.num_running or llm.stats.kv_blocks_in_use):
            break
        await asyncio.sleep(0.01)
    assert llm.stats.num_running == llm.stats.kv_blocks_in_use == 0


async def test_a_disconnect_leaves_no_state(llm: AsyncLLM) -> None:
    """Cancelled at random moments, aborted, left early; others are not touched."""
    rng = random.Random(3)

    async def left_early() -> None:
        async for delta in llm.generate(PROMPT, LONG):
            if delta.completions:
                return

    async def aborted(name: str) -> None:
        with pytest.raises(EngineError, match="aborted"):
            async for delta in llm.generate(PROMPT, LONG, request_id=name):
                if delta.completions:
                    await llm.abort(name)

    async def cancelled() -> None:
        task = asyncio.ensure_future(whole(llm, PROMPT, LONG))
        await asyncio.sleep(rng.random() * 0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    kept = asyncio.ensure_future(whole(llm, PROMPT, SamplingParams(temperature=0, max_tokens=30)))
    leaving = [left_early() for _ in range(5)] + [aborted(f"a{i}") for i in range(5)]
    await asyncio.gather(*leaving, *(cancelled() for _ in range(10)))
    assert len((await kept).completions[0].token_ids) == 30
    assert await is_clean(llm)


async def test_a_name_may_come_again_at_once(llm: AsyncLLM) -> None:
    """A result in flight of the aborted request does not go to the next one."""
    first = await begun(llm, [7] * 9, request_id="mine")
    with pytest.raises(ValueError, match="mine"):
        await anext(llm.generate("x", request_id="mine"))
    await first.aclose()
    total = RequestDelta("mine")
    async for delta in llm.generate([5, 6], SamplingParams(max_tokens=3), request_id="mine"):
        total.extend(delta)
    assert total.request_id == "mine" and len(total.completions[0].token_ids) <= 3


async def test_many_deltas_do_not_block_the_loop(llm: AsyncLLM) -> None:
    """Deltas are given out in batches, in order. A mailbox joins unread ones."""
    other = AsyncLLM.__new__(AsyncLLM)
    other.__dict__ |= llm.__dict__ | {"_loop": asyncio.get_running_loop()}
    other._given, other._mailboxes = type(llm._given)(), {}
    for i in range(1000):
        other._mailboxes[str(i)] = Mailbox()
    for k in (0, 1):
        parts = [CompletionDelta(0, str(k), [k]) for _ in range(1000)]
        deltas = [RequestDelta(str(i), {0: part}) for i, part in enumerate(parts)]
        other._receive(EngineUpdate(deltas, EngineStats()))
    num_turns = 0
    while other._given:
        num_turns += 1
        await asyncio.sleep(0)
    for box in other._mailboxes.values():
        assert (await box.take()).completions[0] == CompletionDelta(0, "01", [0, 1])
    assert num_turns >= 2000 // MAX_DELTAS_PER_TURN - 1


async def test_a_long_prompt_delays_no_other_request(llm: AsyncLLM) -> None:
    """Not even by Python's lock."""
    text, num_turns = "x = 1\n" * 15_000, 0
    task = asyncio.ensure_future(llm.encode(text))
    while not task.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert task.result() == llm.tokenizer.encode(text) and num_turns > 5


async def test_a_text_that_cannot_fit_is_refused_before_its_tokens_are_counted(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 MB of text took a core a minute. More is counted where it is cut, or only counted."""
    tokenized, max_chars = list[int](), int(llm._max_token_bytes) * (llm.max_model_len - 1)

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        tokenized.append(len(text))
        return [5]

    monkeypatch.setattr(llm.tokenizer, "encode", encode)
    monkeypatch.setattr(async_llm, "LONG_TEXT", 1 << 30)
    cut = SamplingParams(max_tokens=1, truncate_prompt_tokens=9)
    for refused in (
        whole(llm, "x" * (max_chars + 1)),
        whole(llm, "é" * (max_chars // 2 + 1)),
        whole(llm, "x" * (COUNTED_BYTES + 1), cut),
        llm.encode("é" * (COUNTED_BYTES // 2 + 1)),
    ):
        with pytest.raises(PromptTooLong, match="or more, but this model takes at most 2047, si"):
            await refused
    assert tokenized == []
    await whole(llm, "x" * max_chars, SamplingParams(max_tokens=1))
    await whole(llm, "x" * COUNTED_BYTES, cut)
    assert await llm.encode("x" * COUNTED_BYTES) == [5]
    assert tokenized == [max_chars, COUNTED_BYTES, COUNTED_BYTES]


def test_it_belongs_to_one_loop(llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
    loop.run_until_complete(llm.call(LLMEngine.stats))
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(whole(llm, "x"))


async def test_a_call_raises_what_it_raises(llm: AsyncLLM) -> None:
    with pytest.raises(ValueError, match="cannot use adapters"):
        await llm.load_adapter("x", "nowhere")
    assert llm.adapters == []


async def test_an_adapter_is_read_while_steps_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if no caller waits for it any more."""
    goes_on, read = threading.Event(), adapter_slots.read_adapter

    def wait_and_read(*arguments: Any) -> adapter_slots.Adapter:
        assert goes_on.wait(60)
        return read(*arguments)

    monkeypatch.setattr(adapter_slots, "read_adapter", wait_and_read)
    llm = AsyncLLM(**SMALL, max_loras=1)
    left, load = (asyncio.ensure_future(llm.load_adapter(n, SHIPPED_ADAPTER)) for n in "xy")
    params = SamplingParams(temperature=0, max_tokens=9)
    before = await whole(llm, PROMPT, params)
    assert not left.done() and not load.done() and llm.adapters == []
    left.cancel()
    goes_on.set()
    await asyncio.wait_for(load, 60)
    for _ in range(2000):
        await asyncio.sleep(0.005 * (len(llm.adapters) < 2))
    assert sorted(llm.adapters) == ["x", "y"]
    delta = [d async for d in llm.generate(PROMPT, params, adapter="x")][-1]
    assert delta.finished and delta.error is None
    assert (await whole(llm, PROMPT, params)).completions == before.completions
    llm.close()


def test_a_model_that_is_not_there_is_said() -> None:
    with pytest.raises(FileNotFoundError):
        AsyncLLM("/nowhere/at/all")


async def test_a_full_queue_and_an_end() -> None:
    llm = AsyncLLM(**SMALL, max_waiting=1, max_num_seqs=1)
    running = [await begun(llm) for _ in range(2)]
    with pytest.raises(QueueFull):
        await begun(llm)
    await asyncio.to_thread(llm.close)
    for request in running:
        with pytest.raises(EngineError, match="closed"):
            while True:
                await anext(request)
    with pytest.raises(EngineError, match="closed"):
        await begun(llm)


async def test_an_end_is_the_end() -> None:
    """The result of the step in flight does not revive an aborted request, and an abort after its
    end does not lose its outputs."""

    async def read(first: RequestDelta, second: RequestDelta) -> RequestDelta:
        box = Mailbox()
        box.put(first)
        box.put(second)
        return await box.take()

    aborted = RequestDelta("x", finished=True, error=EngineError("aborted"))
    late = RequestDelta("x", {0: CompletionDelta(0, "a", [1])})
    assert (await read(aborted, late)).error is not None
    whole = RequestDelta("x", {0: CompletionDelta(0, "a", [1], None, "stop")}, finished=True)
    assert (await read(whole, aborted)).error is None


async def test_a_request_id_in_use_is_refused(llm: AsyncLLM) -> None:
    name = f"request-{llm._num_requests + 2}"
    first = llm.generate([5], LONG, request_id=name)
    assert (await anext(first)).request_id == name
    assert (await whole(llm, [5])).request_id != name
    await first.aclose()  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_call_may_raise_anything(llm: AsyncLLM) -> None:
    """A future takes no `StopIteration`; the others of the same hand-over get theirs."""

    def ends(engine: LLMEngine) -> None:
        raise StopIteration

    calls = llm.call(ends), llm.call(lambda engine: engine.adapters), whole(llm, [5])
    found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
    error, adapters, total = found
    assert isinstance(error, RuntimeError) and adapters == [] and isinstance(total, RequestDelta)


def test_another_loop_after_one_that_ended_in_the_middle() -> None:
    """Deltas that the first loop did not deliver do not delay those of the second."""
    llm = AsyncLLM(**SMALL)
    asyncio.run(whole(llm, [5]))
    llm._given.append(RequestDelta("of the first loop"))
    total = asyncio.run(asyncio.wait_for(whole(llm, [5]), 20))
    assert total.finished
    llm.close()


async def test_closed_while_a_prompt_becomes_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """No caller waits forever: not one that submits after the engine's thread has ended, nor one
    that submitted just before, nor if closing the engine fails."""
    llm = AsyncLLM(**SMALL)
    is_begun, may_go = asyncio.Event(), asyncio.Event()

    async def encode(text: str, *_: object) -> list[int]:
        is_begun.set()
        await may_go.wait()
        return [5]

    monkeypatch.setattr(llm, "encode", encode)
    engine = await llm.call(lambda engine: engine)
    closed = []

    def close() -> None:
        closed.append(engine)
        raise OSError("the workers are gone")

    monkeypatch.setattr(engine, "close", close)
    one = asyncio.ensure_future(whole(llm, "x"))
    await asyncio.wait_for(is_begun.wait(), 20)
    await asyncio.to_thread(llm.close)
    may_go.set()
    with pytest.raises(EngineError, match="closed"):
        await asyncio.wait_for(one, 20)
    assert closed and not llm._engine_loop._thread.is_alive()
    assert llm.death_reason == "the engine is closed"


async def test_a_submit_while_the_engine_ends_gets_an_error() -> None:
    """In the inbox after the thread has looked for the last time, and before the loop knows."""
    llm = AsyncLLM(**SMALL)
    await llm.call(LLMEngine.stats)  # bound
    late = anext(llm.generate([5], FEW))
    calls = asyncio.gather(late, llm.call(LLMEngine.stats), return_exceptions=True)
    llm._engine_loop.close()
    found = await asyncio.wait_for(calls, 20)
    assert [type(error) for error in found] == [EngineStopped] * 2


async def test_steps_that_fail_now_and_then_end_nothing_and_three_in_a_row_do() -> None:
    llm = AsyncLLM(**SMALL)
    few = SamplingParams(max_tokens=2, ignore_eos=True)
    for _ in range(4):
        await llm.call(fail_next)
        with pytest.raises(EngineError, match="has failed: MemoryError") as found:
            await whole(llm, [5], few)
        assert str(found.value.__cause__) == "0 more"
        assert (await whole(llm, [5], few)).finished
    other = await begun(llm)
    await llm.call(LLMEngine.abort_request, f"request-{llm._num_requests}")
    with pytest.raises(EngineError, match="was ended"):  # by no step that failed
        await anext(other), await anext(other)
    await llm.call(fail_next, MemoryError, 9)
    await llm.call(lambda engine: setattr(engine, "abort_request", None))
    stopped = ("has stopped", "6 more")
    for says, cause in (("failed", "8 more"), ("failed", "7 more"), *[stopped] * 3):
        with pytest.raises(EngineError, match=says) as found:
            await whole(llm, [5], few)
        assert str(found.value.__cause__) == cause
        llm._engine_loop.abort(f"request-{llm._num_requests}")  # it has ended
    assert "has stopped" in (llm.death_reason or "")
    await asyncio.to_thread(llm.close)
