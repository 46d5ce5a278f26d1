"""The pictures and captions in the chapters are those of the films that the engine makes today; and
the commands say what is missing."""

from __future__ import annotations

from collections.abc import Sequence
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

CHAPTERS = pytest.mark.parametrize("chapter", FILMS)
ALL = pytest.mark.parametrize("name", FILMS | BEYOND)
IN_BOTH = pytest.mark.parametrize("language", LANGUAGES)


def still_of(name: int | str, language: str) -> Path:
    film = (FILMS | BEYOND)[name]
    page = ROOT / film.folder / film.page
    return page.parent / f"{film.picture}{LANGUAGES[language]}"


@ALL
def test_a_page_shows_its_film(name: int | str, shots: dict[int | str, Shot]) -> None:
    """With the caption of today's film, and the command."""
    shot = shots[name]
    page = ROOT / shot.film.folder / shot.film.page
    text = page.with_suffix(".md").read_text(encoding="utf-8")
    assert text == replace_between_markers(text, MARKER, page_caption(shot))
    assert f'make watch ARGS="--film {name} --open"' in text
    chinese = page.with_suffix(".zh.md").read_text(encoding="utf-8")
    assert chinese == replace_between_markers(chinese, MARKER, chinese_caption(shot))


@CHAPTERS
def test_a_notebook_shows_it_too(chapter: int, shots: dict[int | str, Shot]) -> None:
    _, cell, _ = parted(script_of(shots[chapter], ROOT).read_text(encoding="utf-8"))
    assert cell == cell_caption(shots[chapter])


def test_a_cell_is_found_between_others() -> None:
    script = "a = 1\n\n# %% [markdown]\n# ## Watch it run\n#\n# words\n\n# %%\nb = 2\n"
    before, cell, after = parted(script)
    assert before + cell + after == script
    assert cell == "# %% [markdown]\n# ## Watch it run\n#\n# words\n"
    assert parted("a = 1\n") == ("a = 1\n", "", "")


@ALL
@IN_BOTH
def test_a_picture_is_small_and_sharp(name: int | str, language: str) -> None:
    assert still_of(name, language).stat().st_size < 150_000
    with Image.open(still_of(name, language)) as picture:
        assert picture.width == 1800  # 900 of the page's pixels, twice


@pytest.mark.sample(every=7)
@ALL
@IN_BOTH
def test_a_picture_equals_the_browsers_drawing(
    name: int | str, language: str, shots: dict[int | str, Shot], browser: Browser, tmp_path: Path
) -> None:
    """Up to the fonts of a machine: the same size, and nearly the same marks. Columns that are as
    wide as their steps took differ in each run, so there the cells of each row are compared."""
    if language == "zh":
        need("Chinese font")
    shot = shots[name]
    has_times = shot.film.columns == "time"
    shot = replace(shot, film=replace(shot.film, columns=""))
    drawn = take_still(browser, shot, tmp_path, language).convert("RGB")
    with Image.open(still_of(name, language)) as kept:
        assert drawn.size == kept.size
        pictures = [image.convert("L") for image in (drawn, kept)]
        if has_times:
            cells = cells_of(drawn)
            assert cells == cells_of(kept.convert("RGB")) and all(cells)
    for picture in pictures if has_times else ():
        for left in (140, 1030):  # right of the names, in both runs
            picture.paste(255, (left, 100, left + 750, 376))
    small = [picture.resize((90, 60)) for picture in pictures]
    different = ImageChops.difference(*small).histogram()
    mean = sum(value * number for value, number in enumerate(different)) / (90 * 60)
    assert mean < 1.5, "draw it again: python -m workshop.watch --stills"


@IN_BOTH
def test_the_picture_of_a_long_prompt_shows_that_its_step_is_long(language: str) -> None:
    """With columns of one width, the whole prompt looks quicker than its chunks."""
    with Image.open(still_of(6, language)) as picture:
        pixels, width = picture.convert("RGB"), picture.width
    of_prompt = ImageColor.getrgb(palette.PROMPT)
    runs = [0]
    for y in range(0, 400, 4):  # the grid; below it is the budget, as wide as the picture
        row = [pixels.getpixel((x, y)) for x in range(width)]
        for is_prompt, group in groupby(row, lambda pixel: _is_near(pixel, of_prompt)):
            runs.append(len(list(group)) if is_prompt else 0)
    assert max(runs) > 100  # a column of equal ones is at most 68 wide


