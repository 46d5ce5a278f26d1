"""C++ is compiled once, for this processor; and what happens where it can't be."""

from __future__ import annotations

import stat
import subprocess
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

import cpp_library as module
from cpp_library import cache_folder, load_library, try_to_compile


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a folder with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return ANSWER; }')
    return path


@pytest.mark.needs("C++ compiler")
def test_compiled_once_for_a_source_its_constants_and_a_processor(source, monkeypatch):
    compiler = mock.Mock(wraps=subprocess.run)
    monkeypatch.setattr(subprocess, "run", compiler)
    for answer in (42, 42, 7, 42):
        assert load_library(source, {"ANSWER": answer}).answer() == answer
    assert compiler.call_count == 2
    source.write_text('extern "C" int answer() { return -ANSWER; }')
    assert load_library(source, {"ANSWER": 42}).answer() == -42
    monkeypatch.setattr(module, "processor", lambda: "another one")
    load_library(source, {"ANSWER": 42})
    assert compiler.call_count == 4
    folder = cache_folder()
    assert len(list(folder.iterdir())) == 4, "nothing is left over"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "what is in it is executed"


@pytest.mark.needs("C++ compiler")
def test_without_a_compiler_a_sentence(source, monkeypatch):
    """What does not compile says why, too, and leaves nothing."""
    with pytest.raises(RuntimeError, match=r"failed: (.|\n)*answer.cpp.*'?ANSWER"):
        load_library(source, {})
    assert not list(cache_folder().iterdir())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        load_library(source, {"ANSWER": 3})


@pytest.mark.needs("C++ compiler")
def test_without_a_folder_nothing_is_compiled_and_that_is_said(
    source, monkeypatch, tmp_path, caplog
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    make = partial(load_library, source, {"ANSWER": 3})
    assert try_to_compile(make, "it is slow") is None
    assert "it is slow: " in caplog.text and str(tmp_path / "file") in caplog.text
