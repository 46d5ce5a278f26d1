"""Reading a recorded run: what is refused, with its line; a file that a crash has cut; the command.
That the frames are the engine after each step is tested where they are made (`test_frames.py`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.events.frames import VERSION
from common.tests.film_runs import Workshop
from workshop.watch.replay.__main__ import main
from workshop.watch.replay.film import Film

RUN = json.dumps({"kind": "run", "version": VERSION, "num_blocks": 9}) + "\n"
FRAME = '{"at":"between","time":0.5,"changes":{"waiting":[[],["é"]]}}\n'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 3: must be JSON"),
        ("[1]", "line 3: must be a frame"),
        ('{"kind":"taken","request":"a","blocks":[1]}', "line 3: must be a frame"),
        ('{"at":"fired","changes":{}}', "line 3: must be a frame"),
        ('{"at":"plan","changes":[]}', "line 3: must be a frame"),
        (RUN.strip(), "line 3: only the first line must be the run line"),
    ],
)
def test_a_line_that_is_no_frame_is_refused(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^run.jsonl, {words}"):
        Film([RUN, FRAME, f"{line}\n"])


@pytest.mark.parametrize("changes", ['{"waiting":{"a":[1]}}', '{"waiting":[]}', '{"free":[[],1]}'])
def test_changes_of_something_else_are_refused(changes: str) -> None:
    film = Film([RUN, FRAME, f'{{"at":"plan","time":1,"changes":{changes}}}\n'])
    with pytest.raises(ValueError, match=r"^run.jsonl, line 3: cannot apply the changes"):
        film.last_state()


@pytest.mark.parametrize("version", [1, 3])
def test_another_version_is_refused(version: int) -> None:
    """Version 1 had one line for each event."""
    line = json.dumps({"kind": "run", "version": version, "new": True})
    with pytest.raises(
        ValueError, match=f"must be of version 2, got {version}; record the run again"
    ):
        Film([f"{line}\n"])


@pytest.mark.parametrize("lines", [[], [RUN.strip()], [RUN[:20]]])
def test_a_file_without_a_whole_run_line_is_refused(lines: list[str]) -> None:
    with pytest.raises(ValueError, match="must begin with the run line"):
        Film(lines)
    with pytest.raises(ValueError, match="line 1: only the first line must be the run line"):
        Film([FRAME])


def test_a_last_line_that_is_cut_anywhere_is_left_out(tmp_path: Path) -> None:
    whole, path = f"{RUN}{FRAME}{FRAME}".encode(), tmp_path / "run.jsonl"
    for end in range(len(whole) - len(FRAME.encode()), len(whole)):
        path.write_bytes(whole[:end])
        assert len(Film.read(path).lines) == 1, end
    path.write_bytes(whole)
    assert Film.read(path).last_state()["waiting"] == ["é", "é"]


def test_reading_needs_no_tensor_library_and_no_chapter() -> None:
    root = Path(__file__).resolve().parents[3]
    code = (
        "import sys, workshop.watch.replay.film;"
        "print(sorted({'torch', 'numpy', 'request', 'block_pool'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    assert run.stdout.strip() == "[]"


# -- the command


def test_the_command_describes_and_refuses(workshop: Workshop, tmp_path: Path, capsys) -> None:
    path = workshop.run(9, num_blocks=40, block_size=3, max_num_seqs=2).path
    assert main([str(path)]) == 0
    assert "steps" in capsys.readouterr().out
    film = Film.read(path)
    for step in range(film.num_steps):
        assert main([str(path), "--step", str(step)]) == 0
    out = capsys.readouterr().out
    assert "prompt" in out and "decode" in out and "waits: every batch slot is taken" in out
    assert main([str(path), "--step", str(film.num_steps)]) == 2
    assert f"step must be from 0 to {film.num_steps - 1}" in capsys.readouterr().err
    assert main([str(tmp_path / "none.jsonl")]) == 2
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"kind":"run","version":99}\n')
    assert main([str(bad)]) == 2
    assert "bad.jsonl, line 1: must be of version 2" in capsys.readouterr().err