def cells_of(picture: Image.Image) -> list[list[str]]:
    """In each row of the grid, of both runs, what is computed in the cells from left to right."""
    colours = {name: ImageColor.getrgb(getattr(palette, name)) for name in ("PROMPT", "DECODE")}
    rows = []
    for y in (141, 199, 257, 315):  # above the texts of the cells
        pixels = [picture.getpixel((x, y)) for x in range(picture.width)]
        names = [[name for name in colours if _is_near(p, colours[name])] for p in pixels]
        rows.append([name for (name,) in (cell for cell, _ in groupby(names) if cell)])
    return rows


def _is_near(pixel: Any, colour: Sequence[int]) -> bool:
    return all(abs(a - b) < 24 for a, b in zip(pixel, colour))


def test_exhibits_with_pictures_are_exhibits_and_have_them() -> None:
    exhibits = {exhibit.title: exhibit for exhibit in EXHIBITS}
    for title in SCENES:
        for ending in LANGUAGES.values():
            assert picture_of(exhibits[title]).with_suffix(ending).stat().st_size < 150_000
        assert picture_of(exhibits[title]).name in museum_page.render()
    kept = {path.name for path in PICTURES.glob("*.png") if ".zh" not in path.suffixes}
    assert kept == {picture_of(exhibits[title]).name for title in SCENES}


def test_the_servers_page_has_its_picture_in_its_section() -> None:
    for ending in LANGUAGES.values():
        assert (live_still.FOLDER / f"live{ending}").stat().st_size < 150_000
        page = ROOT / "common" / "serve" / f"README{ending.removesuffix('.png')}.md"
        assert f"](figures/live{ending})" in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_servers_page_is_taken_at_a_preemption(browser: Browser) -> None:
    with Image.open(live_still.FOLDER / "live.png") as kept:
        assert live_still.take_live(browser, "en").size == kept.size


# -- commands


def test_one_film(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "film.html"
    assert main(["--film", "4", "--out", str(out)]) == 0
    assert "In step 6 all 15 blocks are taken" in capsys.readouterr().out
    assert "Chapter 4: memory runs out" in out.read_text(encoding="utf-8")


def test_all_films_and_the_page_that_leads_to_them(
    tmp_path: Path, shots: dict[int | str, Shot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stills are not performed again."""
    monkeypatch.setattr(films, "shoot", lambda film, *_, **__: shots[film.chapter])
    assert main(["--films", "--out", str(tmp_path / "films")]) == 0
    index = (tmp_path / "films" / "index.html").read_text(encoding="utf-8")
    for chapter in FILMS:
        assert f'href="film_{chapter}.html"' in index
        assert (tmp_path / "films" / f"film_{chapter}.html").exists()


def test_the_words_of_the_index_are_text() -> None:
    page = index_page([(1, ("a < b", "c"), ("d & e", "f"))])
    assert "a &lt; b" in page
    assert "d &amp; e" in page


def test_a_page_is_opened_where_it_is_wanted(
    tmp_path: Path, shots: dict[int | str, Shot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(films, "shoot", lambda film, *_, **__: shots[film.chapter])
    opened: list[str] = []
    monkeypatch.setattr(page_maker.webbrowser, "open", opened.append)
    out = tmp_path / "film.html"
    main(["--film", "2", "--out", str(out)])
    assert opened == []
    main(["--film", "2", "--out", str(out), "--open"])
    assert opened == [out.as_uri()]


@pytest.mark.parametrize("arguments", [["--film", "7"], ["--film", "x"]])
def test_invalid_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)


def test_without_a_browser_it_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cast: Cast
) -> None:
    def nowhere(program: str) -> Any:
        return None

    monkeypatch.setattr(chromium.shutil, "which", nowhere)
    with pytest.raises(ValueError, match="apt install chromium"):
        make_stills(cast)
    assert main(["--stills"]) == 2
    assert "stills are drawn by a browser" in capsys.readouterr().err
