"""The fixtures see what goes wrong in a page; else no test of the page would mean anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bounded_loops import as_long_as
from workshop.watch import chromium
from workshop.watch.chromium import PROGRAMS, BrowserUnavailableError, started_browser
from workshop.watch.conftest import OpenPage, OpenRun, until
from workshop.watch.source_lines import ROOT

FAULTS = {
    "<script>console.error('alas')</script>": "console, error: alas",
    "<script>console.warn('hm')</script>": "console, warning: hm",
    "<script>throw new Error('no way')</script>": "exception: no way",
    "<script>setTimeout(() => nothing())</script>": "exception: nothing is not defined",
    "<img src='http://127.0.0.1:9/a.png'>": "request: http://127.0.0.1:9/a.png",
    "<script>fetch('file:///etc/hosts')</script>": "request: file:///etc/hosts",
    "<link rel='stylesheet' href='beside.css'>": "beside.css",
}


def test_what_goes_wrong_is_noticed(
    open_page: OpenPage, complaints: list[str], tmp_path: Path
) -> None:
    """And a page is opened as asked for."""
    (tmp_path / "page.html").write_text(f"<!doctype html><title>t</title>{''.join(FAULTS)}")
    page = open_page(tmp_path / "page.html", 1024, 768, at="step=3", language="zh", colours="dark")
    found = page.evaluate(
        "[innerWidth, innerHeight, location.hash, navigator.language, "
        "matchMedia('(prefers-color-scheme: dark)').matches]"
    )
    assert found == [1024, 768, "#step=3", "zh-CN", True]

    def missing() -> list[str]:
        return [words for words in FAULTS.values() if not any(words in one for one in complaints)]

    for _ in as_long_as(missing, seconds=20):
        page.wait_for_timeout(30)
    page.goto("about:blank")  # what the old page had still to say has been said
    complaints.clear()


def test_what_comes_late_is_waited_for_on_a_page_that_forbids_eval(
    open_run: OpenRun, default_run_text: str
) -> None:
    """With `wait_for_function` a test is green only if its first look comes late enough."""
    page = open_run(default_run_text).page
    page.evaluate("() => { setTimeout(() => { globalThis.isThere = true; }, 200); }")
    until(page, "globalThis.isThere === true")
    polls = re.compile(r"\.wait_for_function\(")
    tests = [path for folder in ("common", "workshop") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in tests if polls.search(path.read_text(encoding="utf-8"))] == []


def test_each_program_is_looked_for_and_without_one_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for program in PROGRAMS:
        monkeypatch.setattr(chromium.shutil, "which", {program: f"/bin/{program}"}.get)
        assert chromium.find_chromium() == f"/bin/{program}"
    monkeypatch.setattr(chromium.shutil, "which", lambda name: None)
    with pytest.raises(BrowserUnavailableError, match="apt install chromium"), started_browser():
        raise AssertionError("there is none")
