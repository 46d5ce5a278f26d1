"""The reason why a request waits is the right one, with every scheduler; tokens of each kind are
counted as the engine counts them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bounded_loops import as_long_as
from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.tests.engine_oracle import finish
from kv_connector import KVConnector
from request import SamplingParams
from workshop.watch.replay.film import Film
from workshop.watch.replay.frame_facts import reasons_to_wait

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SIZES = {"block_size": 4, "num_blocks": 60, "max_num_batched_tokens": 64, "max_num_seqs": 4}


def make_engine(loaded, path: Path, **config) -> LLMEngine:
    return LLMEngine(EngineConfig(**{**SIZES, "events": path, **config}), loaded=loaded)


def tokens(num: int, seed: int = 0) -> list[int]:
    return [(7 * i + 13 * seed) % 97 for i in range(num)]


def reasons(path: Path) -> list[dict[str, str]]:
    """Why each request waits, after each plan."""
    frames = [frame for step in Film.read(path).steps() for frame in step.frames]
    return [reasons_to_wait(after) for at, _, after in frames if at == "plan"]


class SlowStore(KVConnector):
    """Has the first block of everything, and is asked twice before it comes to nothing."""

    num_calls = 0

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return (4, True) if num_computed_tokens == 0 and request.num_tokens > 4 else (0, False)

    def update_state_after_alloc(self, request, block_ids, num_external_tokens) -> None: ...

    def get_finished_load(self, request_id):
        self.num_calls += 1
        return None if self.num_calls < 3 else 0

    def cancel_load(self, request_id) -> None: ...

    def request_finished(self, request, block_ids) -> None: ...

    def wait_for_load(self, timeout_s) -> None: ...

    def close(self) -> None: ...


THREE = {"a": tokens(20), "b": tokens(20, 1), "c": tokens(20, 2)}
SCHEDULERS = [
    {"scheduler": "two_phase"},
    {"scheduler": "prefill_first"},
    {"scheduler": "fcfs", "chunked_prefill": False},
]
FIRST: list[tuple[dict, dict, dict]] = [  # settings, prompts, why each waits after the first plan
    *(
        (scheduler | config, prompts, expected)
        for scheduler in SCHEDULERS
        for config, prompts, expected in (
            ({"max_num_seqs": 1}, THREE, {"b": "seat", "c": "seat"}),
            ({"max_num_batched_tokens": 32}, THREE, {"c": "budget"}),
            ({"num_blocks": 1 + 8, "watermark": 0.0}, THREE, {"b": "blocks", "c": "blocks"}),
            (  # skipped, and named with the other request
                {},
                {"a": tokens(20), "b": [*tokens(20), 5, 6], "c": tokens(12, 3)},
                {"b": "parent"},
            ),
        )
    ),
    (
        {"chunked_prefill": 8, "max_long_partial_prefills": 1},
        {"long": tokens(20), "longer": tokens(30, 1), "short": tokens(5, 2)},
        {"longer": "constraint"},
    ),
    ({"kv_connector": SlowStore()}, {"a": tokens(9)}, {"a": "remote_kv"}),
]


@pytest.mark.parametrize(("config", "prompts", "expected"), FIRST)
def test_why_a_request_waits(config, prompts, expected, random_loaded, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(random_loaded, path, **config)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY)
    engine.step()
    found = reasons(path)[0]
    if "budget" in expected.values() and "b" in found:  # a chunk of it was left
        del found["b"]
    if config.get("scheduler") == "fcfs":  # whose plans do not say what did not fit
        expected = {
            name: "front" if why in ("budget", "blocks") else why for name, why in expected.items()
        }
    assert found == expected
    (plan,) = Film.read(path).step(0).plans
    if "parent" in expected.values():
        assert plan["parents"] == {"b": "a"} and plan["requests"] == ["a", "c"]
    finish(engine)
    happened = [each for step in Film.read(path).steps() for each in step.happened]
    begun = [i for i, each in enumerate(happened) if each["loads_begun"]]
    ended = [i for i, each in enumerate(happened) if each["loads_ended"]]
    assert len(begun) == len(ended) == ("remote_kv" in expected.values()) and begun <= ended


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


def test_a_preempted_request_waits_for_blocks_and_returns(random_loaded, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    config = {"num_blocks": 1 + 8, "prefix_cache": None, "watermark": 0.0}
    engine = make_engine(random_loaded, path, **config)
    for name in "ab":
        engine.add_request(name, tokens(12, ord(name)), replace(GREEDY, max_tokens=16))
    finish(engine)
    found = [one for one in reasons(path) if "b" in one]
    assert found[:2] == [{"b": "preempting"}, {"b": "blocks"}]
    steps = Film.read(path).steps()
    admitted = [row for step in steps for one in step.happened for row in one["admitted"]]
    assert ("b", True) in [(name, is_back) for name, _, is_back in admitted]


def test_kinds_of_tokens_are_distinguished(random_loaded, tmp_path: Path) -> None:
    """Prompt, decode and draft tokens, and tokens lost by a preemption."""
    path = tmp_path / "run.jsonl"
    guesses = {"method": "ngram", "min_ngram": 1, "adaptive": False}
    options = {"speculative": guesses, "preempt_every": 7, "prefix_cache": None}
    engine = make_engine(random_loaded, path, **options)
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
