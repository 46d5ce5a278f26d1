"""The draft model's KV is always that of the request's own tokens, whichever step wrote it and
whatever happened to the blocks meanwhile.

The draft model is scripted. Its next token is a hash of the KV that it reads through the block
table, as attention does, so one hole, one stale slot or one position too many changes its proposal.
The drafts must be those of the whole history, computed from scratch. It has the rule of the fake
target (chapter 4), so undisturbed it is always right; a sampler that errs makes it wrong where a
test needs that."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batch_layout import ComposedBatch
from bounded_loops import as_long_as
from draft_model_proposer import DraftModelProposer, MostLikely
from draft_plugin import DraftPlugin
from fake_model import FakeModelRunner, _mix, continuation
from input_batch import RunnerRequest
from kv_memory import SharingRunnerState
from paged_attention import PagedKVCache
from prefill_first_scheduler import PrefillFirstScheduler
from proposers import ProposerInput
from request import Request, SamplingParams
from scheduler import Scheduler
from scheduler_interface import BlockTableUpdate, NewRequestData, SchedulerOutput
from scheduler_steps import make_scheduler
from speculating_runner import DraftLength, SpeculatingRunner
from test_scheduler_runs import make_memory

VOCAB = 50
POISON = -7
K = 3  # drafts, where nothing else is said
SCHEDULERS = (Scheduler, PrefillFirstScheduler)
CACHES = (None, "hash", "radix")

Errs = Callable[[RunnerRequest, int], bool]  # is this draft of the request to be wrong?


# -- the model, and what it says when nothing can go wrong


@cache
def kv_of(tokens: tuple[int, ...]) -> tuple[int, ...]:
    if not tokens:
        return ()
    before = kv_of(tokens[:-1])
    return (*before, _mix(before, tokens[-1]))


def all_tokens(request: RunnerRequest) -> list[int]:
    return request.tokens(0, request.num_tokens)


def drafts_from_scratch(request: RunnerRequest, num_drafts: int, errs: Errs) -> list[int]:
    tokens = tuple(all_tokens(request))
    for i in range(num_drafts):
        tokens += ((_mix(kv_of(tokens), -1) + errs(request, i)) % VOCAB,)
    return list(tokens[request.num_tokens :])


NO_ATTENTION: Any = SimpleNamespace(plan=lambda *arguments: None)


class ScriptedModel:
    """A `DraftModel` whose keys are hashes. It finds fault with what it is given."""

    num_heads = 1

    def __call__(self, batch: ComposedBatch, kv_cache: PagedKVCache) -> torch.Tensor:
        size, cache = kv_cache.block_size, kv_cache.key_cache[0].view(-1)
        (metadata,), positions = batch.attention, batch.positions
        before, ids = cache.tolist(), batch.input_ids.tolist()
        slots = metadata.slot_mapping.tolist()
        bounds, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        assert len(ids) == len(slots) == bounds[-1] > 0
        written: dict[int, int] = {}
        read: set[int] = set()
        says: list[int] = []
        for first, stop, seq_len, table in zip(
            bounds, bounds[1:], seq_lens, metadata.block_tables.tolist()
        ):
            start = seq_len - (stop - first)
            assert first < stop and positions[first:stop].tolist() == list(range(start, seq_len))
            owned = [table[p // size] * size + p % size for p in range(seq_len)]
            assert slots[first:stop] == owned[start:]
            assert min(owned) >= size, "block 0 is never allocated"
            read.update(owned[:start])
            kv = [before[slot] for slot in owned[:start]]
            for slot, token in zip(owned[start:], ids[first:stop]):
                kv.append(_mix(kv, token))
                assert written.setdefault(slot, kv[-1]) == kv[-1], "two write one slot"
                says.append(_mix(kv, -1) % VOCAB)
        for slot in read & written.keys():  # a model writes first, and reads then
            assert written[slot] == before[slot], "one reads what another writes"
        cache[list(written)] = torch.tensor(list(written.values()))
        token_ids = [says[index] for index in batch.logit_indices.tolist()]
        return torch.nn.functional.one_hot(
            torch.tensor(token_ids, dtype=torch.int64), VOCAB
        ).double()


class ErringSampler(MostLikely):
    """Sample the likeliest token or the one after it, with probabilities that encode request and
    draft."""

    def __init__(self, errs: Errs) -> None:
        self.errs = errs

    def needs_probs(self, request: RunnerRequest) -> bool:
        return request.params.seed is None

    def sample_drafts(
        self, logits: torch.Tensor, requests: Sequence[RunnerRequest], num_drafted: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert logits.shape == (len(requests), VOCAB)
        wrong = torch.tensor([self.errs(request, num_drafted) for request in requests])
        tokens = (logits.argmax(dim=-1) + wrong) % VOCAB
        names = torch.tensor([[hash(r.req_id) % 997 + num_drafted / 100] for r in requests])
        return tokens, names.expand(-1, VOCAB)


def wrong_from(first: int) -> Errs:
    return lambda request, num_drafted: num_drafted >= first


never, always = wrong_from(99), wrong_from(0)


def now_and_then(seed: int) -> Errs:
    return lambda request, num_drafted: hash((seed, request.num_tokens, num_drafted)) % 4 == 0


# -- the world that it lives in


class Checked:
    """A `Proposer` around the draft model's. Each proposal is compared with one from scratch."""

    def __init__(self, proposer: DraftModelProposer, errs: Errs) -> None:
        self.inner, self.errs = proposer, errs
        self.num_spec_tokens = proposer.num_spec_tokens
        self.num_lookahead_tokens = proposer.num_lookahead_tokens
        self.draft_probs, self.remove_request = proposer.draft_probs, proposer.remove_request
        self.last: dict[str, list[int]] = {}
        self._contents: dict[int, list[int]] = {}  # of a block, by its hash

    def propose(
        self, inputs: Sequence[ProposerInput], num_drafts: Sequence[int]
    ) -> dict[str, list[int]]:
        requests = [f.request for f in inputs]
        before = self._slots()
        drafts = self.last = self.inner.propose(inputs, num_drafts)
        expected = {}
        for request, num in zip(requests, num_drafts, strict=True):
            if num := min(num, self._num_possible(request)):
                expected[request.req_id] = drafts_from_scratch(request, num, self.errs)
        assert drafts == expected
        self._check_writes(requests, before)
        self._check_kv(requests)
        return drafts

    def _slots(self) -> list[int]:
        return self.inner.kv_cache.key_cache[0].flatten().tolist()

    def _num_possible(self, request: RunnerRequest) -> int:
        """All drafts but the last are written, and the last known token is too."""
        num_slots = min(len(self._own_slots(request)), self.inner.max_model_len)
        return max(0, min(self.num_spec_tokens, num_slots - request.num_tokens + 1))

    def _own_slots(self, request: RunnerRequest) -> list[int]:
        size = self.inner.block_size
        block_ids = self.inner.state.block_ids(request.req_id)
        return [block_id * size + i for block_id in block_ids for i in range(size)]

    def _check_writes(self, requests: Sequence[RunnerRequest], before: list[int]) -> None:
        allowed = {slot for request in requests for slot in self._own_slots(request)}
        for slot, (old, new) in enumerate(zip(before, self._slots(), strict=True)):
            assert old == new or slot in allowed, f"slot {slot} belongs to another request"

    def _check_kv(self, requests: Sequence[RunnerRequest]) -> None:
        """The proposer's own invariants."""
        now = self._slots()
        for request in requests:
            tokens = all_tokens(request) + self.last.get(request.req_id, [])
            num = self.inner._followers[request.req_id].num_computed
            kv = [now[slot] for slot in self._own_slots(request)[:num]]
            assert kv == list(kv_of(tuple(tokens[:num]))), f"{request!r}: {num} positions"
        size = self.inner.block_size
        for block_id, chain in self.inner._filled.items():
            content = now[block_id * size : (block_id + 1) * size]
            assert self._contents.setdefault(chain, content) == content, f"block {block_id}"


