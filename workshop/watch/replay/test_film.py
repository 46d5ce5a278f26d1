"""Reading a recorded run: what is refused, with its line; a file that a crash has cut.
That the frames are the engine after each step is tested where they are made (`test_frames.py`)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from common.events.frames import VERSION
from workshop.watch.replay.film import Film

RUN = json.dumps({"kind": "run", "version": VERSION, "num_blocks": 9}) + "\n"
FRAME = '{"at":"between","time":0.5,"changes":{"waiting":[[],["é"]]}}\n'
PLAN = '{{"at":"plan","time":1,"changes":{}}}\n'
REFUSED = [  # the lines of a file, and what is said
    ([RUN, FRAME, "{\n"], "line 3: must be JSON"),
    ([RUN, FRAME, "[1]\n"], "line 3: must be a frame"),
    ([RUN, FRAME, '{"at":"fired","changes":{}}\n'], "line 3: must be a frame"),
    ([RUN, FRAME, PLAN.format("[]")], "line 3: must be a frame"),
    ([RUN, FRAME, RUN], "line 3: only the first line must be the run line"),
    ([RUN, FRAME, PLAN.format('{"waiting":{"a":[1]}}')], "line 3: cannot apply the changes"),
    ([RUN, FRAME, PLAN.format('{"free":[[],1]}')], "line 3: cannot apply the changes"),
    ([FRAME], "line 1: only the first line must be the run line"),
    (['{"kind":"run","version":1}\n'], "line 1: must be of version 2, got 1; record the run again"),
    (['{"kind":"run","version":3}\n'], "line 1: must be of version 2, got 3; record the run again"),
    ([], "must begin with the run line"),
    ([RUN.strip()], "must begin with the run line"),
]


@pytest.mark.parametrize(("lines", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_line_that_is_no_frame_is_refused(lines: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=rf"^run\.jsonl,? {re.escape(words)}"):
        Film(lines).last_state()


def test_a_last_line_that_is_cut_anywhere_is_left_out(tmp_path: Path) -> None:
    whole, path = f"{RUN}{FRAME}{FRAME}".encode(), tmp_path / "run.jsonl"
    for end in range(len(whole) - len(FRAME.encode()), len(whole)):
        path.write_bytes(whole[:end])
        assert len(Film.read(path).lines) == 1, end
    path.write_bytes(whole)
    assert Film.read(path).last_state()["waiting"] == ["é", "é"]
