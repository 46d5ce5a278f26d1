"""Chapter 6 in the engine: however a prompt is cut, and whatever happens between two chunks of it,
greedy tokens are those of `transformers`, in float64."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from common.engine import EngineConfig, LLMEngine
from common.models.loader import LoadedModel
from common.requests.output_processor import RequestOutput
from common.tests.engine_oracle import MAX_TOKENS, Oracle, greedy_params, make_oracle
from step_record import StepRecord

SCHEDULERS = ("two_phase", "prefill_first")
CACHES = (None, "hash", "radix")
SHORT, LONG = 0, 1  # prompts of 16 and 33 tokens that share nothing


@dataclass
class Steps:
    """Watches an engine, and checks in every step that a request gets tokens if, and only if, all
    of its known ones are computed (Trap 31)."""

    engine: LLMEngine
    records: list[StepRecord] = field(default_factory=list)
    num_known: dict[str, int] = field(default_factory=dict)  # tokens, by request
    num_prompt: dict[str, int] = field(default_factory=dict)
    chunks: dict[str, list[int]] = field(default_factory=dict)  # pieces of prompts
    in_flight: dict[str, int] = field(default_factory=dict)  # outputs, of those between two chunks
    num_in_flight: list[int] = field(default_factory=list)  # by step, when it is over
    num_left: list[dict[str, int]] = field(default_factory=list)  # by step: behind when it began
    outputs: dict[str, RequestOutput] = field(default_factory=dict)

    def __call__(self, record: StepRecord) -> None:
        for request_id in record.preempted:
            self.in_flight.pop(request_id, None)
        self.num_left.append({})
        for request_id, num_tokens in record.num_scheduled_tokens.items():
            self._check(record, request_id, num_tokens)
        self.num_in_flight.append(len(self.in_flight))
        self.records.append(record)

    def _check(self, record: StepRecord, request_id: str, num_tokens: int) -> None:
        start = record.start_positions[request_id]
        num_known = self.num_known[request_id]
        sampled = record.new_token_ids[request_id]
        self.num_left[-1][request_id] = num_known - start
        if start < self.num_prompt[request_id]:
            self.chunks[request_id].append(num_tokens)
        if start + num_tokens < num_known:
            assert sampled == [], f"{request_id}: a token from inside a prompt"
            self.in_flight[request_id] = num_known
        else:
            assert start + num_tokens == num_known
            assert len(sampled) == 1, f"{request_id}: no token at the end"
            self.in_flight.pop(request_id, None)
        self.num_known[request_id] += len(sampled)

    def add(self, name: str, prompt: list[int], max_tokens: int, n: int = 1) -> None:
        self.engine.add_request(name, prompt, greedy_params(max_tokens, n))
        self.outputs.pop(name, None)  # of an earlier request of this name
        for request_id in [name] if n == 1 else [f"{name}#{i}" for i in range(n)]:
            self.num_known[request_id] = self.num_prompt[request_id] = len(prompt)
            self.chunks[request_id] = []

    def finish(self) -> dict[str, RequestOutput]:
        for _ in range(3000):
            if not self.engine.has_unfinished_requests():
                assert self.engine.stats().kv_blocks_in_use == 0
                return self.outputs
            self.step()
        raise AssertionError("the engine does not come to an end")

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.outputs |= {o.request_id: o for o in self.engine.step() if o.finished}

    def serve(self, oracle: Oracle, indices: list[int], max_tokens: int, n: int = 1) -> None:
        """Prompts `indices` at once, by these names; every token is compared."""
        for i in indices:
            self.add(str(i), oracle.prompts[i], max_tokens, n)
        outputs = self.finish()
        for i in indices:
            found = [c.token_ids for c in outputs[str(i)].outputs]
            assert found == [oracle.expected(i, max_tokens)] * n, f"prompt {i}"


def watch(loaded: LoadedModel, **config) -> Steps:
    defaults = {"block_size": 4, "num_blocks": 200, "check_invariants": True, "shuffle_batch": True}
    engine = LLMEngine(EngineConfig(**(defaults | config)), loaded=loaded)
    steps = Steps(engine)
    engine.on_step = steps
    return steps


# -- where chunks end


@pytest.mark.sample
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("size", range(1, 36))
def test_every_chunk_size(size, scheduler, oracle, loaded):
    assert [len(oracle.prompts[i]) for i in (SHORT, LONG)] == [16, 33]
    steps = watch(loaded, scheduler=scheduler, chunked_prefill=size, prefix_cache=None)
    steps.serve(oracle, [LONG, SHORT], 4)
    long, short = steps.chunks[str(LONG)], steps.chunks[str(SHORT)]
    assert sum(long) == 33 and sum(short) == 16
    if scheduler == "two_phase":  # each prompt has a limit of its own
        assert long == [size] * (33 // size) + [33 % size] * (33 % size > 0)
        assert short == [size] * (16 // size) + [16 % size] * (16 % size > 0)
    else:  # all share one, and a cut is at the end of a block, if there is one
        for record, left in zip(steps.records, steps.num_left):
            is_prefill = any(num_left > 1 for num_left in left.values())
            assert sum(record.num_scheduled_tokens.values()) <= size or not is_prefill
        assert size < 4 or all(n % 4 == 0 for n in long[:-1] + short[:-1])


@pytest.mark.sample
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("block_size", range(1, 6))
@pytest.mark.parametrize("size", range(1, 8))
def test_every_offset_of_a_chunk_in_a_block(size, block_size, scheduler, oracle, loaded):
    """The second time, what the chunks have written is read from the cache."""
    steps = watch(loaded, scheduler=scheduler, chunked_prefill=size, block_size=block_size)
    for _ in range(2):
        steps.serve(oracle, [LONG], 2)
    assert steps.engine.stats().cached_tokens == 32 // block_size * block_size


@pytest.mark.sample
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("size", [4, 8, 16, 48])
def test_prompts_that_are_multiples_of_block_and_chunk(size, block_size, scheduler, oracle, loaded):
    """Trap 30. The second time all of a prompt is cached, and its last token computed again."""
    indices = [i for i, prompt in enumerate(oracle.prompts) if len(prompt) in (16, 32, 48)]
    assert {len(oracle.prompts[i]) for i in indices} == {16, 32, 48}
    steps = watch(loaded, scheduler=scheduler, chunked_prefill=size, block_size=block_size)
    for _ in range(2):
        steps.serve(oracle, indices, 3)


@pytest.mark.sample
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("size", [8, 16, 17, 28, 29, 30, 31, 32])
def test_a_chunk_is_the_whole_step_and_the_prompt_a_little_longer(size, scheduler, oracle, loaded):
    """Trap 25: the last tokens of one prompt and the first of the next are in one step, and where
    there is one slot for a prompt that is cut, only one of the two has it."""
    limits = {"chunked_prefill": size, "max_num_batched_tokens": size}
    steps = watch(loaded, scheduler=scheduler, **limits)
    steps.serve(oracle, [LONG, SHORT, 3, 6], 5)
    assert max(sum(r.num_scheduled_tokens.values()) for r in steps.records) <= size
    assert max(steps.num_in_flight) == 1
    assert steps.chunks[str(LONG)][0] >= size // 4 * 4


# -- prefix hits


@pytest.fixture(scope="module")
def forked_oracle(family_oracle: Oracle) -> Oracle:
    """Prompt `p` has `p` tokens of the last prompt, and 1 to 12 others then."""
    trunk = family_oracle.prompts[LONG]
    rng = random.Random(4)
    prompts = []
    for p in range(21):
        other = (trunk[p] + 1 + rng.randrange(95)) % 97
        prompts.append([*trunk[:p], other, *(rng.randrange(97) for _ in range(5 * p % 12))])
    return make_oracle(family_oracle.path, [*prompts, trunk])


@pytest.mark.sample
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_a_prefix_hit_ends_inside_a_chunk(cache, scheduler, forked_oracle, loaded):
    trunk = len(forked_oracle.prompts) - 1
    for p in range(3, 15):  # every place in a block and in a chunk
        steps = watch(loaded, scheduler=scheduler, chunked_prefill=6, prefix_cache=cache)
        steps.serve(forked_oracle, [trunk], 2)
        steps.serve(forked_oracle, [p], 4)
        assert steps.engine.stats().cached_tokens == p // 4 * 4, f"{p} tokens are shared"
        assert sum(steps.chunks[str(p)]) == len(forked_oracle.prompts[p]) - p // 4 * 4


@pytest.mark.sample
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_a_prefix_is_shared_while_its_prompt_is_under_way(cache, scheduler, forked_oracle, loaded):
    """The second request comes in every step of the first one's prompt."""
    trunk = len(forked_oracle.prompts) - 1
    for p, when in itertools.product((14, 20), range(8)):
        steps = watch(loaded, scheduler=scheduler, chunked_prefill=5, prefix_cache=cache)
        steps.add("trunk", forked_oracle.prompts[trunk], 6)
        steps.step(when)
        steps.add("fork", forked_oracle.prompts[p], 6)
        outputs = steps.finish()
        assert outputs["trunk"].outputs[0].token_ids == forked_oracle.expected(trunk, 6)
        assert outputs["fork"].outputs[0].token_ids == forked_oracle.expected(p, 6), (p, when)


