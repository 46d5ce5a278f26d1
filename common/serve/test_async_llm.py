"""`AsyncLLM` without HTTP: what comes is `generate`'s, whoever leaves leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from common.engine import LLMEngine
from common.llm import LLM, SamplingParams
from common.serve.async_llm import AsyncLLM, EngineError, Mailbox, QueueFull
from common.serve.conftest import SMALL
from common.serve.deltas import CompletionDelta, RequestDelta

PROMPT = "def fibonacci(n):\n    if n"
T = TypeVar("T")
Run = Callable[[Awaitable[T]], T]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(**SMALL)
    yield llm
    llm.close()


async def whole(llm: AsyncLLM, prompt: str | list[int], params: SamplingParams) -> RequestDelta:
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


async def is_clean(llm: AsyncLLM) -> bool:
    def look(engine: LLMEngine) -> bool:
        engine.check_invariants()
        return not engine.has_unfinished_requests() and engine.stats().kv_blocks_in_use == 0

    for _ in range(2000):
        if await llm.call(look):
            return llm.num_unfinished == 0
        await asyncio.sleep(0.005)
    return False


def test_deltas_joined_are_what_generate_returns(
    llm: AsyncLLM, alone: LLM, loop: asyncio.AbstractEventLoop
) -> None:
    each = [
        SamplingParams(temperature=0, max_tokens=20, logprobs=2, prompt_logprobs=1),
        SamplingParams(n=3, seed=5, max_tokens=12),
        SamplingParams(temperature=0, max_tokens=40, stop=["return", "n -"]),
        SamplingParams(temperature=0, max_tokens=9, detokenize=False),
        SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[*range(300, 600)]),
        SamplingParams(max_tokens=20, seed=1, temperature=2.0, min_p=0.01),
    ]
    expected = alone.generate([PROMPT] * len(each), each, use_tqdm=False)

    async def all_of_them() -> list[RequestDelta]:
        return await asyncio.gather(*(whole(llm, PROMPT, params) for params in each))

    for total, output in zip(loop.run_until_complete(all_of_them()), expected, strict=True):
        assert total.finished and total.metrics is not None
        assert total.prompt_token_ids == output.prompt_token_ids
        assert total.num_cached_tokens <= len(output.prompt_token_ids)
        assert (total.prompt_logprobs is None) == (output.prompt_logprobs is None)
        if output.prompt_logprobs is not None and total.prompt_logprobs is not None:
            assert total.prompt_logprobs[0] is None and len(total.prompt_logprobs) == len(
                output.prompt_logprobs
            )
        for completion in output.outputs:
            piece = total.completions[completion.index]
            for name in ("text", "token_ids", "finish_reason", "stop_reason"):
                assert getattr(piece, name) == getattr(completion, name), name
            if completion.logprobs is not None:
                assert piece.logprobs is not None
                own = [entry.logprob for entry in piece.logprobs]
                assert own == pytest.approx([entry.logprob for entry in completion.logprobs])


@pytest.mark.parametrize(
    "settings",
    [
        dict(overlap_scheduling=True),
        dict(speculative={"method": "ngram"}, prefix_cache="radix", preempt_every=4),
        pytest.param(dict(tensor_parallel_size=2), marks=pytest.mark.slow),
    ],
    ids=["overlap", "guesses", "ranks"],
)
def test_engines_of_every_kind_live_in_a_thread(settings: dict, alone: LLM) -> None:
    prompts = [f"{PROMPT} == {i}" for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = [o.outputs[0].token_ids for o in alone.generate(prompts, params, use_tqdm=False)]

    async def run() -> list[list[int]]:
        llm = await asyncio.to_thread(lambda: AsyncLLM(**(SMALL | settings)))
        try:
            leaving = llm.generate("x", SamplingParams(max_tokens=500, ignore_eos=True))
            await anext(leaving)
            totals = await asyncio.gather(*(whole(llm, p, params) for p in prompts))
            await leaving.aclose()  # pyright: ignore[reportAttributeAccessIssue]
            assert await is_clean(llm)
        finally:
            await asyncio.to_thread(llm.close)
        return [total.completions[0].token_ids for total in totals]

    assert asyncio.run(run()) == expected


def test_a_step_hands_over_once(llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
    async def count() -> tuple[int, int]:
        steps = (await llm.call(LLMEngine.stats)).num_steps
        before = llm.num_handed_over
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        await asyncio.gather(*(whole(llm, [5 + i, 6], params) for i in range(20)))
        after = llm.num_handed_over
        return after - before, (await llm.call(LLMEngine.stats)).num_steps - steps

    num_handed_over, num_steps = loop.run_until_complete(count())
    assert num_handed_over <= num_steps + 1 < 20 * 10  # the call's own answer may be one


def test_what_is_refused_says_why(llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
    async def refused(prompt: str | list[int], params: SamplingParams | None = None) -> str:
        with pytest.raises(ValueError) as caught:
            await whole(llm, prompt, params or SamplingParams())
        return str(caught.value)

    for prompt, says in (
        ([1] * 5000, "max_model_len"),
        ([10**9], "token ids are integers"),
        ([], "at least one token"),
        ("\ud800", "surrogate"),
    ):
        assert says in loop.run_until_complete(refused(prompt))
    bad = SamplingParams(stop="x", detokenize=False)
    assert "detokenize" in loop.run_until_complete(refused("x", bad))
    assert loop.run_until_complete(is_clean(llm))


def test_who_leaves_leaves_nothing(llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
    """Cancelled at random moments, aborted, left early; others are not touched."""
    rng = random.Random(3)
    long = SamplingParams(max_tokens=1000, ignore_eos=True)

    async def left_early() -> None:
        async for delta in llm.generate(PROMPT, long):
            if delta.completions:
                return

    async def aborted(name: str) -> None:
        with pytest.raises(EngineError, match="aborted"):
            async for delta in llm.generate(PROMPT, long, request_id=name):
                if delta.completions:
                    await llm.abort(name)

    async def cancelled() -> None:
        task = asyncio.ensure_future(whole(llm, PROMPT, long))
        await asyncio.sleep(rng.random() * 0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def all_of_them() -> RequestDelta:
        kept = asyncio.ensure_future(
            whole(llm, PROMPT, SamplingParams(temperature=0, max_tokens=30))
        )
        leaving = [left_early() for _ in range(5)] + [aborted(f"a{i}") for i in range(5)]
        await asyncio.gather(*leaving, *(cancelled() for _ in range(10)))
        return await kept

    total = loop.run_until_complete(all_of_them())
    assert loop.run_until_complete(is_clean(llm))
    assert len(total.completions[0].token_ids) == 30


def test_a_name_may_come_again_at_once(llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
    """What is under way of the aborted one is not the next one's."""

    async def twice() -> RequestDelta:
        long = SamplingParams(max_tokens=1000, ignore_eos=True)
        first = llm.generate([7] * 9, long, request_id="mine")
        await anext(first)
        with pytest.raises(ValueError, match="mine"):
            await anext(llm.generate("x", request_id="mine"))
        await first.aclose()  # pyright: ignore[reportAttributeAccessIssue]
        total = RequestDelta("mine")
        async for delta in llm.generate([5, 6], SamplingParams(max_tokens=3), request_id="mine"):
            total.extend(delta)
        return total

    total = loop.run_until_complete(twice())
    assert total.request_id == "mine" and len(total.completions[0].token_ids) <= 3


