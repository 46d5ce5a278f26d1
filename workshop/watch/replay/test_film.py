"""The film can not lie: what it rebuilds from events alone is what the engine has, after every
step, of every workload; and no kind of event could be left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from common.events.event_kinds import KINDS, read_events
from common.tests.film_runs import RecordedRun, Workshop, check_film, replay
from tiered_cache import KVTierConfig
from workshop.watch.replay.__main__ import main
from workshop.watch.replay.film import Film


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(seed=st.integers(0, 2**32))
def test_the_film_is_the_engine_after_every_step(workshop: Workshop, seed: int) -> None:
    check_film(workshop.run(seed))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_the_film_is_the_engine_for_many_more_runs(workshop: Workshop, block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        check_film(workshop.run(seed))


# -- no kind is decoration


@pytest.fixture(scope="module")
def runs_with_every_kind(workshop: Workshop) -> list[tuple[RecordedRun, set[str]]]:
    """And the kinds that each has."""
    tiers = KVTierConfig(host_blocks=64)
    small = {"num_blocks": 40, "block_size": 3, "max_num_seqs": 4, "max_num_batched_tokens": 150}
    changes = [
        {"prefix_cache": "hash", "policy": "lpm", "kv_tiers": tiers},
        {"prefix_cache": "radix", "policy": "priority", "preempt_every": 3},
        {"prefix_cache": "radix", "overlap_scheduling": True, "first_step": 6},
    ]
    runs = [workshop.run(seed, **small, **how) for how in changes for seed in (6, 10, 59)]
    for run in runs:
        check_film(run)
    return [(run, {event.kind for event in read_events(run.path)}) for run in runs]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "run"])
def test_a_film_without_one_kind_of_event_is_seen_to_lie(
    kind: str, runs_with_every_kind: list[tuple[RecordedRun, set[str]]]
) -> None:
    concerned = [run for run, kinds in runs_with_every_kind if kind in kinds]
    assert concerned, f"no run has a {kind!r}: this test proves nothing"
    noticed = [bool(replay(run, without=kind)) for run in concerned]
    # A block that was looked up and then used at once shows no trace of the look-up.
    assert any(noticed) if kind == "matched" else all(noticed)


# -- the command


def test_the_command_describes_and_refuses(workshop: Workshop, tmp_path: Path, capsys) -> None:
    path = workshop.run(9, num_blocks=40, block_size=3, max_num_seqs=2).path
    assert main([str(path)]) == 0
    assert "steps" in capsys.readouterr().out
    film = Film.read(path)
    for step in range(film.num_steps):
        assert main([str(path), "--step", str(step)]) == 0
    told = capsys.readouterr().out
    assert "prompt" in told and "decode" in told and "waits: every batch slot is taken" in told
    assert main([str(path), "--step", str(film.num_steps)]) == 2
    assert f"step must be from 0 to {film.num_steps - 1}" in capsys.readouterr().err
    assert main([str(tmp_path / "none.jsonl")]) == 2
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"kind":"run","version":99}\n')
    assert main([str(bad)]) == 2
    assert "bad.jsonl, line 1: the event must be of version" in capsys.readouterr().err
