"""What users do to a film: interrupts, a disk that is full, KV events beside it. Watching
changes nothing, and each step is in the file when it returns."""

from __future__ import annotations

import io
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.events.run_line import _plain
from common.tests.engine_oracle import Oracle, finish, paged_runner
from common.tests.film_runs import RecordedRun, check_film, short_prompts
from common.tests.local_stages import pipelined_engine
from request import SamplingParams
from step_record import StepRecord
from tiered_cache import KVTierConfig
from workshop.watch.replay.film import Film

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL = {"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 64, "max_num_seqs": 4}


def make_engine(loaded, **config) -> LLMEngine:
    return LLMEngine(EngineConfig(**{**SMALL, "check_invariants": True, **config}), loaded=loaded)


def tokens_of(outputs) -> dict[str, list[int]]:
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


def moments(path: Path) -> list[str]:
    """The `at` of each frame."""
    return [line["at"] for line in Film.read(path).lines]


def serve_unwatched(engine: LLMEngine, prompts: list[list[int]]) -> dict[str, list[int]]:
    for number, prompt in enumerate(prompts):
        engine.add_request(f"r{number}", prompt, GREEDY)
    return tokens_of(finish(engine))


def test_a_recorded_run_continues_after_an_interrupt(
    random_loaded, monkeypatch, tmp_path: Path
) -> None:
    """Also where it left the state inconsistent: the next frame is the state after the reset."""
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]]
    plain = serve_unwatched(make_engine(random_loaded), prompts)
    engine = make_engine(random_loaded)
    recorded = RecordedRun(tmp_path / "run.jsonl")
    engine.watch(recorded.path)
    for num, (place, name) in enumerate(
        [(paged_runner(engine), "forward"), (engine.kv_manager, "allocate_slots")], 1
    ):
        engine.add_request("gone", [9, 8, 7], GREEDY)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(place, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            engine.step()
        (aborted,) = finish(engine).values()
        assert aborted.outputs[0].finish_reason in ("error", "length")
        assert serve_unwatched(engine, prompts) == plain
        recorded.look(engine)
        assert recorded.broken == [] and moments(recorded.path).count("failed") == num
    engine.watch(recorded.path)
    assert moments(recorded.path) == ["start"]


class ShortFile(io.StringIO):
    """A disk that is full after some lines."""

    def write(self, text: str) -> int:
        if self.tell() > 2000:
            raise OSError("no space left on device")
        return super().write(text)


def test_a_film_that_cannot_be_written_ends_no_request(random_loaded, caplog) -> None:
    engine = make_engine(random_loaded)
    plain = serve_unwatched(engine, [[3, 1, 4, 1, 5]])
    engine.watch(ShortFile())
    for _ in range(4):
        assert serve_unwatched(engine, [[3, 1, 4, 1, 5]]) == plain
    assert caplog.text.count("the run is not recorded any more") == 1
    engine.close()


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
        {"overlap_scheduling": True, "policy": "random", "num_blocks": 30},
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
        engine = make_engine(family_loaded, events=events, **config)
        did = []

        def look(record: StepRecord, engine=engine, did=did) -> None:
            cache = engine.prefix_cache
            pool = engine.kv_manager.pool
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


def test_the_run_line_describes_the_run_without_a_folder(random_loaded, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    tiers = KVTierConfig(8, 4, disk_path=str(tmp_path / "blocks"))
    engine = make_engine(
        random_loaded, events=path, kv_tiers=tiers, policy="lpm", model=str(tmp_path)
    )
    engine.close()
    run = Film.read(path).run
    assert (run.block_size, run.num_blocks, run.policy, run.overlaps) == (4, 40, "lpm", False)
    assert run.config["kv_tiers"]["disk_path"] == "blocks"
    assert run.model["architecture"] == "Qwen3ForCausalLM" and "torch" in run.versions
    assert str(tmp_path) not in path.read_text()
    assert _plain({"tests": f"{tmp_path}/one"}) == {"tests": "one"}


def test_each_step_is_in_the_file_when_it_returns(
    random_oracle: Oracle, random_loaded, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(random_loaded, events=path)
    engine.add_request("a", random_oracle.prompts[0], GREEDY)
    assert Film.read(path).lines == []
    places = {".": "a file, not a folder", "run.jsonl/run": "in an existing folder"}
    for step, (place, named) in enumerate(places.items()):
        engine.step()
        with pytest.raises((ValueError, FileNotFoundError), match=f"events must be {named}"):
            engine.watch(tmp_path / place)
        assert Film.read(path).num_steps == step + 1
        assert path.read_bytes().endswith(b"\n")
    engine.abort_request("a")
    assert Film.read(path).requests()["a"]["finish"]["reason"] == "abort"


def test_a_pipeline_is_watched(monkeypatch, family_oracle: Oracle, tmp_path: Path) -> None:
    recorded = RecordedRun(tmp_path / "run.jsonl")
    options = {"chunked_prefill": 7, "speculative": {"method": "ngram", "adaptive": False}}
    options |= {**SMALL, "num_blocks": 26, "max_num_seqs": 5, "preempt_every": 4}
    engine = pipelined_engine(monkeypatch, family_oracle.path, **options)
    for number, prompt in enumerate(short_prompts(family_oracle, 40)[:8]):
        engine.add_request(f"r{number}", prompt, GREEDY)
    for _ in range(5):
        engine.step()
    engine.watch(recorded.path)
    recorded.look(engine)
    while engine.has_unfinished_requests():
        engine.step()
        recorded.look(engine)
    engine.close()
    check_film(recorded)
    film = Film.read(recorded.path)
    assert film.run.overlaps
    assert any(happened["preempted"] for step in film.steps() for happened in step.happened)