class ScriptedLength(DraftLength):
    """`num_drafts` for every request, an int or a function of the request's id."""

    def __init__(self, num_drafts: int | Callable[[str], int]) -> None:
        self.num_drafts = num_drafts

    def choose(self, request_ids: Sequence[str]) -> list[int]:
        if callable(self.num_drafts):
            return [self.num_drafts(request_id) for request_id in request_ids]
        return [self.num_drafts] * len(request_ids)


class World:
    """Scheduler, fake target, scripted draft model, in chapter 1's order. Block size 4 and a hash
    cache, unless it is told otherwise."""

    def __init__(
        self,
        num_blocks: int = 60,
        block_size: int = 4,
        cache: str | None = "hash",
        kind: type = Scheduler,
        *,
        errs: Errs = never,
        num_spec_tokens: int = K,
        num_lookahead_tokens: int | None = None,
        draft_len: int = 200,
        max_rows: int = 2,
        **options,
    ) -> None:
        if kind is Scheduler:
            options.setdefault("watermark", 0.0)
        else:
            options.setdefault("init_new_token_ratio", 0.3)
        if num_lookahead_tokens is None:
            num_lookahead_tokens = num_spec_tokens
        self.memory = make_memory(cache, num_blocks, block_size)
        self.draft_plugin = DraftPlugin(num_lookahead_tokens)
        self.scheduler = make_scheduler(
            kind, plugins=[self.draft_plugin], kv_memory=self.memory, **options
        )
        state = SharingRunnerState(max_rows, max_blocks_per_request=64)
        kv_cache = PagedKVCache(1, num_blocks + 1, block_size, 1, 1, torch.int64)
        kv_cache.key_cache[0].fill_(POISON)
        self.proposer = DraftModelProposer(
            ScriptedModel(),
            kv_cache,
            NO_ATTENTION,
            state,
            num_spec_tokens,
            max_model_len=draft_len,
            sampler=ErringSampler(errs),
        )
        assert self.proposer.num_lookahead_tokens == num_spec_tokens
        self.checked = Checked(self.proposer, errs)
        self.length = ScriptedLength(num_spec_tokens)
        target = FakeModelRunner(block_size, VOCAB, state)
        self.runner = SpeculatingRunner(target, self.checked, self.length, state)
        self.requests: dict[str, Request] = {}
        self.num_moved = 0  # table entries that came to name a cached block

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 12) -> Request:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        request = Request(request_id, prompt, params)
        self.scheduler.add_request(request)
        self.requests[request_id] = request
        return request

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """`meanwhile` is called while the runner is at work."""
        plan = self.scheduler.schedule()
        self.num_moved += len(plan.block_moves)
        output = self.runner.execute(plan).wait()
        meanwhile()
        self.scheduler.update_from_output(plan, output)
        self.scheduler.check_invariants()
        for request in plan.scheduled_requests:
            num = request.num_output_tokens
            assert request.output_token_ids == continuation(request.prompt_token_ids, num, VOCAB)

    def num_fed(self) -> int:
        """Tokens that the draft model is fed in one step."""
        before = self.proposer.num_computed_tokens
        self.step()
        return self.proposer.num_computed_tokens - before

    def run(self) -> None:
        for _ in as_long_as(self.scheduler.has_unfinished_requests, 1000):
            self.step()
        self.step()  # so that who finished last is forgotten
        assert self.proposer._followers == {} and self.proposer._probs == {}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [hash((seed, i)) % VOCAB for i in range(length)]


