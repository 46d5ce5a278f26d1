"""The loop: its tokens against transformers, its record against what really happened."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from bounded_loops import as_long_as
from engine_core import NO_FINITE_LOGITS, EngineCore, GreedySampler, SamplerOutput, StepRecord
from fcfs_scheduler import FCFSScheduler
from hf_model_runner import HFModelRunner
from request import Request, SamplingParams
from scheduler_interface import SchedulerOutput

VOCAB_SIZE = 61


def make(request_id: str, prompt: list[int], eos=(), **params) -> Request:
    return Request(request_id, prompt, SamplingParams(temperature=0, **params), eos_token_ids=eos)


def run(engine: EngineCore, *requests: Request) -> None:
    for request in requests:
        engine.add_request(request)
    for _ in as_long_as(engine.has_unfinished_requests):
        engine.step()


# -- against transformers


@pytest.mark.parametrize("seed", range(3))
def test_random_workloads_end_in_the_tokens_of_generate(qwen3, oracle, seed):
    """Arrivals during the run, aborts at random steps, every stop condition, every small limit. An
    aborted request has a prefix of its tokens. Traps 19, 29 and 49."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 3, 6, 9)]
    expected: dict[str, list[int]] = {}
    requests = []
    for i in range(9):
        prompt, max_tokens = rng.choice(prompts), rng.randint(1, 10)
        tokens = oracle(qwen3, prompt, max_tokens)
        eos = rng.sample(range(VOCAB_SIZE), 4)
        requests.append(make(str(i), prompt, eos, max_tokens=max_tokens))
        ends = [k + 1 for k, token in enumerate(tokens) if token in eos]
        expected[str(i)] = tokens[: ends[0]] if ends else tokens
    scheduler = FCFSScheduler(rng.choice([1, 3, 64]), rng.choice([9, 11, 100]))
    runner = HFModelRunner(qwen3)
    engine = EngineCore(scheduler, runner, check_invariants=True)
    coming, aborted = list(requests), set()
    for _ in as_long_as(lambda: coming or engine.has_unfinished_requests()):
        for _ in range(min(len(coming), rng.randint(0, 3))):
            engine.add_request(coming.pop(0))
        if rng.random() < 0.1 and scheduler.requests:
            hung_up = rng.choice(sorted(scheduler.requests))
            aborted.add(hung_up)
            engine.abort_request(hung_up)
        engine.step()
    for request in requests:
        tokens = expected[request.request_id]
        if request.request_id in aborted:
            assert request.finish_reason == "abort", f"seed {seed}"
            tokens = tokens[: request.num_output_tokens]
        assert request.output_token_ids == tokens, f"seed {seed}, request {request.request_id}"
    engine.step()
    assert not runner.cached_req_ids


# -- a scripted model, to make stops happen where they should


@dataclass
class ScriptedBatch:
    logit_req_ids: list[str]


