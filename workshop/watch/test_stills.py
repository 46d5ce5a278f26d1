"""The pictures and captions in the chapters are those of the films that the engine makes today."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image, ImageChops

from workshop.measure.bench.bench_record import replace_between_markers
from workshop.watch.film_captions import (
    MARKER,
    chinese_caption,
    page_caption,
)
from workshop.watch.films import BEYOND, FILMS, Shot
from workshop.watch.stills import LANGUAGES, ROOT, languages_of, take_still

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ALL = FILMS | BEYOND


@pytest.mark.parametrize("name", ALL)
def test_a_page_shows_its_film(name: int | str, shots: dict[int | str, Shot]) -> None:
    """With the caption of today's film, the command, and small, sharp pictures."""
    shot = shots[name]
    page = ROOT / shot.film.folder / shot.film.page
    captions = {"en": (".md", page_caption), "zh": (".zh.md", chinese_caption)}
    for language in languages_of(shot.film):
        suffix, caption = captions[language]
        text = page.with_suffix(suffix).read_text(encoding="utf-8")
        assert text == replace_between_markers(text, MARKER, caption(shot))
        assert suffix != ".md" or f'make watch ARGS="--film {name} --open"' in text
        still = page.parent / f"{shot.film.picture}{LANGUAGES[language]}"
        with Image.open(still) as picture:  # 900 of the page's pixels, twice
            assert picture.width == 1800 and still.stat().st_size < 150_000


@pytest.mark.sample(every=7)
@pytest.mark.parametrize("name", ALL)
def test_a_picture_equals_the_browsers_drawing(
    name: int | str, shots: dict[int | str, Shot], browser: Browser, tmp_path: Path
) -> None:
    """Up to the fonts of a machine. Columns that are as wide as their steps took differ in each
    run: such a picture is only as large."""
    film = shots[name].film
    shot = replace(shots[name], film=replace(film, columns=""))
    drawn = take_still(browser, shot, tmp_path)
    still = (ROOT / film.folder / film.page).parent / f"{film.picture}.png"
    with Image.open(still) as kept:
        assert drawn.size == kept.size
        small = [image.convert("L").resize((90, 60)) for image in (drawn, kept)]
    different = ImageChops.difference(*small).histogram()
    mean = sum(value * number for value, number in enumerate(different)) / (90 * 60)
    assert film.columns or mean < 1.5, "draw it again: python -m workshop.watch --stills"
