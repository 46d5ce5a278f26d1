"""The contents of the page's file."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from common.events.event_page import PAGE, SCRIPTS, STYLES, palette_rules
from common.events.frames import REASONS, VERSION
from workshop.watch import page_maker
from workshop.watch.page_maker import START, Reel, make_page
from workshop.watch.replay.film import Film
from workshop.watch.watch_command import main

RUN = (
    f'{{"kind":"run","version":{VERSION},"started_at":1.5,"scheduler":"fcfs","policy":"fcfs",'
    '"prefix_cache":null,"block_size":4,"num_blocks":3,"max_num_seqs":2,'
    '"max_num_batched_tokens":8,"overlaps":false,"config":{},"model":{},"versions":{}}\n'
    '{"at":"between","time":0.1,"changes":{"waiting":[[],["a<b"]],"requests":{"a<b":[{"number":0,'
    '"prompt":[1,2],"prompt_pieces":["</script>","<!-- <script>\\u2028 &amp; 中"],'
    '"max_tokens":2,"priority":0,"num_cached":0,"num_preemptions":0}]}}}\n'
)


class Scripts(HTMLParser):
    """The scripts of a page as a browser finds them: their attributes, and their text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[dict[str, str | None], str]] = []
        self.addresses: list[str | None] = []
        self.is_in_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action")]
        self.is_in_script = tag == "script"
        if self.is_in_script:
            self.found.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self.is_in_script = False

    def handle_data(self, data: str) -> None:
        if self.is_in_script:
            attributes, text = self.found[-1]
            self.found[-1] = (attributes, text + data)


def reels_of(page: str) -> list[tuple[dict[str, str | None], str]]:
    found = Scripts(page).found
    return [entry for entry in found if entry[0].get("type") == "application/x-ndjson"]


def test_frames_are_in_the_page_unchanged() -> None:
    page = make_page([Reel('the "left" <one>', RUN), Reel("right", RUN)])
    (attributes, text), (other, _) = reels_of(page)
    assert (attributes["data-label"], other["data-label"]) == ('the "left" <one>', "right")
    assert "<" not in text
    assert text.replace("\\u003c", "<") == RUN
    assert Film(text.splitlines(keepends=True)).lines == Film(RUN.splitlines(keepends=True)).lines
    assert len(Scripts(page).found) == 4, "settings, two films, the scripts: no text ended one"


def test_a_prompt_may_name_a_placeholder_of_the_page() -> None:
    """Every text is put in where the page names it, and never inside another text."""
    run = RUN.replace("&amp; 中", "{{script}} {{style}} {{data}}")
    [(_, text)] = reels_of(make_page([Reel("run", run)], title=("{{data}}", "")))
    assert text.replace("\\u003c", "<") == run


def test_many_frames_are_packed_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_maker, "PACKED_FROM", 100)
    page = make_page([Reel("run", RUN)])
    [(attributes, text)] = reels_of(page)
    assert attributes["data-encoding"] == "gzip"
    assert gzip.decompress(base64.b64decode(text)).decode() == RUN
    assert base64.b64decode(text)[4:8] == bytes(4), "no time: the same bytes for the same run"


def test_the_page_sends_no_request() -> None:
    page = make_page([Reel("run", RUN)])
    assert Scripts(page).addresses == []
    names = set(re.findall(r"https?://[\w./-]+", page))
    assert names <= {"http://www.w3.org/2000/svg"}, "the name of a language, which nobody fetches"
    for word in ("@import", "url(", "import(", "fetch(", "XMLHttpRequest", "WebSocket", "Worker("):
        assert word not in page, word
    assert "default-src 'none'" in page


def test_arguments_are_in_the_page() -> None:
    page = make_page([], title=("Pieces", "切块"), start="step=3", film={"x": "</script>"})
    attributes, text = Scripts(page).found[0]
    assert attributes["id"] == "settings"
    settings = json.loads(text)
    assert settings["start"] == "step=3"
    assert settings["film"] == {"x": "</script>"}
    assert settings["reasons"] == REASONS and settings["version"] == VERSION
    assert "<title>Pieces</title>" in page