class ScriptedRunner:
    """Says token `script[k]` to a request for the k-th time. Every plan must pass through
    `prepare`."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.num_said: dict[str, int] = {}
        self.plans: list[SchedulerOutput] = []
        self.num_forwards = 0

    def prepare(self, output: SchedulerOutput) -> ScriptedBatch:
        self.plans.append(output)
        for req_id in output.finished_req_ids:
            del self.num_said[req_id]
        for new in output.scheduled_new_reqs:
            self.num_said[new.req_id] = 0
        return ScriptedBatch(list(output.num_scheduled_tokens))

    def forward(self, batch: ScriptedBatch) -> torch.Tensor:
        self.num_forwards += 1
        logits = torch.zeros(len(batch.logit_req_ids), VOCAB_SIZE)
        for row, req_id in enumerate(batch.logit_req_ids):
            logits[row, self.script[self.num_said[req_id]]] = 1
            self.num_said[req_id] += 1
        return logits


SCRIPT = [20, 30, 21, 31, 22, 9, 23, 24, 25, 26, 27, 28]  # 30 and 31 are EOS, 9 is a stop token


@pytest.mark.parametrize(
    ("params", "num_tokens", "reason", "stop_reason"),
    [
        ({}, 2, "stop", None),
        ({"min_tokens": 2}, 2, "stop", None),
        ({"min_tokens": 3}, 4, "stop", None),  # the other EOS id (Trap 49)
        ({"min_tokens": 5}, 10, "length", None),
        ({"ignore_eos": True}, 10, "length", None),
        ({"ignore_eos": True, "stop_token_ids": [9]}, 6, "stop", 9),
        ({"ignore_eos": True, "stop_token_ids": [9], "min_tokens": 7}, 10, "length", None),
        ({"ignore_eos": True, "stop_token_ids": [31]}, 4, "stop", 31),
        ({"stop_token_ids": [20]}, 1, "stop", 20),
        ({"max_tokens": 1}, 1, "length", None),
        ({"max_tokens": 2}, 2, "stop", None),
    ],
)
def test_what_stops_a_request(params, num_tokens, reason, stop_reason):
    request = make("r", [1, 2], [30, 31], **{"max_tokens": 10, **params})
    engine = EngineCore(FCFSScheduler(), ScriptedRunner(SCRIPT), check_invariants=True)
    engine.add_request(request)
    results = []
    for _ in as_long_as(engine.has_unfinished_requests):
        results += engine.step()
    assert request.output_token_ids == SCRIPT[:num_tokens]
    assert [token for result in results for token in result.new_token_ids] == SCRIPT[:num_tokens]
    assert (results[-1].finish_reason, results[-1].stop_reason) == (reason, stop_reason)
    assert all(result.finish_reason is None for result in results[:-1])
    assert engine.num_steps == num_tokens


def test_the_record_of_a_run_by_hand():
    """Two slots and three requests: c takes the slot of b in the step after b's last."""
    records: list[StepRecord] = []
    runner = ScriptedRunner(SCRIPT)
    engine = EngineCore(FCFSScheduler(max_num_seqs=2), runner, on_step=records.append)
    run(
        engine,
        make("a", [1, 2, 3], max_tokens=3),
        make("b", [4], max_tokens=1),
        make("c", [5, 6], max_tokens=2),
    )
    facts = [(r.num_scheduled_tokens, r.start_positions, r.admitted, r.finished) for r in records]
    assert facts == [
        ({"a": 3, "b": 1}, {"a": 0, "b": 0}, ["a", "b"], {"b": "length"}),
        ({"c": 2, "a": 1}, {"c": 0, "a": 3}, ["c"], {}),
        ({"a": 1, "c": 1}, {"a": 4, "c": 2}, [], {"a": "length", "c": "length"}),
    ]
    assert [r.new_token_ids for r in records] == [
        {"a": [20], "b": [20]},
        {"c": [20], "a": [30]},
        {"a": [21], "c": [30]},
    ]
    assert [(r.num_running, r.num_waiting) for r in records] == [(1, 1), (2, 0), (0, 0)]
    assert [r.step for r in records] == [0, 1, 2]
    assert all(r.preempted == [] for r in records)


def test_the_records_add_up_to_what_every_request_did():
    rng = random.Random(0)
    records: list[StepRecord] = []
    engine = EngineCore(FCFSScheduler(3, 12), ScriptedRunner(SCRIPT), on_step=records.append)
    requests = [
        make(
            str(i),
            [1] * rng.randint(1, 9),
            [30],
            max_tokens=rng.randint(1, 9),
            ignore_eos=i % 2 > 0,
        )
        for i in range(12)
    ]
    run(engine, *requests)
    for request in requests:
        mine = [r for r in records if request.request_id in r.num_scheduled_tokens]
        counts = [r.num_scheduled_tokens[request.request_id] for r in mine]
        starts = [r.start_positions[request.request_id] for r in mine]
        assert starts == [sum(counts[:i]) for i in range(len(counts))], "a gap or an overlap"
        assert sum(counts) == request.num_prompt_tokens + request.num_output_tokens - 1
        tokens = [t for r in mine for t in r.new_token_ids[request.request_id]]
        assert tokens == request.output_token_ids
        assert [r.step for r in records if request.request_id in r.admitted] == [mine[0].step]
        ends = {
            r.step: r.finished[request.request_id] for r in mine if request.request_id in r.finished
        }
        assert ends == {mine[-1].step: request.finish_reason}


