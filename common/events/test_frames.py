"""Frames: the differences lead to the engine's own state after every step of random engines, for a
viewer that begins late, too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.events.frame_recorder import FrameRecorder
from common.events.frames import apply, diff, empty_frame
from common.events.hidden_frames import HIDDEN, hide_texts
from common.tests.film_runs import Workshop, check_film
from workshop.watch.replay.film import Film
from workshop.watch.replay.frame_facts import happened, reasons_to_wait

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "__proto__"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=12,
)


@given(VALUES, VALUES)
def test_a_difference_leads_from_any_value_to_any_other(before: Any, after: Any) -> None:
    written = json.loads(json.dumps(diff(before, after)))
    assert repr(apply(before, written)) == repr(after) or apply(before, written) == after


def test_a_request_with_the_id_of_one_that_has_ended_is_another_request() -> None:
    """The second request can arrive and end in one frame, the one after the first one's end."""
    row = {"num_preemptions": 0, "finish": {"reason": "stop"}}
    before = empty_frame(9) | {"requests": {"a": row | {"number": 0}}, "outputs": {"a": [5, 6]}}
    after = empty_frame(9) | {"requests": {"a": row | {"number": 1}}, "outputs": {"a": [7]}}
    found = happened(before, after | {"result": {"number": 0}})
    assert (found["arrived"], found["finished"], found["tokens"]) == (["a"], ["a"], {"a": [7]})


def test_requests_wait_for_the_reasons_of_the_last_plan() -> None:
    """Two steps can be in flight."""
    plans = {
        "3": {"stop": ["seat", ""]},
        "4": {"stop": ["budget", "a"], "skipped": {"b": "parent"}},
    }
    frame = empty_frame(9) | {"waiting": ["a", "b"], "in_flight": plans}
    assert reasons_to_wait(frame) == {"a": "budget", "b": "parent"}


# -- the law


@pytest.mark.parametrize("seed", range(12))
def test_the_frames_are_the_engine_after_every_step(workshop: Workshop, seed: int) -> None:
    """Recorded from the start, or from the middle."""
    check_film(workshop.run(seed, first_step=seed % 3 * 6))


# -- a viewer that begins late, and one that may not read everything


@pytest.mark.parametrize("seed", range(4))
def test_a_late_viewer_sees_the_same_from_then_on(workshop: Workshop, seed: int) -> None:
    """With `beginning`, between any two steps: the same lines lead on from there."""
    begun: list[tuple[str, int]] = []
    flush = FrameRecorder.flush

    def beginning_now_and_then(recorder: FrameRecorder) -> None:
        flush(recorder)
        is_due = recorder.is_in and not recorder.is_behind and len(begun) < 5
        if is_due and recorder._num_planned == 3 * len(begun) + 2:
            begun.append(("", -1))  # `beginning` flushes, too
            begun[-1] = recorder.beginning(), recorder._file.tell()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrameRecorder, "flush", beginning_now_and_then)
        recorded = workshop.run(seed)
    check_film(recorded)
    assert begun
    whole = Film.read(recorded.path).last_state()
    for text, position in begun:
        rest = recorded.path.read_bytes()[position:].decode()
        late = Film((text + rest).splitlines(keepends=True)).last_state()
        for name in whole.keys() - {"requests", "cached", "loaded"}:
            assert late[name] == whole[name], name


@pytest.mark.parametrize("seed", range(4))
def test_texts_are_hidden_from_viewers_that_may_not_read_them(
    workshop: Workshop, seed: int
) -> None:
    film = Film.read(workshop.run(seed, first_step=5 * (seed % 2)).path)
    hidden = empty_frame(film.run.num_blocks)
    shown = empty_frame(film.run.num_blocks)
    num_hidden = 0
    known = set[str]()
    may_read = lambda name: name[0] in "abcd"  # noqa: E731
    for line in film.lines:
        shown = apply(shown, line["changes"])
        hidden = apply(hidden, hide_texts(line, may_read)["changes"])
        for name, ids in shown["outputs"].items():
            row, deltas = hidden["requests"][name], hidden["pieces"][name]
            if may_read(name):
                assert hidden["outputs"][name] == ids and row == shown["requests"][name]
                continue
            num_hidden += len(ids)
            assert hidden["outputs"][name] == [HIDDEN] * len(ids)
            assert set(row["prompt"]) == {HIDDEN} and not any((*deltas, *row["prompt_pieces"]))
            assert not any(row[label] for label in ("tenant", "order_key", "adapter", "grammar"))
        if line["at"] == "start":  # a block in a table of theirs has tokens of theirs
            readable = [groups for name, groups in shown["tables"].items() if may_read(name)]
            known = {str(block) for groups in readable for ids in groups.values() for block in ids}
        for block, row in hidden["cached"].items():
            is_theirs = block in known if "by" not in row else may_read(row["by"] or "x")
            assert is_theirs or set(row["tokens"]) == {HIDDEN}
        for plan in hidden["in_flight"].values():
            for name, ids in plan.get("drafts", {}).items():
                assert may_read(name) or set(ids) <= {HIDDEN}
        unsaid = {"requests", "outputs", "pieces", "cached", "in_flight", "result"}
        for name in shown.keys() - unsaid:
            assert hidden[name] == shown[name]
    assert num_hidden


def test_discarded_tokens_and_messages_of_errors_are_hidden() -> None:
    result = {"discarded": {"a": [5], "b": [6]}, "error": "ValueError: b wrote hello"}
    line = {"at": "failed", "changes": {"result": [result]}}
    (hidden,) = hide_texts(line, lambda name: name == "a")["changes"]["result"]
    assert hidden == {"discarded": {"a": [5], "b": [HIDDEN]}, "error": "ValueError"}
