"""Still pictures of the films, for the chapters' texts: the scenes of a decisive step, cut out of
the page as the browser draws it.

    python -m workshop.watch --stills   all six: NN_*/figures/film.png, and the captions

A film with a Chinese page has a Chinese still, too: NAME.zh.png. The caption in a chapter's texts
is written with the picture, from the same film (`film_captions.py`).
Only film 6's picture varies from run to run: its columns are as wide as the steps took."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from workshop.watch.chromium import BrowserUnavailableError, started_browser
from workshop.watch.film_captions import write_captions
from workshop.watch.films import BEYOND, FILMS, ChapterFilm, Shot, page_of, shoot
from workshop.watch.workloads import Cast, load_cast

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[2]
WIDTH, SCALE = 900, 2  # a text's column on the screen; read at half the size
HIGHEST = 1400
NUM_COLOURS = 128
GAP = 12  # between two moments, in pixels of the page
LANGUAGES = {"en": ".png", "zh": ".zh.png"}  # of the page, and how their pictures' names end
_HEADINGS = ("Step {}: {}", "第 {} 步：{}")

# Only the requested scenes, one below the other, with the given heights; only the tokens of the
# words, and no hints at things to point at.
_STYLE = """
.head, .transport, .compare, .notice, .film-caption, .by-time { display: none !important; }
html, body { height: auto; overflow: visible; }
.scenes, .scenes.comparing { display: block; overflow: visible; padding: 4px 12px 8px; }
.scene { position: absolute; left: -3000px; width: 600px; height: 300px; }
.scene.is-wanted { position: static; width: auto; margin-bottom: 8px; }
.scene > h2 { font-size: 15px; }
.scenes { min-height: 0 !important; } /* what a narrow window keeps free */
.cache .cache-about { min-height: 0 !important; }
.pool .pool-changes { height: 18px !important; }
.cache-details .quiet { display: none; }
.words-list, .pool-orders, .queue-lists { display: none !important; }
.pool:not(.has-groups) .pool-details { display: none !important; }
.cache-details { flex: none !important; height: auto !important; max-height: none !important; }
"""
_PREPARE = """([wanted, heading]) => {
  for (const [name, height] of wanted) {
    const scene = document.querySelector(`.scene-${name}`);
    scene.classList.add("is-wanted");
    scene.hidden = false;
    scene.style.height = `${height}px`;
  }
  document.querySelector(`.scene-${wanted[0][0]} > h2`).dataset.heading = heading;
  dispatchEvent(new Event("resize"));
  Watch.redraw();
}"""
# True when all is drawn; the titles are set again with every drawing.
_TITLE = """() => {
  for (const title of document.querySelectorAll("h2[data-heading]")) {
    title.textContent = title.dataset.heading;
  }
}"""


class View(NamedTuple):
    """An address in a page, and the scenes to show there, each with its height in pixels."""

    address: str
    heading: str
    scenes: tuple[tuple[str, int], ...]


def photograph(browser: Browser, page_path: Path, views: Sequence[View]) -> Any:
    """Return the views, one below the other, as a PIL image with few colours."""
    from PIL import Image

    context = browser.new_context(
        viewport={"width": WIDTH, "height": HIGHEST},
        device_scale_factor=SCALE,
        color_scheme="light",
        reduced_motion="reduce",
        offline=True,
    )
    try:
        shots = [Image.open(io.BytesIO(_shot(context.new_page(), page_path, v))) for v in views]
    finally:
        context.close()
    gap = GAP * SCALE
    height = sum(shot.height for shot in shots) + gap * (len(shots) - 1)
    picture = Image.new("RGB", (max(shot.width for shot in shots), height), "white")
    top = 0
    for shot in shots:
        picture.paste(shot.convert("RGB"), (0, top))
        top += shot.height + gap
    return picture.quantize(NUM_COLOURS, dither=Image.Dither.NONE)


def _shot(page: Page, path: Path, view: View) -> bytes:
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"{path.resolve().as_uri()}#{view.address}")
    page.wait_for_selector("html[data-ready]", state="attached")
    page.add_style_tag(content=_STYLE)
    page.evaluate(_PREPARE, [list(view.scenes), view.heading])
    page.wait_for_timeout(300)  # sizes are measured, and drawn with the next frame
    page.evaluate(_TITLE)
    picture = page.locator("main.scenes").screenshot()
    if problems:
        raise ValueError(f"the page of {path.name} failed: {problems[0]}")
    return picture


def take_still(browser: Browser, shot: Shot, folder: Path, language: str = "en") -> Any:
    """Return a film's picture, from its moments with stills. The page is kept in `folder`."""
    page = folder / f"film_{shot.film.name}.html"
    page.write_text(page_of(shot), encoding="utf-8")
    i = list(LANGUAGES).index(language)
    views = [
        View(
            f"{shot.start(moment)}&lang={language}",
            _HEADINGS[i].format(moment.step, moment.words[i]),
            moment.still,
        )
        for moment in shot.film.moments
        if moment.still
    ]
    return photograph(browser, page, views)


def languages_of(film: ChapterFilm) -> list[str]:
    """The languages in which there is a page that shows the film's still."""
    page = ROOT / film.folder / film.page
    return [name for name in LANGUAGES if name == "en" or page.with_suffix(".zh.md").is_file()]


def make_stills(cast: Cast | None = None) -> None:
    """Make every film's stills. Without a browser, raises `ValueError` with what to install."""
    try:
        with started_browser() as browser, tempfile.TemporaryDirectory() as folder:
            cast = cast or load_cast()
            for film in (*FILMS.values(), *BEYOND.values()):
                shot = shoot(film, Path(folder), cast)
                for language in languages_of(film):
                    ending = LANGUAGES[language]
                    target = ROOT / film.folder / "figures" / f"{Path(film.picture).name}{ending}"
                    still = take_still(browser, shot, Path(folder), language)
                    still.save(target, optimize=True)
                    print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1e3:.0f} kB")
                write_captions(shot, ROOT)
    except BrowserUnavailableError as error:
        raise ValueError(f"stills are drawn by a browser: {error}") from None