def test_the_times_are_those_of_the_five_lines(monkeypatch):
    """On a clock that only the five collaborators move, each by its own time, in seconds."""
    now = 100.0
    monkeypatch.setattr("engine_core.time.monotonic", lambda: now)

    def slow(owner: object, name: str, seconds: float) -> None:
        plain = getattr(owner, name)

        def method(*args):
            nonlocal now
            now += seconds
            return plain(*args)

        setattr(owner, name, method)

    records: list[StepRecord] = []
    engine = EngineCore(FCFSScheduler(), ScriptedRunner(SCRIPT), on_step=records.append)
    slow(engine.scheduler, "schedule", 1)
    slow(engine.runner, "prepare", 2)
    slow(engine.runner, "forward", 4)
    slow(engine.sampler, "sample", 8)
    slow(engine.scheduler, "update_from_output", 16)
    engine.add_request(make("a", [1], max_tokens=1))
    engine.step()
    engine.step()  # an empty one
    times = [
        (r.start_time, r.schedule_ms, r.prepare_ms, r.forward_ms, r.sample_ms, r.update_ms)
        for r in records
    ]
    assert times == [(100, 1e3, 2e3, 4e3, 8e3, 16e3), (131, 1e3, 2e3, 0, 0, 16e3)]
    assert [r.step_ms for r in records] == [31e3, 19e3]


def test_an_empty_step_computes_nothing_and_still_tells_the_runner():
    runner = ScriptedRunner(SCRIPT)
    engine = EngineCore(FCFSScheduler(), runner)
    assert engine.step() == [] and engine.num_steps == 1
    run(engine, make("a", [1], max_tokens=1))
    assert runner.num_said == {"a": 1}
    assert engine.step() == []
    assert runner.num_forwards == 1
    assert runner.num_said == {}, "the runner was not told that a has ended"
    assert [plan.finished_req_ids for plan in runner.plans] == [set(), set(), {"a"}]


def test_an_aborted_request_ends_at_once_and_others_do_not_notice():
    runner = ScriptedRunner(SCRIPT)
    engine = EngineCore(FCFSScheduler(max_num_seqs=2), runner, check_invariants=True)
    a, b, c = (make(name, [1, 2], max_tokens=4) for name in "abc")
    for request in (a, b, c):
        engine.add_request(request)
    engine.step()
    assert engine.get_request_counts() == (2, 1)
    engine.abort_request("a")
    assert (a.finish_reason, a.output_token_ids) == ("abort", SCRIPT[:1])
    assert engine.get_request_counts() == (1, 1)
    assert [result.request_id for result in engine.step()] == ["c", "b"]
    engine.abort_request("nobody")
    run(engine)
    assert b.output_token_ids == c.output_token_ids == SCRIPT[:4]


def test_an_abort_from_within_a_step_drops_its_token():
    """Between `schedule` and `update_from_output`, as a user who hangs up does."""
    engine = EngineCore(FCFSScheduler(), ScriptedRunner(SCRIPT), check_invariants=True)

    class AbortingSampler(GreedySampler):
        def sample(self, logits, batch):
            if engine.num_steps == 1:
                engine.abort_request("a")
            return super().sample(logits, batch)

    engine.sampler = AbortingSampler()
    a, b = make("a", [1], max_tokens=5), make("b", [1], max_tokens=5)
    run(engine, a, b)
    assert (a.output_token_ids, a.finish_reason) == (SCRIPT[:1], "abort")
    assert b.output_token_ids == SCRIPT[:5]


