"""The contents of the page's file, and its words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from common.events.event_page import PAGE, SCRIPTS, STYLES
from common.events.frames import REASONS, VERSION
from workshop.watch.page_maker import START, Reel, make_page
from workshop.watch.watch_command import main

RUN = (
    f'{{"kind":"run","version":{VERSION},"num_blocks":3,"config":{{}},"model":{{}}}}\n'
    '{"at":"between","time":0.1,"changes":{"waiting":[[],["a<b"]],"requests":{"a<b":[{"number":0,'
    '"prompt":[1,2],"prompt_pieces":["</script>","<!-- {{data}} \\u2028 &amp; 中"]}]}}}\n'
)
SCRIPT = re.compile(r"<script([^>]*)>(.*?)</script>", re.S)


def test_frames_are_in_the_page_unchanged_and_it_sends_no_request() -> None:
    """No text of a run ends a script, and none is taken for a place that the page names."""
    page = make_page([Reel('the "left" <one>', RUN), Reel("right", RUN)], title=("{{data}}", ""))
    settings, *reels, scripts = SCRIPT.findall(page)
    labels = ["the &quot;left&quot; &lt;one&gt;", "right"]
    for (attributes, text), label in zip(reels, labels, strict=True):
        assert "application/x-ndjson" in attributes and f'data-label="{label}"' in attributes
        assert "<" not in text and text.replace("\\u003c", "<") == RUN
    assert not re.search(r"<[^>]* (src|href|action)=", page)
    assert set(re.findall(r"https?://[\w./-]+", page)) <= {"http://www.w3.org/2000/svg"}
    for word in ("@import", "url(", "import(", "fetch(", "XMLHttpRequest", "WebSocket", "Worker("):
        assert word not in page, word
    assert "default-src 'none'" in page and settings and scripts


def test_arguments_are_in_the_page_and_every_file_of_it_once() -> None:
    page = make_page([], title=("Pieces", "切块"), start="step=3", film={"x": "</script>"})
    (attributes, text), _ = SCRIPT.findall(page)
    settings = json.loads(text)
    assert 'id="settings"' in attributes and "<title>Pieces</title>" in page
    assert (settings["start"], settings["film"]) == ("step=3", {"x": "</script>"})
    assert (settings["reasons"], settings["version"]) == (REASONS, VERSION)
    assert sorted(SCRIPTS) == sorted(path.name for path in PAGE.glob("*.js"))
    assert sorted(STYLES) == sorted(path.name for path in PAGE.glob("*.css"))


def test_the_command_writes_one_file_beside_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, bad, html = (
        tmp_path / f"{n}" for n in ("one.jsonl", "two.jsonl", "bad.jsonl", "x.html")
    )
    for path, more in ((one, ""), (two, '{"at":"pl'), (bad, "what\n"), (html, "")):
        path.write_text(RUN + more, encoding="utf-8")
    out = str(tmp_path / "page.html")
    for arguments in ([one], [one, "--beside", two], [one, "--beside", two, "--out", out]):
        assert main(list(map(str, arguments))) == 0
    assert out in capsys.readouterr().out
    pages = {path.name for path in tmp_path.glob("*.html")}
    assert pages == {"one.html", "one_two.html", "page.html", "x.html"}
    refused = {bad: "bad.jsonl, line 3: must be JSON", tmp_path / "none.jsonl": "none.jsonl"}
    for path, words in (refused | {html: ""}).items():  # a page never replaces its own run
        assert main([str(path)]) == 2 and words in capsys.readouterr().err
    assert html.read_text("utf-8") == RUN and not (tmp_path / "bad.html").exists()


SAID = re.compile(r'"([\w.]+)":\s*\[\s*"((?:[^"\\]|\\.)*)",\s*"((?:[^"\\]|\\.)*)",?\s*\]')
_BEFORE = r"\b(?:t\(\s*|(?:says|label|tip): )"  # a call, or an attribute of `h`
ASKED = re.compile(_BEFORE + r'"([\w.]+)"')
MADE = re.compile(_BEFORE + r"`([\w.]+)\$\{")
EITHER = re.compile(r'\bt\([^`"]*\?\s*"([\w.]+)"\s*:\s*"([\w.]+)"')
KIND = re.compile(r'(\w+): \{letter: ".", fill: "[^"]+", words: \["([^"]+)", "([^"]+)"\]')
REASON = re.compile(
    r'(\w+|""): \{letter: "(\w)", short: \["([^"]+)", "([^"]+)"\],\s+chinese: "([^"]+)"'
)


def words() -> dict[str, tuple[str, str]]:
    text = "".join(map(_text, (*SCRIPTS, START)))
    found = SAID.findall(text)
    found += [(f"kind.{kind}", *both) for kind, *both in KIND.findall(text)]
    for reason, _, *short, chinese in REASON.findall(text):
        name = reason.strip('"')
        found += [
            (f"short.{name}", *short),
            (f"reason.{name}", REASONS.get(name, "not tried"), chinese),
        ]
    assert len({key for key, _, _ in found}) == len(found)
    return {key: (english, chinese) for key, english, chinese in found}


def test_every_text_that_is_asked_for_is_there_in_english_and_chinese() -> None:
    page_words = words()
    assert len(page_words) > 150
    alike = {"shell.language", "kind.prompt"}  # each names the other; a term
    for key, (english, chinese) in page_words.items():
        is_chinese = [re.search(r"[\u3000-\uffef]", text) for text in (english, chinese)]
        assert key in alike or (english and chinese and not is_chinese[0] and is_chinese[1]), key
        holes = [set(re.findall(r"\{(\w+)\}", text)) for text in (english, chinese)]
        assert holes[0] == holes[1], key
    kinds = ("prompt", "decode", "recomputed", "draft", "accepted", "rejected", "discarded")
    asked = {f"kind.{kind}" for kind in kinds}
    for text in map(_text, (*SCRIPTS, START)):
        asked |= {*ASKED.findall(text), *(key for pair in EITHER.findall(text) for key in pair)}
        for beginning in MADE.findall(text):
            assert any(key.startswith(beginning) for key in page_words), beginning
    assert asked <= page_words.keys()


def _text(name: str | Path) -> str:
    return (PAGE / name).read_text(encoding="utf-8")
