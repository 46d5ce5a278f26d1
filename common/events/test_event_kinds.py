"""What is written is read back the same; what is no event of this version is refused in a sentence;
a file that a crash has cut is whole up to the last line."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from common.events.event_kinds import (
    _HINTS,
    KINDS,
    REASONS,
    VERSION,
    Freed,
    Published,
    Run,
    Taken,
    from_line,
    parse_events,
    read_events,
    to_line,
)
from common.events.hidden_texts import hide_texts

RUN = Run(VERSION, 0.0, "fcfs", "fcfs", None, 4, 9, 2, 64, False, {"model": None}, {}, {})


def some_value(hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        return [some_value(arguments[0])]
    if origin is dict:
        return {"a": some_value(arguments[1])}
    if origin is not None:  # a union
        return some_value(arguments[0])
    return {int: 3, float: 0.5, str: "é\u2028\n\ud800", bool: True, Any: {"x": [1]}}[hint]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_one_line_and_comes_back_as_it_was(name: str) -> None:
    kind = KINDS[name]
    values = {f.name: some_value(_HINTS[kind][f.name]) for f in dataclasses.fields(kind)}
    event = kind(**(values | ({"version": VERSION} if kind is Run else {})))
    line = to_line(event)
    assert "\n" not in line
    assert json.loads(line)["kind"] == name
    assert from_line(line) == event


# Numbers, names of requests, places, what the server itself says. A new field is hidden, or here.
PUBLIC = {
    "run": set(KINDS["run"].__dataclass_fields__),  # about the engine, and about no request
    "arrived": {"time", "request", "max_tokens", "priority"},
    "finished": {"time", "request", "reason", "detail"},
    "cut": {"request", "text_length"},
    "published": {"request", "start", "given", "kept", "node_heads", "group"},
    "planned": set(KINDS["planned"].__dataclass_fields__) - {"drafts"},
    "computed": {"step", "time", "times", "verified"},
    "failed": {"time", "error"},  # but for its message
    "snapshot": {"time", "waiting", "running", "free", "node_heads", "loads", "loaded"},
}
ROW: dict[str, Any] = {"prompt": [3], "outputs": [3], "pieces": ["é"], "prompt_pieces": ["é"]}
ROW |= {
    "request": "a",
    "table": [3],
    "tenant": "é",
    "order_key": "é",
    "adapter": "é",
    "grammar": "é",
}
HIDDEN_ROW = ROW | {"prompt": [-1], "outputs": [-1], "pieces": [], "prompt_pieces": []}
HIDDEN_ROW |= dict.fromkeys(["tenant", "order_key", "adapter", "grammar"], "")
ROWS = {
    "requests": ([ROW], [HIDDEN_ROW]),
    "cached": (
        [{"block": 3, "tokens": [7, 8], "tenant": "é", "hash": "é", "parent": None}],
        [{"block": 3, "tokens": [-1, -1], "tenant": "", "hash": "", "parent": None}],
    ),
    "under_way": ([{"step": 1, "drafts": {"a": [3]}}], [{"step": 1, "drafts": {"a": [-1]}}]),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_hidden_from_others_has_its_length_and_its_type(name: str) -> None:
    """Trap 86: every field of every kind."""
    kind = KINDS[name]
    values = {f.name: some_value(_HINTS[kind][f.name]) for f in dataclasses.fields(kind)}
    if name == "snapshot":
        values |= {field: rows for field, (rows, _) in ROWS.items()}
    event = json.loads(to_line(kind(**(values | ({"version": VERSION} if kind is Run else {})))))
    assert hide_texts(event, lambda request: True) == event
    hidden = hide_texts(event, lambda request: False)
    from_line(json.dumps(hidden))
    for field, value in hidden.items():
        if field in PUBLIC.get(name, event.keys()) | {"kind"}:
            assert value == event[field]
        elif field in ROWS and name == "snapshot":
            assert value == ROWS[field][1]
        elif field in ("tokens", "drafts", "discarded"):
            assert value == {"a": [-1]}
        else:
            assert value == ([-1] if field == "prompt" else value and value * 0), field


def test_the_message_of_what_was_raised_is_hidden() -> None:
    event = {"kind": "failed", "time": 0.5, "error": "KeyError: 'é'"}
    assert hide_texts(event, lambda request: True) == event | {"error": "KeyError"}


def test_what_is_empty_and_may_be_is_left_out() -> None:
    event = Published("a", 0, [1], [1])
    assert json.loads(to_line(event)) == {
        "kind": "published",
        "request": "a",
        "start": 0,
        "given": [1],
        "kept": [1],
    }
    assert from_line(to_line(event)) == event


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: the event must be JSON"),
        ("[1]", "must be a JSON object"),
        ('{"kind":"fired"}', "must be of kind run, arrived"),
        ('{"request":"a"}', "got None"),
        ('{"kind":"taken","blocks":[1]}', "must have 'request'"),
        ('{"kind":"taken","request":"a","blocks":[1],"x":1}', "may have request"),
        ('{"kind":"taken","request":"a","blocks":["1"]}', "blocks has the wrong type, got ['1']"),
        ('{"kind":"taken","request":1,"blocks":[]}', "request has the wrong type, got 1"),
        (
            '{"kind":"table","request":"a","keep":true,"blocks":[]}',
            "keep has the wrong type, got True",
        ),
        ('{"kind":"queue","order":{"a":1}}', "order has the wrong type"),
        (to_line(RUN), "only the first line must be the run line"),
    ],
)
def test_what_is_no_event_is_refused_with_its_line(line: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        list(parse_events([f"{to_line(RUN)}\n", f"{line}\n"], "run.jsonl"))
    assert said in str(error.value) and str(error.value).startswith("run.jsonl, line 2: ")


def test_another_version_is_refused_whatever_else_it_says() -> None:
    line = json.dumps({"kind": "run", "version": VERSION + 1, "new": True})
    with pytest.raises(ValueError, match=f"must be of version 1, got {VERSION + 1}"):
        list(parse_events([f"{line}\n"]))


@pytest.mark.parametrize("lines", [[], [to_line(RUN)], [to_line(RUN)[:20]]])
def test_a_file_without_a_whole_run_line_is_refused(lines: list[str]) -> None:
    with pytest.raises(ValueError, match="must begin with the run line"):
        list(parse_events(lines))


def test_events_before_the_run_line_are_refused() -> None:
    with pytest.raises(ValueError, match=r"line 1: .*run line"):
        list(parse_events([f"{to_line(Taken(None, [1]))}\n"]))


def test_a_last_line_that_is_cut_anywhere_is_left_out(tmp_path: Path) -> None:
    events = [RUN, Taken("a", [1, 2]), Freed("é", [2, 1])]
    whole = "".join(f"{to_line(event)}\n" for event in events).encode()
    path, start = tmp_path / "run.jsonl", len(whole) - len(to_line(events[-1]).encode()) - 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        assert list(read_events(path)) == events[:-1], end
    path.write_bytes(whole)
    assert list(read_events(path)) == events


def test_a_line_that_is_broken_in_the_middle_is_no_crash() -> None:
    with pytest.raises(ValueError, match="line 2"):
        list(parse_events([f"{to_line(RUN)}\n", '{"kind":"tak\n', f"{to_line(RUN)}\n"]))


def test_reading_needs_no_tensor_library_and_no_chapter() -> None:
    root = Path(__file__).resolve().parents[2]
    code = (
        "import sys, workshop.watch.replay.film;"
        "print(sorted({'torch', 'numpy', 'request', 'block_pool'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    assert run.stdout.strip() == "[]"


def test_kinds_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RUN.version = 2  # type: ignore[misc]


def rows_of(table: str) -> list[list[str]]:
    page = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    lines = page.split(f"<!-- table:{table} -->\n")[1].split(f"<!-- /table:{table}")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_lists_every_kind_with_its_fields_and_every_reason() -> None:
    named = {row[0].strip("`"): row[1].replace("`", "").split(", ") for row in rows_of("kinds")}
    assert named == {n: [f.name for f in dataclasses.fields(k)] for n, k in KINDS.items()}
    assert {row[0].strip("`"): row[1] for row in rows_of("reasons")} == REASONS
    page = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    shown = [line.strip() for line in page.splitlines() if line.startswith('    {"kind"')]
    assert len([from_line(line) for line in shown]) == 8
    assert f"## The schema, version {VERSION}" in page