def test_a_mailbox_joins_what_is_not_read() -> None:
    async def read() -> RequestDelta:
        box = Mailbox()
        for token_id in (3, 4, 5):
            piece = CompletionDelta(0, str(token_id), [token_id], [], None)
            box.put(RequestDelta("x", {0: piece}))
        box.put(RequestDelta("x", {1: CompletionDelta(1, "b", [9], None, "stop", 9)}))
        return await box.take()

    delta = asyncio.run(read())
    assert delta.completions[0].text == "345" and delta.completions[0].token_ids == [3, 4, 5]
    assert delta.completions[1].stop_reason == 9


def test_many_deltas_do_not_block_the_loop(llm: AsyncLLM) -> None:
    """They are given out some at a time, in order."""
    from common.engine_config import EngineStats
    from common.serve.async_llm import NUM_AT_ONCE
    from common.serve.deltas import HandOver

    async def give() -> list[int]:
        other = AsyncLLM.__new__(AsyncLLM)
        other.__dict__ |= llm.__dict__ | {"_loop": asyncio.get_running_loop()}
        other._given, other._mailboxes = type(llm._given)(), {}
        for i in range(1000):
            other._mailboxes[str(i)] = Mailbox()
        for k in (0, 1):
            pieces = [CompletionDelta(0, str(k), [k]) for _ in range(1000)]
            deltas = [RequestDelta(str(i), {0: piece}) for i, piece in enumerate(pieces)]
            other._receive(HandOver(deltas, EngineStats()))
        seen = []
        while other._given:
            seen.append(len(other._given))
            await asyncio.sleep(0)
        for box in other._mailboxes.values():
            assert (await box.take()).completions[0].text == "01"
        return seen

    left = asyncio.run(give())
    assert len(left) >= 2000 // NUM_AT_ONCE - 1


def test_it_belongs_to_one_loop(llm: AsyncLLM) -> None:
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(whole(llm, "x", SamplingParams(max_tokens=1)))


def test_a_call_raises_what_it_raises(llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
    with pytest.raises(ValueError, match="takes no adapters"):
        loop.run_until_complete(llm.load_adapter("x", "nowhere"))
    assert llm.adapters == []


def test_a_model_that_is_not_there_is_said() -> None:
    with pytest.raises(FileNotFoundError):
        AsyncLLM("/nowhere/at/all")


def test_a_full_queue_and_an_end() -> None:
    async def run() -> None:
        llm = AsyncLLM(**SMALL, max_waiting=1, max_num_seqs=1)
        long = SamplingParams(max_tokens=1000, ignore_eos=True)
        running = [llm.generate(PROMPT, long) for _ in range(2)]
        for request in running:
            await anext(request)
        with pytest.raises(QueueFull):
            await anext(llm.generate(PROMPT, long))
        await asyncio.to_thread(llm.close)
        for request in running:
            with pytest.raises(EngineError, match="closed"):
                while True:
                    await anext(request)
        with pytest.raises(EngineError, match="closed"):
            await anext(llm.generate(PROMPT, long))

    asyncio.run(run())