# -- how much it is fed


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("num_right", range(K + 1))
def test_kv_of_accepted_drafts_stays_and_of_rejected_ones_is_overwritten(num_right, block_size):
    """Trap 41: after full acceptance the draft's KV lags one token, and it is fed two. A request
    without drafts stays current: it is fed what the target has computed."""
    world = World(200, block_size, errs=wrong_from(num_right))
    request = world.add("a", prompt_of(5), 40)
    other = world.add("b", prompt_of(5, 1), 60)
    world.step()
    world.step()
    world.length.num_drafts = lambda request_id: K * (request_id == "a")
    world.step()
    for _ in as_long_as(lambda: request.max_num_tokens - request.num_tokens - 1 > 2 * K):
        before = request.num_tokens
        num_fed = world.num_fed()
        assert request.num_tokens - before == num_right + 1
        assert num_fed == (K if num_right < K else K + 1) + 1
        assert world.proposer._followers["b"].num_computed == other.num_computed_tokens
    world.run()


def test_rejected_drafts_are_rolled_back_once():
    """Not again in each step in which there is nothing to compute."""
    world = World(200, errs=lambda request, _: request.req_id == "a")
    world.add("a", prompt_of(5), 30)
    world.add("b", prompt_of(5, 1), 60)
    for _ in range(3):
        world.step()
    world.length.num_drafts = lambda request_id: K * (request_id == "b")
    for num_of_a in (0, 1, 1, 1):  # a's last token was wrongly drafted, and is not computed yet
        assert world.num_fed() == K + 1 + num_of_a
    world.run()