# -- between two chunks


def take_kv(engine: LLMEngine, request_id: str) -> bool:
    """Preempt a request between two steps, if it runs."""
    request = engine.scheduler.running.get(request_id)
    if request is not None:
        getattr(engine.scheduler, "_retract", engine.scheduler.preempt)(request)
    return request is not None


@pytest.mark.sample(cache=2)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("cache", CACHES)
def test_who_is_preempted_again_on_its_way_back_keeps_its_outputs(cache, scheduler, oracle, loaded):
    """Trap 24: at every step of the way, prompt and outputs are computed in chunks once more."""
    seen = set()
    for first, second in itertools.product((3, 12), range(1, 8)):
        steps = watch(loaded, scheduler=scheduler, chunked_prefill=5, prefix_cache=cache)
        engine = steps.engine
        for i in (LONG, SHORT):
            steps.add(str(i), oracle.prompts[i], 10)
        num_taken = 0
        for step in range(first + second + 1):
            if step in (first, first + second) and take_kv(engine, str(LONG)):
                num_taken += 1
                if (num_known := steps.in_flight.pop(str(LONG), None)) is not None:
                    seen.add((num_taken, num_known > 33))
            steps.step()
        for name, output in steps.finish().items():
            expected = oracle.expected(int(name), 10)
            assert output.outputs[0].token_ids == expected, f"prompt {name}: {first}, {second}"
    assert {(1, False), (2, False)} <= seen, "in its prompt"
    assert cache is not None or (2, True) in seen, "in what it brought back: prompt and outputs"


