"""The trace keeps the rules of Chrome's trace event format, and says what the film says."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from common.events.event_kinds import Computed, Planned
from common.tests.film_runs import Workshop
from workshop.watch.replay.__main__ import main
from workshop.watch.replay.film import Film
from workshop.watch.replay.perfetto import DEVICE, HOST, REQUESTS, trace_of, write_trace

PHASES = {"M", "X", "C", "b", "e", "s", "f", "i"}


def broken_rules(trace: dict) -> list[str]:
    """Sentences about what Perfetto would drop or draw wrongly."""
    broken, last_ts = [], 0.0
    open_slices: dict[tuple, list[str]] = defaultdict(list)
    flows: dict[tuple, list[str]] = defaultdict(list)
    ends: dict[int, float] = {}  # of the slices of each track
    slices = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    for event in trace["traceEvents"]:
        ph, shown = event.get("ph"), json.dumps(event)
        if ph not in PHASES:
            broken.append(f"no such phase: {shown}")
            continue
        for field, kinds in (("name", str), ("pid", int), ("tid", int), ("ts", (int, float))):
            if not isinstance(event.get(field), kinds) or isinstance(event.get(field), bool):
                broken.append(f"{field} is missing or of the wrong type: {shown}")
        if event["ts"] < last_ts:
            broken.append(f"before the one in front of it: {shown}")
        last_ts = event["ts"]
        if ph == "X":
            if not event.get("dur", -1) >= 0:
                broken.append(f"no duration: {shown}")
            # A microsecond for what is rounded.
            if event["ts"] < ends.get(event["tid"], 0.0) - 1:
                broken.append(f"begins inside another slice of its track: {shown}")
            ends[event["tid"]] = event["ts"] + event["dur"]
        elif ph == "C":
            if not event["args"] or not all(v >= 0 for v in event["args"].values()):
                broken.append(f"a counter that counts nothing: {shown}")
        elif ph in "be":
            stack = open_slices[event["cat"], event["id"]]
            if ph == "b":
                stack.append(event["name"])
            elif not stack or stack.pop() != event["name"]:
                broken.append(f"ends what was not the last to begin: {shown}")
        elif ph in "sf":
            flows[event["cat"], event["id"]].append(ph)
            around = [e for e in slices if e["tid"] == event["tid"]]
            if not any(e["ts"] <= event["ts"] <= e["ts"] + e["dur"] for e in around):
                broken.append(f"an arrow from or to nowhere: {shown}")
            if ph == "f" and event.get("bp") != "e":
                broken.append(f"binds to the next slice instead of its own: {shown}")
        elif ph == "i" and event.get("s") not in ("g", "p", "t"):
            broken.append(f"an instant without a scope: {shown}")
    broken += [f"never ends: {names} of {key}" for key, names in open_slices.items() if names]
    broken += [f"arrow {key}: {ends}" for key, ends in flows.items() if ends != ["s", "f"]]
    return broken


@pytest.fixture(scope="module")
def films(workshop: Workshop) -> list[Film]:
    small = {"num_blocks": 40, "block_size": 3, "max_num_seqs": 4, "max_num_batched_tokens": 150}
    configs = [
        {"overlap_scheduling": False, "preempt_every": 3},
        {"overlap_scheduling": True},
        {"speculative": {"method": "ngram", "adaptive": False}},
    ]
    return [Film.read(workshop.run(seed, **small, **c).path) for seed, c in enumerate(configs, 4)]


def test_the_trace_keeps_the_rules_of_the_format(films: list[Film], tmp_path: Path) -> None:
    phases: Counter[str] = Counter()
    for film in films:
        path = tmp_path / "trace.json"
        write_trace(film, path)
        trace = json.loads(path.read_text(encoding="utf-8"))
        assert broken_rules(trace) == []
        phases.update(event["ph"] for event in trace["traceEvents"])
    assert phases.keys() == PHASES, "a rule that nothing was held against proves nothing"


def test_the_trace_says_what_the_film_says(films: list[Film]) -> None:
    for film in films:
        events = trace_of(film)["traceEvents"]
        names = Counter((event["ph"], event["pid"], event["name"]) for event in events)
        planned = [event for event in film.events if isinstance(event, Planned)]
        computed = [event for event in film.events if isinstance(event, Computed)]
        assert names["X", HOST, "schedule"] == len(planned)
        assert names["X", HOST, "update"] == len(computed)
        ran = [event for event in computed if event.times.get("forward_ms")]
        assert names["X", DEVICE, "forward"] == len(ran) > 0
        forward = [e for e in events if e["name"] == "forward"]
        for event, source in zip(forward, ran, strict=True):
            assert event["dur"] == pytest.approx(source.times["forward_ms"] * 1e3, abs=0.01)
        arrived = [event for event in film.events if event.kind == "arrived"]
        lives = [e for e in events if e["ph"] == "b" and "prompt_tokens" in e.get("args", {})]
        assert [e["name"] for e in lives] == [getattr(event, "request", "") for event in arrived]
        assert all(e["pid"] == REQUESTS for e in lives)
        num_preempted = sum(event.kind == "preempted" for event in film.events)
        assert names["i", HOST, "preempted"] == num_preempted
        assert names["s", HOST, "preemption"] == num_returns(film)
        blocks = [e["args"] for e in events if e["name"] == "blocks"]
        assert all(sum(values.values()) == film.run.num_blocks - 1 for values in blocks)


def num_returns(film: Film) -> int:
    """How often somebody who was preempted ran again."""
    num, away = 0, set()
    for event in film.events:
        if event.kind == "preempted":
            away.add(event.request)
        elif event.kind in ("admitted", "finished") and event.request in away:
            away.remove(event.request)
            num += event.kind == "admitted"
    return num


def test_a_film_that_was_cut_gives_a_trace_that_keeps_the_rules(films: list[Film]) -> None:
    """Wherever it is cut, in the middle of a planning and behind its end, too."""
    film = films[0]
    kinds = ("preempted", "admitted")
    at_arrows = [i for i, event in enumerate(film.events) if event.kind in kinds]
    assert num_returns(film) > 0
    for end in {*range(1, len(film.events), 37), *(i + 1 for i in at_arrows[:40])}:
        assert broken_rules(trace_of(Film([film.run, *film.events[:end]]))) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ph": "Q"}, "no such phase"),
        ({"ts": "1"}, "ts is missing"),
        ({"ph": "e", "cat": "request", "id": 10**6}, "ends what was not the last"),
        ({"ph": "b", "cat": "request", "id": 10**6}, "never ends"),
        ({"ph": "s", "cat": "x", "id": 1}, "arrow"),
        ({"ph": "X", "dur": -1}, "no duration"),
        ({"ph": "i"}, "without a scope"),
    ],
)
def test_a_rule_that_is_broken_is_seen(change: dict, said: str, films: list[Film]) -> None:
    trace = trace_of(films[0])
    last = trace["traceEvents"][-1]
    event = {"ph": "i", "name": "x", "pid": 1, "tid": 1, "ts": last["ts"] + 1e9} | change
    assert any(said in sentence for sentence in broken_rules_or_error({"traceEvents": [event]}))


def broken_rules_or_error(trace: dict) -> list[str]:
    try:
        return broken_rules(trace)
    except TypeError:  # a time that can not be compared
        return ["ts is missing"]


def test_the_command_describes_exports_and_refuses(
    workshop: Workshop, tmp_path: Path, capsys
) -> None:
    path = workshop.run(9, num_blocks=40, block_size=3, max_num_seqs=2).path
    out = tmp_path / "out.json"
    assert main([str(path), "--perfetto", str(out)]) == 0
    assert "steps" in capsys.readouterr().out
    assert broken_rules(json.loads(out.read_text(encoding="utf-8"))) == []
    film = Film.read(path)
    for step in range(film.num_steps):
        assert main([str(path), "--step", str(step)]) == 0
    told = capsys.readouterr().out
    assert "prompt" in told and "decode" in told and "waits: as many run as may" in told
    assert main([str(path), "--step", str(film.num_steps)]) == 2
    assert f"the film has steps 0 to {film.num_steps - 1}" in capsys.readouterr().err
    assert main([str(tmp_path / "none.jsonl")]) == 2
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"kind":"run","version":99}\n')
    assert main([str(bad)]) == 2
    assert "bad.jsonl, line 1: the event is of version 99" in capsys.readouterr().err