HITS = [  # a first request, and how much of a hit on its blocks the draft model has seen
    {"num_prompt": 14, "max_tokens": 8, "num_drafts": K, "num_hit": 12, "num_seen": 12},
    {"num_prompt": 14, "max_tokens": 8, "num_drafts": 0, "num_hit": 12, "num_seen": 0},
    # Its last step computes position 7, the end of a block, and proposes nothing.
    {"num_prompt": 6, "max_tokens": 3, "num_drafts": K, "num_hit": 8, "num_seen": 4},
]


@pytest.mark.sample
@pytest.mark.parametrize("hit", HITS)
@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_a_hit_on_blocks_that_the_draft_never_saw_is_computed(cache, hit):
    """Trap 41: otherwise acceptance would collapse without a visible reason."""
    world = World(cache=cache, errs=always)
    world.length.num_drafts = hit["num_drafts"]
    first = world.add("a", prompt_of(hit["num_prompt"]), hit["max_tokens"])
    world.run()
    world.length.num_drafts = K
    second = world.add("b", [*first.all_token_ids[: hit["num_hit"]], 1, 2, 3, 4, 5], 8)
    assert world.num_fed() == second.num_tokens - hit["num_seen"] + K - 1
    assert second.num_cached_tokens == hit["num_hit"]
    world.run()


# -- by hand, without a scheduler


class Tables(SharingRunnerState):
    """A runner's requests and block tables, as a test writes them. Blocks of 2."""

    def __init__(self) -> None:
        super().__init__(max_num_seqs=2, max_blocks_per_request=8)

    def add(
        self, req_id: str, tokens: Sequence[int], block_ids: Sequence[int], seed: int | None = None
    ) -> RunnerRequest:
        params = SamplingParams(max_tokens=50, seed=seed)
        self.admit(NewRequestData(req_id, list(tokens), params, 0, (list(block_ids),)))
        return self.requests[req_id]

    def move(self, req_id: str, block_index: int, block_id: int) -> None:
        self.apply(SchedulerOutput(block_moves=[BlockTableUpdate(req_id, block_index, block_id)]))


def make_by_hand() -> tuple[Tables, Checked]:
    tables = Tables()
    kv_cache = PagedKVCache(1, 20, 2, 1, 1, torch.int64)
    kv_cache.key_cache[0].fill_(POISON)
    sampler = ErringSampler(never)
    proposer = DraftModelProposer(
        ScriptedModel(), kv_cache, NO_ATTENTION, tables, K, sampler=sampler
    )
    return tables, Checked(proposer, never)


def after(request: RunnerRequest, start: int = 0, stop: int | None = None) -> ProposerInput:
    """A step that computed its positions `[start, stop)`, all but the last token if None."""
    return ProposerInput(request, start, request.num_tokens - 1 if stop is None else stop)