@pytest.mark.sample(cache=2)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("cache", CACHES)
def test_aborted_between_any_two_chunks(cache, scheduler, oracle, loaded):
    """Of two prompts with a common beginning the first is aborted; the other two do not notice."""
    first, second = 11, 12
    assert oracle.prompts[first][:33] == oracle.prompts[second][:33]
    num_between = 0
    for when in range(14):
        steps = watch(loaded, scheduler=scheduler, chunked_prefill=5, prefix_cache=cache)
        engine = steps.engine
        for i in (SHORT, first, second):
            steps.add(str(i), oracle.prompts[i], 6)
        steps.step(when)
        num_between += str(first) in steps.in_flight
        aborted = engine.abort_request(str(first))
        engine.check_invariants()
        outputs = steps.finish()
        if aborted is not None:
            tokens = aborted.outputs[0].token_ids
            assert tokens == oracle.expected(first, 6)[: len(tokens)]
        for i in (SHORT, second):
            assert outputs[str(i)].outputs[0].token_ids == oracle.expected(i, 6), f"{i}, {when}"
        assert engine.stats().kv_blocks_in_use == 0
    assert num_between > 4


# -- options


def test_a_chunk_that_grows_leaves_room_for_those_who_decode_behind_it(oracle, loaded):
    steps = watch(loaded, max_num_batched_tokens=8, target_step_ms=5.0, prefix_cache=None)
    steps.engine.scheduler.chunk_policy._fitting = lambda start: 2 if start == 0 else 100
    steps.add(str(LONG), oracle.prompts[LONG], 4)
    for i in range(3):
        steps.add(f"short {i}", oracle.prompts[SHORT][:2], 4)
    steps.step(4)
    assert steps.chunks[str(LONG)] == [2, 5, 5, 5]
    assert all(len(steps.outputs[f"short {i}"].outputs[0].token_ids) == 4 for i in range(3))
    assert steps.finish()[str(LONG)].outputs[0].token_ids == oracle.expected(LONG, 4)


