"""The pictures and captions in the chapters are those of the films that the engine makes today; and
the commands say what is missing."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image, ImageChops, ImageColor

from conftest import need
from workshop.book import palette
from workshop.measure.bench.bench_record import replace_between_markers
from workshop.practice.museum import museum_page
from workshop.practice.museum.exhibits import EXHIBITS
from workshop.practice.museum.pictures import FOLDER as PICTURES
from workshop.practice.museum.pictures import SCENES, picture_of
from workshop.watch import chromium, films, live_still, page_maker
from workshop.watch.film_captions import (
    MARKER,
    cell_caption,
    chinese_caption,
    page_caption,
    parted,
    script_of,
)
from workshop.watch.film_command import index_page
from workshop.watch.films import BEYOND, FILMS, Shot
from workshop.watch.stills import LANGUAGES, ROOT, make_stills, take_still
from workshop.watch.watch_command import main
from workshop.watch.workloads import Cast

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ALL = FILMS | BEYOND
IN_BOTH = pytest.mark.parametrize("language", LANGUAGES)


@pytest.mark.parametrize("name", ALL)
def test_a_page_shows_its_film_and_a_chapters_notebook_too(
    name: int | str, shots: dict[int | str, Shot]
) -> None:
    """With the caption of today's film, the command, and small, sharp pictures."""
    shot = shots[name]
    page = ROOT / shot.film.folder / shot.film.page
    for suffix, caption in ((".md", page_caption), (".zh.md", chinese_caption)):
        text = page.with_suffix(suffix).read_text(encoding="utf-8")
        assert text == replace_between_markers(text, MARKER, caption(shot))
        assert suffix != ".md" or f'make watch ARGS="--film {name} --open"' in text
    for ending in LANGUAGES.values():
        still = page.parent / f"{shot.film.picture}{ending}"
        with Image.open(still) as picture:  # 900 of the page's pixels, twice
            assert picture.width == 1800 and still.stat().st_size < 150_000
    if name in FILMS:
        _, cell, _ = parted(script_of(shot, ROOT).read_text(encoding="utf-8"))
        assert cell == cell_caption(shot)


@pytest.mark.sample(every=7)
@pytest.mark.parametrize("name", ALL)
@IN_BOTH
def test_a_picture_equals_the_browsers_drawing(
    name: int | str, language: str, shots: dict[int | str, Shot], browser: Browser, tmp_path: Path
) -> None:
    """Up to the fonts of a machine. Columns that are as wide as their steps took differ in each
    run: such a picture is only as large."""
    if language == "zh":
        need("Chinese font")
    film = shots[name].film
    shot = replace(shots[name], film=replace(film, columns=""))
    drawn = take_still(browser, shot, tmp_path, language)
    still = (ROOT / film.folder / film.page).parent / f"{film.picture}{LANGUAGES[language]}"
    with Image.open(still) as kept:
        assert drawn.size == kept.size
        small = [image.convert("L").resize((90, 60)) for image in (drawn, kept)]
    different = ImageChops.difference(*small).histogram()
    mean = sum(value * number for value, number in enumerate(different)) / (90 * 60)
    assert film.columns or mean < 1.5, "draw it again: python -m workshop.watch --stills"


@IN_BOTH
def test_the_picture_of_a_long_prompt_shows_that_its_step_is_long(language: str) -> None:
    """With columns of one width, the whole prompt looks quicker than its chunks."""
    film, widest = FILMS[6], 0
    path = (ROOT / film.folder / film.page).parent / f"{film.picture}{LANGUAGES[language]}"
    with Image.open(path) as picture:
        pixels = picture.convert("RGB")
    of_prompt = ImageColor.getrgb(palette.PROMPT)
    for y in range(0, 400, 4):  # the grid; below it is the budget, as wide as the picture
        row = [pixels.getpixel((x, y)) for x in range(pixels.width)]
        for is_prompt, group in groupby(row, lambda pixel: _is_near(pixel, of_prompt)):
            widest = max(widest, len(list(group)) if is_prompt else 0)
    assert widest > 100  # a column of equal ones is at most 68 wide


def _is_near(pixel: Any, colour: Any) -> bool:
    return all(abs(a - b) < 24 for a, b in zip(pixel, colour))


def test_exhibits_and_the_servers_page_have_their_pictures() -> None:
    exhibits = {exhibit.title: exhibit for exhibit in EXHIBITS}
    pictures = [picture_of(exhibits[title]) for title in SCENES]
    assert all(picture.name in museum_page.render() for picture in pictures)
    kept = {path.name for path in PICTURES.glob("*.png") if ".zh" not in path.suffixes}
    assert kept == {picture.name for picture in pictures}
    for ending in LANGUAGES.values():
        for path in (
            *(p.with_suffix(ending) for p in pictures),
            live_still.FOLDER / f"live{ending}",
        ):
            assert path.stat().st_size < 150_000
        page = ROOT / "common" / "serve" / f"README{ending.removesuffix('.png')}.md"
        assert f"](figures/live{ending})" in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_servers_page_is_taken_at_a_preemption(browser: Browser) -> None:
    with Image.open(live_still.FOLDER / "live.png") as kept:
        assert live_still.take_live(browser, "en").size == kept.size


# -- commands


def test_a_film_or_all_with_the_page_that_leads_to_them_are_written_and_opened_if_asked(
    tmp_path: Path,
    shots: dict[int | str, Shot],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(films, "shoot", lambda film, *_, **__: shots[film.chapter])
    opened: list[str] = []
    monkeypatch.setattr(page_maker.webbrowser, "open", opened.append)
    out = tmp_path / "deep" / "film.html"
    assert main(["--film", "4", "--out", str(out)]) == 0 and opened == []
    assert "In step 6 all 15 blocks are taken" in capsys.readouterr().out
    assert "Chapter 4: memory runs out" in out.read_text(encoding="utf-8")
    assert main(["--films", "--open", "--out", str(tmp_path)]) == 0
    assert opened == [(tmp_path / "index.html").as_uri()]
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    for chapter in FILMS:
        assert f'href="film_{chapter}.html"' in index
        assert (tmp_path / f"film_{chapter}.html").exists()
    assert "a &lt; b" in index_page([(1, ("a < b", "c"), ("d", "e"))])
    for wrong in ("7", "x"):
        with pytest.raises(SystemExit):
            main(["--film", wrong])


def test_without_a_browser_it_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cast: Cast
) -> None:
    monkeypatch.setattr(chromium.shutil, "which", lambda program: None)
    with pytest.raises(ValueError, match="apt install chromium"):
        make_stills(cast)
    assert main(["--stills"]) == 2
    assert "stills are drawn by a browser" in capsys.readouterr().err