@pytest.mark.parametrize("index", [0, 1])
def test_a_block_may_yet_be_exchanged_until_the_step_that_filled_it_is_over(index):
    """Its draft KV is right already, because the block held the same tokens before. But the
    scheduler may find that another request published it first, and free it: block 0, which the step
    filled, and block 1, which the target has still to compute."""
    tables, checked = make_by_hand()
    tokens = prompt_of(9)
    checked.propose([after(tables.add("a", tokens, [1, 2, 3, 4, 5]))], [1])
    checked.remove_request("a")
    second = tables.add("b", tokens, [1, 2, 3, 4, 5])
    checked.propose([after(second, 0, 2)], [0])
    tables.move("b", index, 6)
    third = tables.add("c", prompt_of(4, 1), [index + 1, 7, 8])
    tables.add("d", prompt_of(4, 2), [9, 10, 11])
    checked.propose([after(second, 2, 4), after(third)], [0, 2])
    assert len(checked.propose([after(second, 4, 8)], [2])["b"]) == 2


def test_probabilities_are_those_that_each_draft_was_drawn_from():
    """Only of the requests that need them, and only of the last proposal."""
    tables, checked = make_by_hand()
    inputs = []
    for i, name in enumerate("abc"):
        blocks = [4 * i + 1, 4 * i + 2, 4 * i + 3, 4 * i + 4]
        seed = 1 if name == "b" else None
        inputs.append(after(tables.add(name, prompt_of(2, i), blocks, seed)))
    checked.propose(inputs, [1, 2, 3])
    assert checked.draft_probs("b") is None and checked.draft_probs("nobody") is None
    for name, num in (("a", 1), ("c", 3)):
        names = [hash(name) % 997 + i / 100 for i in range(num)]
        assert checked.draft_probs(name)[:, 0].tolist() == pytest.approx(names)
        assert checked.draft_probs(name).shape == (num, VOCAB)
    checked.propose(inputs[:1], [2])
    assert len(checked.draft_probs("a")) == 2
    assert len(checked.draft_probs("c")) == 3, "its drafts may still wait to be verified"
    checked.propose(inputs, [0, 1, 1])
    assert checked.draft_probs("a") is None and len(checked.draft_probs("c")) == 1
    checked.remove_request("c")
    checked.remove_request("c")
    assert checked.draft_probs("c") is None and checked.inner._probs == {}


def test_the_likeliest_token_is_drafted_by_default_and_nothing_is_computed_twice():
    tables = Tables()
    request = tables.add("a", prompt_of(3), [1, 2, 3])
    kv_cache = PagedKVCache(1, 20, 2, 1, 1, torch.int64)
    parts = ScriptedModel(), kv_cache, NO_ATTENTION, tables
    with pytest.raises(ValueError, match=r"^num_spec_tokens must be .*>= 1, got 0"):
        DraftModelProposer(*parts, 0)
    proposer = DraftModelProposer(*parts, 2)
    assert proposer.propose([], []) == {}
    for _ in range(2):  # without drafts: as far as the target
        assert proposer.propose([after(request)], [0]) == {}
        assert proposer.num_computed_tokens == 2
    assert proposer.propose([after(request)], [9]) == {"a": continuation(prompt_of(3), 2, VOCAB)}
    assert proposer.draft_probs("a") is None
    assert (proposer.num_spec_tokens, proposer.num_lookahead_tokens) == (2, 2)
    with pytest.raises(ValueError):
        proposer.propose([after(request)], [])


# -- anything at all


