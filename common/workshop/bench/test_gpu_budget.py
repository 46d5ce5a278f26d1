"""Sections have their time, and none takes down the others."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from common.workshop.bench import gpu_budget
from common.workshop.bench.gpu_budget import (
    DeviceLostError,
    Planned,
    Section,
    UnavailableError,
    deadlines,
    has_failed,
    run_sections,
)


def a_device(is_usable: bool = True) -> SimpleNamespace:
    return SimpleNamespace(is_usable=lambda: is_usable, release=lambda: None)


def run(measures: dict, device=None, record=None, total_s: float = 100.0) -> tuple[dict, list]:
    """The record, and its states as they were written."""
    record = {"sections": {}} if record is None else record
    written: list[dict] = []

    def write(now: dict) -> None:
        written.append({name: s["status"] for name, s in now["sections"].items()})

    plan = {name: Planned(1.0, measure) for name, measure in measures.items()}
    run_sections(plan, record, device or a_device(), write, time.monotonic(), total_s)
    record["failed"] = has_failed(record, plan)
    return record, written


def raises(error: BaseException):
    def measure(section: Section) -> None:
        section.results["before"] = 1
        raise error

    return measure


def test_shares_are_of_the_whole_and_what_is_left_over_goes_to_the_next() -> None:
    plan = {name: Planned(share, print) for name, share in (("a", 1), ("b", 2), ("c", 1))}
    assert deadlines(plan, start=10, total_s=100) == {"a": 35, "b": 85, "c": 110}


def test_the_record_is_written_before_and_after_each_section() -> None:
    record, written = run({"a": lambda s: s.results.update(x=1), "b": lambda s: None})
    assert written == [
        {"a": "running"}, {"a": "done"}, {"a": "done", "b": "running"}, {"a": "done", "b": "done"},
    ]  # fmt: skip
    assert record["sections"]["a"]["results"] == {"x": 1} and not record["failed"]


def test_a_section_that_raises_keeps_what_it_has_and_the_others_go_on(capsys) -> None:
    record, _ = run({"a": raises(KeyError("gone")), "b": lambda s: s.results.update(x=1)})
    first, second = record["sections"].values()
    assert first["status"] == "failed" and first["results"] == {"before": 1}
    assert first["errors"] == ["the section: KeyError: 'gone'"]
    assert second["status"] == "done" and record["failed"]
    assert "KeyError" in capsys.readouterr().err  # with its traceback


def test_what_does_not_exist_is_said_and_is_no_failure() -> None:
    record, _ = run({"a": raises(UnavailableError("no  graphs\nhere"))})
    assert record["sections"]["a"]["status"] == "unavailable" and not record["failed"]
    assert record["sections"]["a"]["notes"] == ["no graphs here"]


def test_a_part_that_raises_leaves_the_rest_of_its_section() -> None:
    def measure(section: Section) -> None:
        for name in "xyz":
            with section.attempt(name):
                section.results[name] = 1 / (name != "y")

    record, _ = run({"a": measure})
    section = record["sections"]["a"]
    assert section["results"] == {"x": 1, "z": 1} and section["status"] == "failed"
    assert section["errors"] == ["y: ZeroDivisionError: division by zero"]


def test_a_section_without_time_is_cut_and_says_what_it_left_out(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(gpu_budget, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def measure(section: Section) -> None:
        for i in range(4):
            if section.has_time(f"part {i}"):
                now[0] += 20
                section.results[i] = 1

    record = {"sections": {}}
    plan = {name: Planned(1.0, measure) for name in ("a", "b")}
    run_sections(plan, record, a_device(), lambda _: None, 0.0, 60.0)
    first, second = record["sections"].values()
    assert first["status"] == second["status"] == "cut"
    assert list(first["results"]) == [0, 1] and first["seconds"] == 40
    assert first["notes"] == [f"left out, the time was up: part {i}" for i in (2, 3)]
    assert list(second["results"]) == [0] and len(second["notes"]) == 3
    assert not has_failed(record, plan)


def test_a_section_that_comes_too_late_is_not_begun() -> None:
    record, _ = run({"a": raises(AssertionError())}, total_s=-1.0)
    assert record["sections"]["a"]["status"] == "cut"
    assert record["sections"]["a"]["notes"] == ["left out, the time was up: all of it"]


def test_a_lost_device_ends_the_process_and_another_goes_on() -> None:
    record = {"sections": {}}
    measures = {"a": lambda s: None, "b": raises(RuntimeError("illegal")), "c": lambda s: None}
    with pytest.raises(DeviceLostError):
        run(measures, a_device(is_usable=False), record)
    assert [s["status"] for s in record["sections"].values()] == ["done", "failed"]
    measures["a"] = measures["b"] = raises(AssertionError("again"))
    run(measures, record=record)
    assert [s["status"] for s in record["sections"].values()] == ["done", "failed", "done"]
    assert record["failed"]


def test_an_interrupt_is_written_down_and_goes_through() -> None:
    record = {"sections": {}}
    with pytest.raises(KeyboardInterrupt):
        run({"a": raises(KeyboardInterrupt())}, record=record)
    section = record["sections"]["a"]
    assert section["status"] == "failed" and section["results"] == {"before": 1}


def test_a_section_that_never_ended_has_failed() -> None:
    sections = {"a": {"status": "running"}}
    assert has_failed({"sections": sections}, {"a": Planned(1, print)})
    assert has_failed({"sections": {}}, {"a": Planned(1, print)})
    assert not has_failed({"sections": {"a": {"status": "cut"}}}, {"a": Planned(1, print)})
