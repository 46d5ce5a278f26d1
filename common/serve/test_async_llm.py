"""`AsyncLLM` without HTTP: its outputs are those of `generate`, and a disconnect leaves no state.
Then its parts: deltas, the engine's thread with an engine that does what it is told, streams."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message

from common.engine import LLMEngine
from common.engine_config import SHIPPED_ADAPTER
from common.features.grammars.lark_text import TOO_MANY_WAYS
from common.llm import LLM, SamplingParams
from common.requests.output_processor import CompletionOutput
from common.sampling.runner_plugin import NO_TOKEN
from common.serve.async_llm import AsyncLLM, EngineError, PromptTooLong
from common.serve.conftest import SMALL, fail_next, is_idle
from common.serve.deltas import DeltaSource, RequestDelta
from common.serve.engine_loop import MAX_FAILURES, UNCOMPILED, EngineStopped
from common.serve.streams import EventStream

PROMPT = "def fibonacci(n):\n    if n"
FEW = SamplingParams(max_tokens=2)
LONG = SamplingParams(max_tokens=1000, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(**SMALL)
    yield llm
    llm.close()


async def whole(
    llm: AsyncLLM, prompt: str | list[int], params: SamplingParams = FEW, **options: Any
) -> RequestDelta:
    deltas = [delta async for delta in llm.generate(prompt, params, **options)]
    have_prompt = [delta.prompt_token_ids is not None for delta in deltas]
    assert have_prompt == [True] + [False] * (len(deltas) - 1), "the first"
    for delta in deltas[1:]:
        deltas[0].extend(delta)
    return deltas[0]


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


# -- callers

EACH = [
    SamplingParams(n=3, seed=5, max_tokens=12, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=40, stop=["return", "n -"]),
    SamplingParams(temperature=0, max_tokens=9, detokenize=False),
    SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[*range(300, 600)]),
]


def check_equal(total: RequestDelta, output: Any) -> None:
    assert total.finished and total.metrics is not None
    assert total.prompt_token_ids == output.prompt_token_ids
    scores = total.prompt_logprobs, output.prompt_logprobs
    assert [one and len(one) for one in scores] == [scores[1] and len(scores[1])] * 2
    for completion in output.outputs:
        part = total.completions[completion.index]
        for name in ("text", "token_ids", "finish_reason", "stop_reason"):
            assert getattr(part, name) == getattr(completion, name), name
        logprobs = [[entry.logprob for entry in one.logprobs or ()] for one in (part, completion)]
        assert logprobs[0] == pytest.approx(logprobs[1])


@pytest.mark.net
@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(overlap_scheduling=True),
        dict(speculative={"method": "ngram"}, prefix_cache="radix", preempt_every=4),
        pytest.param(dict(tensor_parallel_size=2), marks=pytest.mark.slow),
    ],
    ids=["plain", "overlap", "guesses", "ranks"],
)
async def test_whoever_stays_gets_the_answer_of_generate_and_who_leaves_leaves_no_state(
    settings: dict, alone: LLM
) -> None:
    """Cancelled at random moments, or left early."""
    outputs = alone.generate([PROMPT] * len(EACH), EACH, use_tqdm=False)
    llm = await asyncio.to_thread(lambda: AsyncLLM(**(SMALL | settings)))
    rng = random.Random(3)

    async def stays(i: int) -> None:
        check_equal(await whole(llm, PROMPT, EACH[i]), outputs[i])

    async def left_early(i: int) -> None:
        request = llm.generate(PROMPT, LONG)
        for _ in range(i):
            await anext(request)
        await request.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    async def cancelled(i: int) -> None:
        task = asyncio.ensure_future(whole(llm, PROMPT, LONG))
        await asyncio.sleep(rng.random() * 0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def caller() -> None:
        for _ in range(5):
            way = rng.choice([stays, left_early, cancelled])
            await way(rng.randrange(len(EACH)))

    keeps = (stays(i) for i in range(len(EACH)))
    try:
        await asyncio.gather(*keeps, *(caller() for _ in range(5)))
        assert await is_clean(llm)
    finally:
        await asyncio.to_thread(llm.close)


async def test_nobody_is_computed_for_who_has_left(llm: AsyncLLM) -> None:
    """Trap 68."""
    await (await begun(llm)).aclose()
    assert await llm.call(lambda engine: engine.core.get_request_counts()) == (0, 0)
    end = time.monotonic() + 5  # routers read these, and the next request may come in an hour
    while llm.stats.num_running or llm.stats.kv_blocks_in_use:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def test_what_is_refused_says_why(llm: AsyncLLM) -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        await asyncio.wait_for(whole(llm, [1] * 5000), 10)
    with pytest.raises(ValueError, match="cannot use adapters"):
        await llm.load_adapter("x", "nowhere")


async def test_an_adapter_is_loaded_between_two_steps() -> None:
    llm = AsyncLLM(**SMALL, max_loras=1)
    before = await whole(llm, PROMPT, EACH[2])
    await llm.load_adapter("x", SHIPPED_ADAPTER)
    assert llm.adapters == ["x"]
    assert (await whole(llm, PROMPT, EACH[2], adapter="x")).completions != before.completions
    await llm.unload_adapter("x")
    assert llm.adapters == []
    llm.close()


# -- its end


def test_it_belongs_to_one_loop_and_another_after_that_ended_in_the_middle() -> None:
    """At the end all are told."""
    llm = AsyncLLM(**SMALL)

    async def first() -> None:
        await whole(llm, [5])

    async def second() -> None:
        request = await asyncio.wait_for(begun(llm), 20)
        await asyncio.to_thread(llm.close)
        for one in request, llm.generate([5], FEW):
            with pytest.raises(EngineError, match="closed"):
                while True:
                    await anext(one)

    asyncio.run(first())
    asyncio.run(second())


async def test_closed_while_a_prompt_becomes_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """No caller waits forever: not one that submits after the engine's thread has ended, nor one
    that submitted just before, nor if closing the engine fails."""
    llm = AsyncLLM(**SMALL)
    is_begun = asyncio.Event()
    may_go = asyncio.Event()

    async def encode(text: str, *_: object) -> list[int]:
        is_begun.set()
        await may_go.wait()
        return [5]

    monkeypatch.setattr(llm, "encode", encode)
    monkeypatch.setattr(await llm.call(lambda engine: engine), "close", lambda: 1 / 0)
    one = asyncio.ensure_future(whole(llm, "x"))
    await is_begun.wait()
    # In the inbox after the thread has looked for the last time, and before the loop knows.
    late = anext(llm.generate([5], FEW))
    calls = asyncio.gather(late, llm.call(LLMEngine.stats), return_exceptions=True)
    llm._engine_loop.close()
    found = await asyncio.wait_for(calls, 20)
    assert [type(error) for error in found] == [EngineStopped] * 2
    await asyncio.to_thread(llm.close)
    may_go.set()
    with pytest.raises(EngineError, match="closed"):
        await asyncio.wait_for(one, 20)


# -- the engine's thread


def test_a_continuation_waits_for_the_prompts_scores() -> None:
    """The first one computes them for all. Another, found in the cache, has a token before that."""
    own = [CompletionOutput(i, "", [i], []) for i in range(2)]
    scores = [None, 1.0]
    members = [SimpleNamespace(completion=one, take_delta=str) for one in own]
    about: Any = dict(prompt_token_ids=[7, 8, 9], num_cached_tokens=2, finished=False)
    about |= dict(request_id="x", sequences=members, prompt_logprobs=scores)
    source = DeltaSource(SimpleNamespace(**about))
    assert source.take().completions == {}
    scores.append(2.0)
    delta = source.take()
    assert set(delta.completions) == {0, 1} and delta.prompt_logprobs == scores


AMBIGUOUS = f"grammar ({TOO_MANY_WAYS}): {NO_TOKEN}"
FULL_STEP = "a step with this request has failed: MemoryError"  # trap 86: not what it quotes


def end_next(engine: LLMEngine, reason: str, detail: str | None) -> None:
    """Make the next step end its requests for this reason."""
    step = engine.step

    def _step() -> list[Any]:
        del engine.step
        outputs = step()
        for output in outputs:
            engine.abort_request(output.request_id)
            for completion in output.outputs:
                completion.finish_reason = reason
            output.metrics.finish_detail = detail
        return outputs

    engine.step = _step


ENDINGS: list[tuple[str, str, type[Exception]]] = [
    ("error", f"{UNCOMPILED}: (x", ValueError),
    ("error", AMBIGUOUS, ValueError),
    ("error", "logits hold nan", EngineError),
    ("abort", "the request was ended", EngineError),
]


@pytest.mark.parametrize(("reason", "detail", "kind"), ENDINGS)
async def test_how_it_ended_is_said(
    llm: AsyncLLM, reason: str, detail: str, kind: type[Exception]
) -> None:
    assert await is_clean(llm), "the next step has no outputs of an earlier one"
    await llm.call(end_next, reason, detail)
    with pytest.raises(kind, match=f"^{re.escape(detail)}$"):
        await whole(llm, [5], LONG)


async def test_steps_that_fail_end_their_requests_and_in_a_row_the_engine() -> None:
    llm = AsyncLLM(**SMALL)
    for _ in range(MAX_FAILURES + 1):  # not in a row
        await llm.call(fail_next)
        with pytest.raises(EngineError, match=FULL_STEP):
            await whole(llm, [5])
        assert (await whole(llm, [5])).finished
    await llm.call(lambda engine: setattr(engine.core.runner, "execute", lambda *_: 1 / 0))
    for kind in [EngineError] * (MAX_FAILURES - 1) + [EngineStopped]:
        with pytest.raises(EngineError, match=r"has (failed|stopped): ZeroDivisionError") as caught:
            await whole(llm, [5])
        assert caught.type is kind and isinstance(caught.value.__cause__, ZeroDivisionError)
    assert llm.death_reason == "the engine has stopped: ZeroDivisionError"
    await asyncio.to_thread(llm.close)


# -- streams: a disconnect at any point of an answer


@pytest.mark.parametrize("ending", ["leaves", "cancelled", "head", "at once"])
async def test_a_stream_is_closed_however_it_ends(ending: str) -> None:
    """Its reader reads nothing: it waits in the middle of sending."""
    is_open = set[str]()
    forever = asyncio.Event().wait

    async def opened(name: str) -> AsyncIterator[Any]:
        is_open.add(name)
        try:
            while True:
                yield b"first"
                await forever()
        finally:
            await asyncio.sleep(0)
            is_open.remove(name)

    async def send(message: Message) -> None:
        is_head = message["type"] == "http.response.start"
        if is_head and ending == "head":
            raise OSError
        if not is_head:
            await forever()

    async def receive() -> Message:
        if ending in ("cancelled", "head"):
            await forever()
        await asyncio.sleep(0.01 * (ending == "leaves"))
        return {"type": "http.disconnect"}

    await anext(request := opened("request"))
    stream = EventStream(opened("events"), [request])
    call = asyncio.ensure_future(stream({}, receive, send))
    await asyncio.sleep(0.01)
    if ending == "cancelled":
        call.cancel()
    errors = {"cancelled": asyncio.CancelledError, "head": OSError}
    with pytest.raises(errors[ending]) if ending in errors else nullcontext():
        await call
    assert not is_open


def test_a_text_that_can_not_fit_is_refused_before_it_is_tokenized() -> None:
    llm = cast(AsyncLLM, SimpleNamespace(_max_token_chars=5, max_model_len=8))
    AsyncLLM._check_length(llm, "x" * 39)
    with pytest.raises(PromptTooLong, match="at least 8 tokens, but this model takes at most 7"):
        AsyncLLM._check_length(llm, "x" * 40)