def test_every_file_of_the_page_is_in_it_once() -> None:
    assert len(set(SCRIPTS)) == len(SCRIPTS)
    assert set(SCRIPTS) == {path.name for path in PAGE.glob("*.js")}
    assert set(STYLES) == {path.name for path in PAGE.glob("*.css")}
    assert SCRIPTS[0] == "language.js"


def test_every_colour_that_is_named_is_defined() -> None:
    text = "".join(map(_text, (*SCRIPTS, START, *STYLES)))
    text += palette_rules()
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    defined = set(re.findall(r"(--[\w-]+)(?::|\", )", text))  # in a style, or by setProperty
    assert used <= defined, used - defined
    assert "--prompt: #0072b2;" in palette_rules()


# -- the command


def test_the_command_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.jsonl").write_text(RUN, encoding="utf-8")
    (tmp_path / "two.jsonl").write_text(RUN + '{"at":"pl', encoding="utf-8")
    out = tmp_path / "page.html"
    run, beside = str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")
    assert main([run, "--beside", beside, "--out", str(out)]) == 0
    labels = [attributes["data-label"] for attributes, _ in reels_of(out.read_text("utf-8"))]
    assert labels == ["one", "two"]
    assert str(out) in capsys.readouterr().out


def test_a_page_is_named_for_its_runs_and_saved_beside_them(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    for path in (one, two):
        path.write_text(RUN, encoding="utf-8")
    for arguments in ([one], [two], [one, "--beside", two]):
        assert main(list(map(str, arguments))) == 0
    pages = {path.name for path in tmp_path.glob("*.html")}
    assert pages == {"one.html", "two.html", "one_two.html"}


def test_a_page_never_replaces_its_own_run(tmp_path: Path) -> None:
    run = tmp_path / "run.html"
    run.write_text(RUN, encoding="utf-8")
    assert main([str(run)]) == 2
    assert run.read_text("utf-8") == RUN


def test_files_that_are_not_runs_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jsonl").write_text(RUN + "what\n", encoding="utf-8")
    out = str(tmp_path / "page.html")
    assert main([str(tmp_path / "bad.jsonl"), "--out", out]) == 2
    assert "bad.jsonl, line 3: must be JSON" in capsys.readouterr().err
    assert main([str(tmp_path / "none.jsonl"), "--out", out]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("option", ["--film=3", "--mine"])
def test_a_script_to_perform_takes_no_run(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run.jsonl", option])
    assert "give no run" in capsys.readouterr().err


# -- the words


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


def test_every_text_is_there_in_english_and_chinese() -> None:
    page_words = words()
    assert len(page_words) > 150
    # Each names the other; a term.
    alike = {"shell.language", "kind.prompt"}
    for key, (english, chinese) in page_words.items():
        assert english, key
        assert re.search(r"[\u3000-\uffef]", chinese) or key in alike, f"{key}: {chinese}"
        assert not re.search(r"[\u4e00-\u9fff]", english) or key in alike, f"{key}: {english}"
        holes = [sorted(re.findall(r"\{(\w+)\}", text)) for text in (english, chinese)]
        assert set(holes[0]) == set(holes[1]), f"{key}: {holes}"


def test_every_text_that_is_asked_for_is_there() -> None:
    page_words = words()
    for name in (*SCRIPTS, START):
        text = _text(name)
        either = [key for pair in EITHER.findall(text) for key in pair]
        for key in [*ASKED.findall(text), *either]:
            assert key in page_words, f"{name}: {key}"
        for beginning in MADE.findall(text):
            assert any(key.startswith(beginning) for key in page_words), f"{name}: {beginning}"


def test_every_frame_value_has_words() -> None:
    page_words = words()
    for kind in ("prompt", "decode", "recomputed", "draft", "accepted", "rejected", "discarded"):
        assert f"kind.{kind}" in page_words
    letters = {
        reason.strip('"'): letter for reason, letter, *_ in REASON.findall(_text("reasons.js"))
    }
    assert set(letters) == {*REASONS, ""}
    assert len(set(letters.values())) == len(letters), "a letter of its own for each"


def _text(name: str | Path) -> str:
    return (PAGE / name).read_text(encoding="utf-8")
