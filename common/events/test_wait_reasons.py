"""Watching changes nothing, and costs nothing unless requested; the file is complete whatever ends
the process; and the reason why a request waits is the right one, with every scheduler."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bounded_loops import as_long_as
from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.events.frames import REASONS, reasons_to_wait
from common.events.run_line import _plain
from common.events.wait_reasons import WaitReasons
from common.llm import LLM
from common.tests.engine_oracle import Oracle, failing_steps, finish
from common.tests.film_runs import Workshop, short_prompts
from kv_connector import KVConnector
from request import Request, RequestStatus, SamplingParams
from step_record import StepRecord
from tiered_cache import KVTierConfig
from workshop.watch.replay.film import Film

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ROOT = Path(__file__).resolve().parents[2]


def make_engine(loaded, events: Path | None, **config) -> LLMEngine:
    small = {"block_size": 4, "num_blocks": 60, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    return LLMEngine(EngineConfig(events=events, **{**small, **config}), loaded=loaded)


# -- invisible


def record_fields(record: StepRecord) -> dict:
    """All but the clock."""
    is_clock = lambda name: name == "start_time" or name.endswith("_ms")  # noqa: E731
    return {name: value for name, value in asdict(record).items() if not is_clock(name)}


@pytest.mark.parametrize(
    "config",
    [
        {"policy": "lpm", "prefix_cache": "radix", "num_blocks": 30},
        {"policy": "dfs-weight", "kv_tiers": KVTierConfig(64), "num_blocks": 30},
        {"scheduler": "prefill_first", "preempt_every": 3, "policy": "random"},
        {"scheduler": "fcfs", "chunked_prefill": False, "max_num_batched_tokens": 256},
        {"overlap_scheduling": True, "shuffle_waiting": True, "num_blocks": 30},
        {"speculative": {"method": "ngram", "adaptive": False}, "chunked_prefill": 7},
    ],
    ids=lambda config: "-".join(map(str, config)),
)
def test_a_watched_engine_takes_the_same_steps(
    config: dict, family_oracle: Oracle, family_loaded, tmp_path: Path
) -> None:
    """The same plans, tokens and blocks, not only the same text; and the same uses of the cache."""
    told = []
    for events in (None, tmp_path / "run.jsonl"):
        engine, did = make_engine(family_loaded, events, **config), []

        def look(record: StepRecord, engine=engine, did=did) -> None:
            cache, pool = engine.prefix_cache, engine.kv_manager.pool
            uses = list(getattr(cache, "_evictable", ())), getattr(cache, "_clock", 0)
            did.append((record_fields(record), [b.block_id for b in pool.free_order()], uses))

        engine.on_step = look
        for i, prompt in enumerate(short_prompts(family_oracle, 50)[:12]):
            engine.add_request(str(i), prompt, replace(GREEDY, n=1 + i % 2), priority=i % 3)
            if i % 3 == 0:
                engine.step()
        finish(engine)
        engine.close()
        told.append(did)
    assert told[0] == told[1]


def test_without_events_no_reasons_are_recorded(random_loaded) -> None:
    engine = make_engine(random_loaded, None)
    scheduler, manager = engine.scheduler, engine.kv_manager
    parts = [engine.core, scheduler, scheduler.waiting.policy, scheduler.chunk_policy]
    parts += [manager, manager.pool, manager.cache]
    parts += [engine.recorder.scheduler, *scheduler.plugins]
    assert not [part for part in parts if type(part).__module__.startswith("common.events")]


# -- the file


def test_a_stop_string_in_the_last_token_that_may_come_is_the_reason(tmp_path: Path) -> None:
    """For the user and in the recorded run, the stop string has precedence over `max_tokens`."""
    path = tmp_path / "run.jsonl"
    llm = LLM(events=path, num_blocks=50, dtype="float32", num_threads=1)

    def serve_one(**options):
        params = replace(GREEDY, **options)
        return llm.generate("def add(a, b):", params, use_tqdm=False)[0].outputs[0]

    whole, less = serve_one(max_tokens=4).text, serve_one(max_tokens=3).text
    last = whole.removeprefix(less)
    output = serve_one(max_tokens=4, stop=(last,))
    assert (output.text, output.finish_reason, output.stop_reason) == (less, "stop", last)
    ended = [*Film.read(path).requests().values()][-1]
    finish = ended["finish"]
    assert (ended["text"], finish["reason"], finish["stop_reason"]) == (less, "stop", last)
    assert "".join(ended["prompt_pieces"]) == "def add(a, b):"


def test_the_run_line_describes_the_run_without_a_folder(
    random_loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    tiers = KVTierConfig(8, 4, disk_path=str(tmp_path / "blocks"))
    engine = make_engine(random_loaded, path, kv_tiers=tiers, policy="lpm", model=str(tmp_path))
    engine.close()
    run = Film.read(path).run
    assert (run.block_size, run.num_blocks, run.policy, run.overlaps) == (4, 60, "lpm", False)
    assert run.config["kv_tiers"]["disk_path"] == "blocks"
    assert run.model["architecture"] == "Qwen3ForCausalLM" and "torch" in run.versions
    assert str(tmp_path) not in path.read_text()
    assert _plain("adapters", {"tests": f"{tmp_path}/one"}) == {"tests": "one"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    assert _plain("adapters", {"tests": "../" + tmp_path.name + "/some"}) == {"tests": "some"}


NO_PLACES = (
    (".", ValueError, "a file, not a folder"),
    ("none/run.jsonl", FileNotFoundError, "in an existing folder"),
    ("run.jsonl/run", FileNotFoundError, "in an existing folder"),
)


def test_each_step_is_in_the_file_when_it_returns(
    random_oracle: Oracle, random_loaded, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(random_loaded, path)
    engine.add_request("a", random_oracle.prompts[0], GREEDY)
    assert Film.read(path).lines == []
    for step, (place, error, named) in enumerate(NO_PLACES):
        engine.step()
        with pytest.raises(error, match=f"events must be {named}"):
            engine.watch(tmp_path / place)
        assert Film.read(path).num_steps == step + 1
        assert path.read_bytes().endswith(b"\n")
    engine.abort_request("a")
    assert Film.read(path).requests()["a"]["finish"]["reason"] == "abort"


# -- errors, and two steps in flight


@pytest.mark.parametrize(
    ("overlaps", "begins_late"), [(False, False), (True, False), (False, True)]
)
def test_a_step_that_fails_is_in_the_film_and_the_engine_goes_on(
    overlaps: bool, begins_late: bool, random_oracle: Oracle, random_loaded, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    config = {"overlap_scheduling": overlaps, "max_num_seqs": 1}
    engine = make_engine(random_loaded, None if begins_late else path, **config)
    engine.add_request("a", random_oracle.prompts[0], GREEDY)
    engine.add_request("b", random_oracle.prompts[1], GREEDY)
    engine.step()
    if begins_late:
        engine.watch(path)
    with failing_steps(engine), pytest.raises(MemoryError):
        for _ in range(3):
            engine.step()
    (output,) = (o for o in finish(engine).values() if o.request_id == "b")
    film = Film.read(path)
    (error,) = [step.result["error"] for step in film.steps() if "error" in step.result]
    assert error == "MemoryError: none left"
    requests = film.requests()
    assert requests["a"]["finish"]["reason"] == "abort"
    assert requests["b"]["outputs"] == output.outputs[0].token_ids
    assert not film.last_state()["in_flight"]


def test_with_overlap_the_next_plan_precedes_the_results_of_the_last(
    random_oracle: Oracle, random_loaded, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(random_loaded, path, overlap_scheduling=True)
    stop = random_oracle.expected(0, 3)[-1]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop_token_ids=[stop])
    engine.add_request("a", random_oracle.prompts[0], params)
    finish(engine)
    engine.close()
    film = Film.read(path)
    assert film.run.overlaps
    found = [line["at"] for line in film.lines if line["at"] != "between"]
    assert found[:4] == ["plan", "plan", "result", "plan"]
    assert [len(step.state["in_flight"]) for step in film.steps()][:2] == [1, 1]
    discarded = [step.result.get("discarded", {}) for step in film.steps()]
    assert sum(map(len, discarded)) == 1, "a token was computed after the stop token"
    assert not film.last_state()["in_flight"]


# -- wait reasons


def reasons(path: Path) -> list[dict[str, str]]:
    """Why each request waits, after each plan."""
    frames = [frame for step in Film.read(path).steps() for frame in step.frames]
    return [reasons_to_wait(after) for at, _, after in frames if at == "plan"]


SCHEDULERS = [
    {"scheduler": "two_phase"},
    {"scheduler": "prefill_first"},
    {"scheduler": "fcfs", "chunked_prefill": False},
]


def first_reasons(engine: LLMEngine, path: Path, prompts: dict[str, list[int]], **options) -> dict:
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, replace(GREEDY, **options))
    engine.step()
    return reasons(path)[0]


def tokens(num: int, seed: int = 0) -> list[int]:
    return [(7 * i + 13 * seed) % 97 for i in range(num)]


@pytest.mark.parametrize("config", SCHEDULERS, ids=lambda config: config["scheduler"])
def test_slots_budget_and_blocks_are_reasons(config: dict, random_loaded, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    three = {"a": tokens(20), "b": tokens(20, 1), "c": tokens(20, 2)}
    engine = make_engine(random_loaded, path, max_num_seqs=1, **config)
    assert first_reasons(engine, path, three) == {"b": "seat", "c": "seat"}
    engine = make_engine(random_loaded, path, max_num_batched_tokens=32, **config)
    found = first_reasons(engine, path, three)
    assert found["c"] == "budget" and set(found) <= {"b", "c"}
    engine = make_engine(random_loaded, path, num_blocks=1 + 8, watermark=0.0, **config)
    assert first_reasons(engine, path, three) == {"b": "blocks", "c": "blocks"}


@pytest.mark.parametrize("config", SCHEDULERS, ids=lambda config: config["scheduler"])
def test_a_request_that_waits_for_a_prefix_names_the_other_request(
    config: dict, random_loaded, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(random_loaded, path, **config)
    prompts = {"a": tokens(20), "b": [*tokens(20), 5, 6], "c": tokens(12, 3)}
    assert first_reasons(engine, path, prompts) == {"b": "parent"}
    (plan,) = Film.read(path).step(0).plans
    assert plan["parents"] == {"b": "a"} and "stop" not in plan
    assert plan["requests"] == ["a", "c"], "it was skipped"


def test_a_constraint_holds_back_only_one_request(random_loaded, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(
        random_loaded, path, chunked_prefill=8, max_long_partial_prefills=1, num_blocks=60
    )
    prompts = {"long": tokens(20), "longer": tokens(30, 1), "short": tokens(5, 2)}
    assert first_reasons(engine, path, prompts) == {"longer": "constraint"}


class SlowStore(KVConnector):
    """Has the first block of everything, and is asked twice before it comes."""

    num_calls = 0

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return (4, True) if num_computed_tokens == 0 and request.num_tokens > 4 else (0, False)

    def update_state_after_alloc(self, request, block_ids, num_external_tokens) -> None:
        self.block_ids = block_ids

    def get_finished_load(self, request_id):
        self.num_calls += 1
        return None if self.num_calls < 3 else 0

    def cancel_load(self, request_id) -> None: ...

    def request_finished(self, request, block_ids) -> None: ...

    def wait_for_load(self, timeout_s) -> None: ...

    def close(self) -> None: ...


def test_a_kv_load_is_a_separate_reason(random_loaded, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(random_loaded, path, kv_connector=SlowStore())
    assert first_reasons(engine, path, {"a": tokens(9)}) == {"a": "remote_kv"}
    finish(engine)
    found = [happened for step in Film.read(path).steps() for happened in step.happened]
    (begun,) = [i for i, happened in enumerate(found) if happened["loads_begun"] == ["a"]]
    (ended,) = [i for i, happened in enumerate(found) if happened["loads_ended"] == ["a"]]
    assert begun < ended
    assert Film.read(path).last_state()["loaded"] == {}, "the load has failed"


class ReadyStore(SlowStore):
    """Has one block more than the cache, which comes."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return (4, True) if request.num_tokens > num_computed_tokens + 4 else (0, False)

    def get_finished_load(self, request_id) -> int:
        return 4


