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


# -- a viewer that begins late


@pytest.mark.parametrize("seed", range(4))
def test_a_late_viewer_sees_the_same_from_then_on(workshop: Workshop, seed: int) -> None:
    """With `beginning`, between any two steps: the same lines lead on from there."""
    begun: list[tuple[str, int]] = []
    flush = FrameRecorder.flush

    def beginning_now_and_then(recorder: FrameRecorder) -> None:
        flush(recorder)
        is_due = not recorder.is_behind and len(begun) < 5
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
