"""`AsyncLLM` without HTTP: its outputs are those of `generate`, and a disconnect leaves no state.
Then its parts: deltas, the engine's thread with an engine that does what it is told, streams."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from queue import Queue, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from common.engine import LLMEngine
from common.engine_config import SHIPPED_ADAPTER, EngineStats
from common.features.adapters import adapter_slots
from common.features.grammars.lark_text import TOO_MANY_WAYS
from common.llm import LLM, SamplingParams
from common.requests.output_processor import CompletionOutput, RequestMetrics
from common.sampling.runner_plugin import NO_TOKEN
from common.serve import async_llm
from common.serve.async_llm import COUNTED_BYTES, AsyncLLM, EngineError, PromptTooLong, QueueFull
from common.serve.conftest import SMALL, is_idle, wait_for
from common.serve.deltas import DeltaSource, EngineUpdate, RequestDelta
from common.serve.engine_loop import MAX_ADD_S, MAX_FAILURES, UNCOMPILED, EngineLoop, EngineStopped
from common.serve.streams import (
    HEARTBEAT,
    EventStream,
    accepted,
    close_all,
    gathered,
    merged,
    within,
)

PROMPT = "def fibonacci(n):\n    if n"
FEW, LONG = SamplingParams(max_tokens=2), SamplingParams(max_tokens=1000, ignore_eos=True)


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
    SamplingParams(temperature=0, max_tokens=20, logprobs=2, prompt_logprobs=1),
    SamplingParams(n=3, seed=5, max_tokens=12),
    SamplingParams(temperature=0, max_tokens=40, stop=["return", "n -"]),
    SamplingParams(temperature=0, max_tokens=9, detokenize=False),
    SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[*range(300, 600)]),
    SamplingParams(max_tokens=20, seed=1, temperature=2.0, min_p=0.01),
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
        found, expected = (
            [entry.logprob for entry in one.logprobs or ()] for one in (part, completion)
        )
        assert found == pytest.approx(expected)


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
    """Cancelled at random moments, aborted, left early, with names that come again at once."""
    outputs = alone.generate([PROMPT] * len(EACH), EACH, use_tqdm=False)
    llm = await asyncio.to_thread(lambda: AsyncLLM(**(SMALL | settings)))
    rng, names = random.Random(3), set[str]()

    async def stays(i: int, name: str) -> None:
        check_equal(await whole(llm, PROMPT, EACH[i], request_id=name), outputs[i])

    async def left_early(i: int, name: str) -> None:
        request = llm.generate(PROMPT, LONG, request_id=name)
        for _ in range(i):
            assert (await anext(request)).request_id == name
        await request.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    async def aborted(i: int, name: str) -> None:
        with pytest.raises(EngineError, match="aborted"):
            async for delta in llm.generate(PROMPT, LONG, request_id=name):
                if delta.completions:
                    await llm.abort(name)

    async def cancelled(i: int, name: str) -> None:
        task = asyncio.ensure_future(whole(llm, PROMPT, LONG, request_id=name))
        await asyncio.sleep(rng.random() * 0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def caller() -> None:
        for _ in range(5):
            way = rng.choice([stays, left_early, aborted, cancelled])
            name, i = rng.choice("abcdefghijkl"), rng.randrange(len(EACH))
            if name in names:
                with pytest.raises(ValueError, match=f"{name}"):
                    await whole(llm, [5], request_id=name)
                continue
            names.add(name)
            await way(i, name)
            names.remove(name)

    try:
        await asyncio.gather(
            *(stays(i, f"kept {i}") for i in range(6)), *(caller() for _ in "12345")
        )
        assert await is_clean(llm)
    finally:
        await asyncio.to_thread(llm.close)


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


async def test_what_is_refused_says_why(llm: AsyncLLM) -> None:
    prompts: list[tuple[Any, str]] = [([1] * 5000, "max_model_len"), ([], "at least one token")]
    prompts += [([10**9], "prompt must be token ids"), ("\ud800", "surrogate")]
    for prompt, says in prompts:
        with pytest.raises(ValueError, match=says):
            await asyncio.wait_for(whole(llm, prompt), 10)
    with pytest.raises(ValueError, match="detokenize"):
        await whole(llm, "x", SamplingParams(stop="x", detokenize=False))
    with pytest.raises(ValueError, match="cannot use adapters"):
        await llm.load_adapter("x", "nowhere")
    with pytest.raises(FileNotFoundError):
        AsyncLLM("/nowhere/at/all")
    assert await is_clean(llm) and llm.adapters == []


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
    encode = lambda text, adds: tokenized.append(len(text)) or [5]  # noqa: E731
    monkeypatch.setattr(llm.tokenizer, "encode", encode)
    monkeypatch.setattr(async_llm, "LONG_TEXT", 1 << 30)
    cut = SamplingParams(max_tokens=1, truncate_prompt_tokens=9)
    for params, num_bytes in (FEW, max_chars), (cut, COUNTED_BYTES):
        for text in "x" * (num_bytes + 1), "é" * (num_bytes // 2 + 1):
            with pytest.raises(PromptTooLong, match="or more, but this model takes at most 2047"):
                await whole(llm, text, params)
        assert tokenized == []
        await whole(llm, "x" * num_bytes, params)
        assert tokenized.pop() == num_bytes


async def test_an_adapter_is_read_while_steps_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if no caller waits for it any more."""
    goes_on, read = threading.Event(), adapter_slots.read_adapter
    monkeypatch.setattr(
        adapter_slots, "read_adapter", lambda *args: goes_on.wait(60) and read(*args)
    )
    llm = AsyncLLM(**SMALL, max_loras=1)
    left, load = (asyncio.ensure_future(llm.load_adapter(n, SHIPPED_ADAPTER)) for n in "xy")
    before = await whole(llm, PROMPT, EACH[3])
    assert not left.done() and not load.done() and llm.adapters == []
    left.cancel()
    goes_on.set()
    await asyncio.wait_for(load, 60)
    for _ in range(2000):
        await asyncio.sleep(0.005 * (len(llm.adapters) < 2))
    assert sorted(llm.adapters) == ["x", "y"]
    assert (await whole(llm, PROMPT, EACH[3], adapter="x")).error is None
    assert (await whole(llm, PROMPT, EACH[3])).completions == before.completions
    llm.close()