def test_loads_from_a_store_without_tiers_are_counted(random_loaded, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(random_loaded, path, kv_connector=ReadyStore())
    for name, num_tokens in (("a", 9), ("b", 17)):  # the second load extends two cached blocks
        engine.add_request(name, tokens(num_tokens), GREEDY)
        finish(engine)
    assert Film.read(path).last_state()["loaded"] == {"store": 2}


def test_a_decode_turn_is_a_reason(random_loaded, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(random_loaded, path, scheduler="prefill_first", max_num_seqs=30)
    engine.add_request("first", tokens(4), replace(GREEDY, max_tokens=20))
    for i in range(15):  # one prompt in each step
        engine.add_request(str(i), tokens(60, i), replace(GREEDY, max_tokens=1))
    for _ in as_long_as(engine.has_unfinished_requests):
        engine.step()
    plans = [plan for step in Film.read(path).steps() for plan in step.plans]
    assert "turn" in [plan["stop"][0] for plan in plans if "stop" in plan]


def test_a_preempted_request_waits_for_blocks_and_returns(
    random_oracle: Oracle, random_loaded, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    config = {"num_blocks": 1 + 8, "prefix_cache": None, "watermark": 0.0}
    engine = make_engine(random_loaded, path, **config)
    for name in "ab":
        prompt = tokens(12, ord(name))
        engine.add_request(name, prompt, replace(GREEDY, max_tokens=16))
    finish(engine)
    film = Film.read(path)
    found = [(step.number, happened) for step in film.steps() for happened in step.happened]
    gone = [n for n, happened in found for name, *_ in happened["preempted"] if name == "b"]
    admitted = [(n, item) for n, happened in found for item in happened["admitted"]]
    back = [n for n, (name, _, is_back) in admitted if name == "b" and is_back]
    assert gone and back and gone[0] < back[0]
    at = next(i for i, found in enumerate(reasons(path)) if "b" in found)
    assert reasons(path)[at : at + 2] == [{"b": "preempting"}, {"b": "blocks"}]
    assert film.requests()["b"]["num_preemptions"] >= 1


def test_random_runs_give_each_waiting_request_one_known_reason(
    workshop: Workshop,
) -> None:
    for seed in (3, 13, 14):
        for found in reasons(workshop.run(seed).path):
            assert set(found.values()) <= REASONS.keys(), found


def test_lost_and_cached_tokens_belong_to_the_request_and_the_step() -> None:
    memory: Any = SimpleNamespace(current_req_id="a", blocking_req_id=None, cache=None)
    reasons = WaitReasons(memory, lambda request: None, lambda: None)
    request = Request.from_tokens("a", tokens(9))
    watched: Any = SimpleNamespace(running={}, max_num_seqs=0, requests={"a": request})
    reasons.watched = watched
    request.num_preemptions = 2
    plan: Any = SimpleNamespace(scheduled_requests=[request], start_positions=[0])
    for num_computed in (6, 4):  # preempted again before it had recomputed all of the six
        request.num_computed_tokens = num_computed
        reasons.on_preempt(request)
    reasons.matched(SimpleNamespace(num_cached_tokens=4, blocks=[SimpleNamespace(block_id=3)]))  # type: ignore[arg-type]
    decisions = reasons.decisions(plan, ["a"])
    assert (decisions["recomputed"], decisions["found"]) == ({"a": 6}, {"a": [3]})
    reasons.begin_step()
    reasons.on_finish(request)  # another request may get its id
    decisions = reasons.decisions(plan, ["a"])
    assert (decisions["recomputed"], decisions["found"]) == ({}, {})


def test_a_request_that_was_passed_unread_has_the_reason_of_its_status() -> None:
    memory: Any = SimpleNamespace(current_req_id=None, blocking_req_id=None, cache=None)
    reasons = WaitReasons(memory, lambda request: None, lambda: None)
    requests = {name: Request.from_tokens(name, tokens(9)) for name in "abc"}
    requests["a"].status = RequestStatus.WAITING_FOR_GRAMMAR
    requests["b"].status = RequestStatus.WAITING_FOR_REMOTE_KVS
    watched: Any = SimpleNamespace(running={}, max_num_seqs=0, requests=requests)
    reasons.watched = watched
    plan: Any = SimpleNamespace(scheduled_requests=[], start_positions=[])
    decisions = reasons.decisions(plan, ["a", "b", "c"])
    assert decisions["skipped"] == {"a": "grammar", "b": "remote_kv"}


def test_kinds_of_tokens_are_distinguished(random_oracle, random_loaded, tmp_path: Path) -> None:
    """Prompt, decode and draft tokens, and tokens lost by a preemption."""
    path = tmp_path / "run.jsonl"
    engine = make_engine(
        random_loaded,
        path,
        speculative={"method": "ngram", "min_ngram": 1, "adaptive": False},
        preempt_every=7,
        prefix_cache=None,
    )
    engine.add_request("a", [1, 2, 3] * 5, replace(GREEDY, max_tokens=20))
    engine.add_request("b", [4, 5, 6, 7] * 3, replace(GREEDY, max_tokens=20))
    outputs = finish(engine)
    film = Film.read(path)
    found: dict[str, int] = {}
    for step in film.steps():
        for _, kind, _, num in step.cells():
            found[kind] = found.get(kind, 0) + num
    verified = [v for step in film.steps() for v in step.result.get("verified", {}).values()]
    accepted, rejected = map(sum, zip(*verified, strict=True))
    num_outputs = sum(len(output.outputs[0].token_ids) for output in outputs.values())
    stats = engine.stats()
    assert (accepted, accepted + rejected) == (stats.num_accepted_tokens, stats.num_drafted_tokens)
    assert found["draft"] == accepted + rejected and accepted > 0
    assert found["recomputed"] == stats.recomputed_tokens > 0
    assert found["prompt"] == 15 + 12
    # Each token is fed back once, but for the last of each request.
    assert found["decode"] + accepted == num_outputs - 2
    assert sum(found.values()) == stats.scheduled_tokens
