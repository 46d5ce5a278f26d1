"""Where several stages are at work, a film is the engine too: from the start or from the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.tests.engine_oracle import Oracle
from common.tests.film_runs import RecordedRun, check_film, short_prompts
from common.tests.local_stages import pipelined_engine
from request import SamplingParams
from workshop.watch.replay.film import Film

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("first_step", [0, 5])
@pytest.mark.parametrize("speculative", [None, {"method": "ngram", "adaptive": False}])
def test_a_pipeline_is_watched(
    speculative: dict | None,
    first_step: int,
    monkeypatch: pytest.MonkeyPatch,
    family_oracle: Oracle,
    tmp_path: Path,
) -> None:
    recorded = RecordedRun(tmp_path / "run.jsonl")
    sizes = {"block_size": 4, "num_blocks": 26, "max_num_seqs": 5, "preempt_every": 4}
    options = {"chunked_prefill": 7, "speculative": speculative, **sizes}
    engine = pipelined_engine(monkeypatch, family_oracle.path, **options)
    for number, prompt in enumerate(short_prompts(family_oracle, 40)[:8]):
        engine.add_request(f"r{number}", prompt, GREEDY)
    step = 0
    while engine.has_unfinished_requests():
        if step == first_step:
            engine.watch(recorded.path)
            recorded.look(engine)
        engine.step()
        if step >= first_step:
            recorded.look(engine)
        step += 1
        assert step < 300
    engine.close()
    check_film(recorded)
    film = Film.read(recorded.path)
    assert film.run.overlaps
    assert any(happened["preempted"] for step in film.steps() for happened in step.happened)
    starts = [line["changes"] for line in film.lines if line["at"] == "start"]
    begun = [list(changes.get("in_flight", {})) for changes in starts]
    assert bool(begun and begun[0]) == (first_step > 0)
    steps = [int(step) for names in begun for step in names]
    steps += [plan["step"] for step in film.steps() for plan in step.plans]
    assert steps == list(range(len(steps))), "each has a number of its own"