# -- its end


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


def test_it_belongs_to_one_loop_and_another_after_that_ended_in_the_middle() -> None:
    """Deltas that the first loop did not deliver do not delay those of the second."""
    llm = AsyncLLM(**SMALL)

    async def other_thread() -> None:
        await whole(llm, [5])
        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, whole(llm, "x"))

    asyncio.run(other_thread())
    llm._given.append(RequestDelta("of the first loop"))
    assert asyncio.run(asyncio.wait_for(whole(llm, [5]), 20)).finished
    llm.close()


async def test_closed_while_a_prompt_becomes_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """No caller waits forever: not one that submits after the engine's thread has ended, nor one
    that submitted just before, nor if closing the engine fails."""
    llm, is_begun, may_go = AsyncLLM(**SMALL), asyncio.Event(), asyncio.Event()

    async def encode(text: str, *_: object) -> list[int]:
        is_begun.set()
        await may_go.wait()
        return [5]

    monkeypatch.setattr(llm, "encode", encode)
    monkeypatch.setattr(await llm.call(lambda engine: engine), "close", lambda: 1 / 0)
    one = asyncio.ensure_future(whole(llm, "x"))
    await asyncio.wait_for(is_begun.wait(), 20)
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


# -- deltas


class Growing:
    """A request of two continuations, and what the engine makes of it."""

    def __init__(self, prompt_logprobs: Any = None) -> None:
        self.own = [CompletionOutput(i, "", [], []) for i in range(2)]
        members = [SimpleNamespace(completion=one, take_delta=lambda: "a") for one in self.own]
        self.group: Any = SimpleNamespace(
            request_id="x", sequences=members, prompt_token_ids=[7, 8, 9], num_cached_tokens=2
        )
        self.group.prompt_logprobs, self.group.finished = prompt_logprobs, False
        self.group.metrics = RequestMetrics(1.0)

    def grow(self, i: int, token_id: int, reason: str | None = None) -> None:
        self.own[i].token_ids.append(token_id)
        self.own[i].finish_reason = reason


def test_a_continuation_waits_for_the_prompts_scores() -> None:
    """The first one computes them for all. Another, found in the cache, has a token before that."""
    request = Growing(prompt_logprobs=[None, 1.0])
    source = DeltaSource(request.group)
    request.grow(1, 6)
    assert source.take().completions == {}
    request.group.prompt_logprobs.append(2.0)
    request.grow(0, 5)
    delta = source.take()
    assert set(delta.completions) == {0, 1} and delta.prompt_logprobs == [None, 1.0, 2.0]


# -- the engine's thread