def test_a_refused_request_leaves_the_others_alone():
    engine = EngineCore(FCFSScheduler(max_num_batched_tokens=4), ScriptedRunner(SCRIPT))
    a = make("a", [1], max_tokens=3)
    engine.add_request(a)
    for bad in (make("a", [1]), make("long", [1] * 5)):
        with pytest.raises(ValueError):
            engine.add_request(bad)
    assert engine.get_request_counts() == (0, 1)
    run(engine)
    assert a.output_token_ids == SCRIPT[:3]


def test_log_probabilities_are_cut_with_the_tokens():
    """Trap 38: a sampler that offers more tokens than a request takes."""

    class ThreeAtOnce:
        def sample(self, logits, batch):
            return SamplerOutput({"a": [5, 6, 7]}, {"a": ["five", "six", "seven"]})

    engine = EngineCore(FCFSScheduler(), ScriptedRunner(SCRIPT), ThreeAtOnce())
    engine.add_request(make("a", [1], max_tokens=9, stop_token_ids=[6]))
    (result,) = engine.step()
    assert (result.new_token_ids, result.logprobs) == ([5, 6], ["five", "six"])


def test_the_greedy_sampler_gives_each_row_to_its_request():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    output = GreedySampler().sample(logits, ScriptedBatch(["b", "a"]))
    assert output.token_ids == {"b": [1], "a": [0]}
    with pytest.raises(ValueError):
        GreedySampler().sample(logits, ScriptedBatch(["b"]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None], ids=["nan", "inf", "all -inf"])
def test_the_greedy_sampler_gives_a_row_without_a_finite_maximum_to_nobody(bad):
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    if bad is None:
        logits[0] = float("-inf")
    else:
        logits[0, 1] = bad
    output = GreedySampler().sample(logits, ScriptedBatch(["b", "a"]))
    assert output.token_ids == {"a": [0]}
    assert output.errors == {"b": NO_FINITE_LOGITS}


def test_a_request_that_cannot_be_sampled_ends_and_the_others_go_on():
    class BadForA:
        def sample(self, logits, batch):
            output = GreedySampler().sample(logits, batch)
            if len(output.token_ids) == 2 and steps:
                del output.token_ids["a"]
                output.errors["a"] = "why"
            return output

    steps: list[StepRecord] = []
    engine = EngineCore(
        FCFSScheduler(),
        ScriptedRunner(SCRIPT),
        BadForA(),
        on_step=steps.append,
        check_invariants=True,
    )
    a, b = make("a", [1], max_tokens=4), make("b", [1], max_tokens=4)
    engine.add_request(a)
    engine.add_request(b)
    engine.step()
    of_b, of_a = engine.step()
    assert (of_a.new_token_ids, of_a.finish_reason, of_a.finish_detail) == ([], "error", "why")
    assert (of_b.new_token_ids, of_b.finish_reason) == ([SCRIPT[1]], None)
    assert steps[1].finished == {"a": "error"}
    run(engine)
    assert (a.finish_reason, a.output_token_ids) == ("error", SCRIPT[:1])
    assert (b.finish_reason, b.output_token_ids) == ("length", SCRIPT[:4])


def test_two_engines_share_nothing():
    """Trap 50."""
    one, other = (EngineCore(FCFSScheduler(), ScriptedRunner(SCRIPT)) for _ in range(2))
    a = make("a", [1], max_tokens=2)
    run(one, a)
    again = make("a", [1, 2, 3], max_tokens=4)
    run(other, again)
    assert (one.num_steps, other.num_steps) == (2, 4)
    assert (a.output_token_ids, again.output_token_ids) == (SCRIPT[:2], SCRIPT[:4])