def num_long_at_once(steps: Steps, threshold: int) -> list[int]:
    return [sum(num > threshold for num in left.values()) for left in steps.num_left]


@pytest.mark.parametrize("most", [1, 2, None])
def test_so_many_long_prompts_are_under_way(most, oracle, loaded):
    steps = watch(loaded, chunked_prefill=8, max_long_partial_prefills=most, prefix_cache=None)
    long = [2, LONG, 10, 12]
    assert all(len(oracle.prompts[i]) > 32 for i in long)
    for i in long:
        steps.add(str(i), oracle.prompts[i], 4)
    for name in ("short", "shorter"):
        steps.add(name, oracle.prompts[SHORT][:8], 4)
    outputs = steps.finish()
    for i in long:
        assert outputs[str(i)].outputs[0].token_ids == oracle.expected(i, 4)
    assert max(num_long_at_once(steps, 8)) == (most or len(long))
    first = {name: k for k, r in reversed([*enumerate(steps.records)]) for name in r.new_token_ids}
    assert first["short"] == first["shorter"] == 0, "the short ones pass"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_those_who_decode_go_on_beside_chunks(scheduler, oracle, loaded):
    """In every step with mixing and with the two phases. Without, at least in every ninth."""

    def longest_pause(**options) -> int:
        steps = watch(loaded, scheduler=scheduler, chunked_prefill=8, prefix_cache=None, **options)
        steps.add(str(SHORT), oracle.prompts[SHORT], MAX_TOKENS)
        steps.step(6)
        for i in (LONG, 12):
            steps.add(str(i), oracle.prompts[i], 2)
        outputs = steps.finish()
        assert outputs[str(SHORT)].outputs[0].token_ids == oracle.expected(SHORT, MAX_TOKENS)
        assert outputs[str(LONG)].outputs[0].token_ids == oracle.expected(LONG, 2)
        assert outputs["12"].outputs[0].token_ids == oracle.expected(12, 2)
        assert any(
            left.get(str(SHORT)) == 1 and max(left.values()) > 1 for left in steps.num_left
        ) == (scheduler == "two_phase" or bool(options))
        if options:  # of the chunk, those who decode have their share
            mixed = [sum(r.num_scheduled_tokens.values()) for r in steps.records[6:]]
            assert max(mixed) <= 8
        got = [k for k, r in enumerate(steps.records) if r.new_token_ids.get(str(SHORT))]
        return max(b - a for a, b in itertools.pairwise(got))

    if scheduler == "two_phase":
        assert longest_pause() == 1
    else:
        assert longest_pause(mixing=True) == 1
        assert longest_pause() == 9


@pytest.mark.parametrize(
    "scheduler, mixing", [("two_phase", False), ("prefill_first", False), ("prefill_first", True)]
)
def test_chunks_of_the_size_that_there_is_time_for(mixing, scheduler, oracle, loaded):
    largest = {}
    for target in (1e-6, 1e6):
        options = {"mixing": mixing, "target_step_ms": target, "prefix_cache": None}
        steps = watch(loaded, scheduler=scheduler, **options)
        for _ in range(2):
            steps.serve(oracle, [10, 12, LONG, 13], 6)
        prefills = [
            sum(n for name, n in record.num_scheduled_tokens.items() if left[name] > 1)
            for record, left in zip(steps.records, steps.num_left)
        ]
        assert prefills[0] == 16  # nothing is known yet
        beside = [n for n, left in zip(prefills, steps.num_left) if 1 in left.values()]
        assert target > 1 or max(beside, default=0) <= 16
        largest[target] = max(prefills)
    assert min(largest.values()) > 64  # a target that no step meets limits only steps with decodes


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_one_prompt_is_cut_in_several_ways_and_gives_one_text(scheduler, oracle, loaded):
    """Chunks of a clock's size, faked: any sizes whatever. Where there is one slot for a prompt
    that is cut, the rest of the step is for whole ones (Trap 25)."""
    for seed in range(8):
        rng = random.Random(seed)
        steps = watch(loaded, scheduler=scheduler, target_step_ms=5.0)
        policy = steps.engine.scheduler.chunk_policy
        policy._fitting = lambda start, rng=rng: rng.choice([1, 1, 2, 3, 5, 8, 13])
        steps.serve(oracle, [LONG, SHORT, 12], 5)
        assert scheduler == "two_phase" or max(steps.num_in_flight) == 1