def random_world(rng: random.Random) -> World:
    """Hardly more blocks than one request needs, so that eviction, sharing and preemption all
    happen. Any block size, lookahead and length that the draft model knows; few rows."""
    block_size = rng.choice([1, 2, 2, 3, 4, 4, 16])
    num_needed = -(-22 // block_size)
    kind = rng.choice([*SCHEDULERS, Scheduler])
    options: dict = {"preempt_every": rng.choice([None, None, 2, 3, 5])}
    if kind is PrefillFirstScheduler:
        options["mixing"] = rng.random() < 0.5
        options["chunked_prefill_size"] = rng.choice([None, 3, 7])
    else:
        options["reserve_all"] = rng.random() < 0.1
    errs = (never, always, wrong_from(1), wrong_from(2), *[now_and_then(rng.random())] * 3)
    num_spec_tokens = rng.choice([1, 2, 3, 5])
    return World(
        num_needed + rng.choice([0, 1, num_needed // 2, num_needed, 3 * num_needed]),
        block_size,
        rng.choice((*CACHES, "hash")),
        kind,
        errs=rng.choice(errs),
        num_spec_tokens=num_spec_tokens,
        num_lookahead_tokens=rng.choice([None, None, rng.randint(0, num_spec_tokens)]),
        draft_len=rng.choice([200, 200, 200, rng.randint(1, 20)]),
        max_rows=rng.choice([1, 2]),
        max_num_seqs=rng.choice([2, 3, 8]),
        max_num_batched_tokens=rng.choice([12, 13, 20, 100]),
        max_preemptions=rng.choice([1, 2, 9]),
        max_overtakes=rng.choice([0, 1000]),
        **options,
    )


def random_prompt(rng: random.Random, world: World, families: list[list[int]]) -> list[int]:
    """A family's first tokens, or what an earlier request said, and something new."""
    known = [r.all_token_ids for r in world.requests.values() if r.output_token_ids]
    head = rng.choice(known) if known and rng.random() < 0.3 else rng.choice(families)
    head = head[: rng.randint(1, 10)] if rng.random() < 0.3 else head[:10]
    return head + [rng.randrange(3) for _ in range(rng.randint(0, 2))]


def add_random_group(rng: random.Random, world: World, name: str, families: list[list[int]]):
    """One request, or three samples. None while some of that name are unfinished."""
    names = [name, f"{name}.0", f"{name}.1"]
    if not world.scheduler.requests.keys().isdisjoint(names):
        return
    prompt = random_prompt(rng, world, families)
    world.add(name, prompt, rng.randint(1, 10))
    for child in rng.choice([[], [], [], names[1:]]):
        world.add(child, prompt, rng.randint(1, 10))


def run_random_trace(seed: int) -> World:
    rng = random.Random(seed)
    world = random_world(rng)
    families = [prompt_of(rng.randint(4, 10), i) for i in range(2)]
    num_to_come = 8
    for _ in as_long_as(
        lambda: num_to_come or world.scheduler.has_unfinished_requests(), max_rounds=600
    ):
        if num_to_come and rng.random() < 0.4:
            num_to_come -= 1
            add_random_group(rng, world, f"r{rng.choice([num_to_come, num_to_come, 99])}", families)
        if rng.random() < 0.15:
            kinds = [world.proposer.num_spec_tokens, 0, lambda request_id: rng.randint(0, 5)]
            world.length.num_drafts = rng.choice(kinds)
        if rng.random() < 0.1:
            drafts = world.draft_plugin.drafts
            kept = {r: tokens[: rng.randint(0, len(tokens))] for r, tokens in drafts.items()}
            world.draft_plugin.drafts = {r: tokens for r, tokens in kept.items() if tokens}
        doomed = rng.choice(sorted(world.scheduler.requests) or [""])
        abort = rng.random() < 0.04
        if abort and rng.random() < 0.5:
            world.scheduler.abort_request(doomed)
            abort = False
        if rng.random() < 0.02:
            world.memory.reset_prefix_cache()
        world.step(
            (lambda doomed=doomed: world.scheduler.abort_request(doomed)) if abort else lambda: None
        )
    world.run()
    return world


@pytest.mark.net
@pytest.mark.sample(first_seed=3)
@pytest.mark.parametrize("first_seed", range(0, 100, 20))
def test_a_random_trace_has_the_drafts_of_a_model_without_blocks(first_seed):
    num_moved = num_preempted = num_cached = 0
    for seed in range(first_seed, first_seed + 20):
        try:
            world = run_random_trace(seed)
        except BaseException as error:
            error.args = (f"seed {seed}: {error}",)
            raise
        stats = world.scheduler.get_stats()
        num_moved += world.num_moved
        num_preempted += stats.total_preempted
        num_cached += stats.total_cached_tokens
    assert min(num_moved, num_preempted, num_cached) > 20, "else it shows little"