class Engine:
    """`steps`: what each does with the one request; it runs until there are no more."""

    def __init__(self, *steps: Callable[[Growing], Any]) -> None:
        self.steps, self.request, self.num_steps = [*steps], Growing(), 0
        self.config, self.is_asked = SimpleNamespace(max_num_seqs=1), False
        self.handed_over = Queue[EngineUpdate]()
        self.stats, self.close = EngineStats, lambda: None
        self.loop = EngineLoop(lambda: self, self.handed_over.put)  # pyright: ignore[reportArgumentType]

    def add_request(self, *_: Any) -> Any:
        self.is_asked = True
        return self.request.group

    def has_unfinished_requests(self) -> bool:
        return self.is_asked and bool(self.steps)

    def step(self) -> list[Any]:
        self.num_steps += 1
        self.steps.pop(0)(self.request)
        return [self.request.group, SimpleNamespace(request_id="of nobody here")]

    def add(self, *names: str) -> None:
        for name in names:
            self.loop.add(name, [7, 8, 9], SamplingParams(), {})

    def ended(self) -> RequestDelta:
        """Wait for the delta that says the end."""
        while True:
            for delta in self.handed_over.get(timeout=20).deltas:
                if delta.finished:
                    self.loop.close()
                    return delta


AMBIGUOUS = f"grammar ({TOO_MANY_WAYS})"
GONE, FULL = RuntimeError("a rank is gone"), MemoryError("no memory left")
FINAL = RuntimeError("a rank is gone")
FINAL.is_final = True  # pyright: ignore[reportAttributeAccessIssue]


def ends(reason: str, detail: str | None = None) -> Callable[[Growing], None]:
    def step(request: Growing) -> None:
        for i in range(2):
            request.grow(i, 5, reason)
        request.group.finished, request.group.metrics.finish_detail = True, detail

    return step


def fails(error: Exception) -> Callable[[Growing], None]:
    def step(request: Growing) -> None:
        raise error

    return step


def goes_on(request: Growing) -> None:
    request.grow(0, 5)


STOPPED = "the engine has stopped: RuntimeError"
FULL_STEP = "a step with this request has failed: MemoryError"  # trap 86: not what it quotes


@pytest.mark.parametrize(
    ("steps", "kind", "says", "num_steps"),
    [
        ([ends("stop")], None, "None", 1),
        ([ends("error", f"{UNCOMPILED}: (x")], ValueError, f"{UNCOMPILED}: (x", 1),
        ([ends("error", f"{AMBIGUOUS}: {NO_TOKEN}")], ValueError, f"{AMBIGUOUS}: {NO_TOKEN}", 1),
        ([ends("error", "logits hold nan")], EngineError, "logits hold nan", 1),
        ([ends("abort")], EngineError, "the request was ended", 1),
        ([fails(FULL), fails(FULL), ends("abort")], EngineError, FULL_STEP, 3),
        ([*[fails(FULL), goes_on] * MAX_FAILURES, ends("stop")], None, "None", 7),  # in a row only
        ([fails(FINAL)] * 5, EngineStopped, STOPPED, 1),
        ([fails(GONE)] * 5, EngineStopped, STOPPED, MAX_FAILURES),
    ],
)
def test_how_it_ended_is_said(steps: Any, kind: type | None, says: str, num_steps: int) -> None:
    engine = Engine(*steps)
    engine.add("x")
    last = engine.ended()
    assert type(last.error) is (kind or type(None)) and says in str(last.error)
    assert engine.num_steps == num_steps
    if kind is EngineStopped:
        assert last.error is not None and last.error.__cause__ in (GONE, FINAL)
        assert engine.loop.death_reason == says, "and not that it was closed"
    elif num_steps == 1:
        assert set(last.completions) == {0, 1}


def test_a_crowd_is_taken_in_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 87: a body of 2,048 prompts held up those that run until all were taken."""
    is_full, order = threading.Event(), list[str]()
    engine = Engine(*[lambda request: is_full.wait(20)] * 200, ends("stop"))
    add, step = engine.add_request, engine.step

    def add_slowly(*arguments: Any) -> Any:
        order.append("a")
        time.sleep(MAX_ADD_S / 4)
        return add(*arguments)

    monkeypatch.setattr(engine, "add_request", add_slowly)
    monkeypatch.setattr(engine, "step", lambda: order.append(" ") or step())
    engine.add(*map(str, range(40)))
    is_full.set()
    wait_for(lambda: order.count("a") == 40)
    engine.loop.close()
    assert max(map(len, "".join(order).split())) <= 12, order


def test_one_request_is_not_held_until_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 96: in CPython 3.11 `SimpleQueue.get(timeout=...)` waits forever if its thread loses the
    processor for longer than the timeout before the wait. Here it always does."""

    class Late(SimpleQueue):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            return super().get()

    monkeypatch.setattr("common.serve.engine_loop.SimpleQueue", Late)
    engine = Engine(ends("stop"))
    engine.loop.made.result()
    engine.loop._step_s = 20.0  # so it gathers for up to five seconds
    engine.add("x")
    assert engine.ended()


# -- streams: a disconnect at any point of an answer


class Source:
    """A request with so many deltas, which then fails or says nothing more."""

    def __init__(self, num: int = 1, error: Exception | None = None) -> None:
        self.is_open, self.deltas = False, self._deltas(num, error)

    async def _deltas(self, num: int, error: Exception | None) -> AsyncIterator[RequestDelta]:
        self.is_open = True
        try:
            for _ in range(num):
                yield RequestDelta("x", prompt_token_ids=[1])
            if error is not None:
                raise error
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.is_open = False


async def cancelled(awaitable: Any) -> None:
    task = asyncio.ensure_future(awaitable)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(("way", "num"), [("accepted", 0), ("gathered", 1), ("merged", 1)])
@pytest.mark.parametrize("error", [EngineError("broken"), None])
async def test_one_that_fails_or_is_cancelled_ends_the_others(
    way: str, num: int, error: Exception | None
) -> None:
    sources = [Source(num, error), Source(1 if error else num)]
    requests = [source.deltas for source in sources]

    async def read() -> None:
        first_deltas = await accepted(requests)
        if way == "gathered":
            await gathered(first_deltas, requests)
        async for _ in merged(requests):
            pass

    if error is None:
        await cancelled(read())
    else:
        with pytest.raises(EngineError, match="broken"):
            await asyncio.wait_for(read(), 20)
        await close_all(requests)
    assert not any(source.is_open for source in sources)


@pytest.mark.parametrize("heartbeat_s", [None, 0.001])
@pytest.mark.parametrize("ending", ["leaves", "cancelled", "head", "at once"])
async def test_a_stream_is_closed_however_it_ends(heartbeat_s: float | None, ending: str) -> None:
    """Its reader reads nothing: it waits in the middle of sending."""
    source, is_closed = Source(), False
    await anext(source.deltas)

    async def events() -> AsyncIterator[bytes]:
        nonlocal is_closed
        try:
            yield b"first"
            async for _ in source.deltas:
                yield b"more"
        finally:
            await asyncio.sleep(0)
            is_closed = True

    async def send(message: Message) -> None:
        is_head = message["type"] == "http.response.start"
        if is_head and ending == "head":
            raise OSError
        if not is_head and (heartbeat_s is None or message["body"] != b"first"):
            await asyncio.Event().wait()

    async def receive() -> Message:
        if ending in ("cancelled", "head"):
            await asyncio.Event().wait()
        await asyncio.sleep(0.01 * (ending == "leaves"))
        return {"type": "http.disconnect"}

    call = EventStream(events(), heartbeat_s, [source.deltas])({}, receive, send)
    if ending == "cancelled":
        await cancelled(call)
    elif ending == "head":
        with pytest.raises(OSError):
            await call
    else:
        await call
    assert not source.is_open and (is_closed or ending == "head")


async def test_a_stream_that_is_silent_says_that_it_is_there() -> None:
    go_on, sent = asyncio.Event(), list[bytes | None]()

    async def events() -> AsyncIterator[bytes]:
        await go_on.wait()
        yield b"late"

    async def send(message: Message) -> None:
        sent.append(message.get("body"))
        if sent.count(HEARTBEAT) == 2:
            go_on.set()

    never: Any = asyncio.Event().wait
    await asyncio.wait_for(EventStream(events(), 0.001)({}, never, send), 20)
    assert sent[:3] == [None, HEARTBEAT, HEARTBEAT] and sent[-2:] == [b"late", b""]


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_cancellation_that_comes_with_the_result_is_not_ignored(num_turns: int) -> None:
    """Otherwise a viewer that leaves as an update arrives is never forgotten."""
    has_result = asyncio.Event()
    task = asyncio.ensure_future(within(60, has_result.wait()))
    await asyncio.sleep(0.01)
    has_result.set()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    if task.cancel():
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert await task is True and num_turns > 2
