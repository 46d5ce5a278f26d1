"""A picture of the server's page: eight concurrent prompts, four with a common prefix, and too
little memory for all. `python -m workshop.watch --stills` takes it with the others.

A server feeds the page, so every picture shows another run: the order of the requests depends on
the machine. The picture is taken when the required events are visible."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FOLDER = Path(__file__).resolve().parents[2] / "common" / "serve" / "figures"
WIDTH, HEIGHT, SCALE = 1100, 720, 1.5
LIMIT_S = 60
# Hides the clock, whose times differ each time, and parts that do not fit in a small picture.
_STYLE = """
.scene-clock, .transport select, .cache .cache-about, .pool .pool-details, .pool .pool-orders,
.cache-details { display: none !important; }
body > .scenes { grid-template-rows: minmax(0, 1.1fr) minmax(0, 1fr) !important; }
"""
_LITTLE = "Watch.store.films[0]?.run.num_blocks < 100"
_PREEMPTED = """(() => {
  // Not the last step: who stands there goes on with the engine.
  const steps = (Watch.store.films[0]?.steps ?? []).slice(0, -3);
  return steps.findIndex(({frames}) => frames.some(({preempted}) => preempted.length));
})()"""


def take_live(browser: Browser, language: str) -> Any:
    """Return the picture as a PIL image with few colours."""
    from PIL import Image

    from common.serve.fleet.programs import start_server

    size: Any = {"width": WIDTH, "height": HEIGHT}
    context = browser.new_context(viewport=size, device_scale_factor=SCALE, color_scheme="light")
    try:
        with start_server("--num-threads", "1") as server:
            server.wait_until_ready()
            page = context.new_page()
            page.goto(f"{server.url}/?lang={language}")
            page.add_style_tag(content=_STYLE)
            page.check("[name=little]")
            while not page.evaluate(_LITTLE):
                page.wait_for_timeout(50)
            page.click("[data-example=eight]")
            page.fill("[name=max_tokens]", "100")
            page.click(".run")
            end = time.monotonic() + LIMIT_S
            while (step := page.evaluate(_PREEMPTED)) < 0:
                if time.monotonic() > end:
                    raise ValueError("no request was preempted: the server has too much memory")
            page.evaluate(f"Watch.set({{step: {step}}})")
            page.wait_for_timeout(150)  # it is drawn with the next frame
            picture = Image.open(io.BytesIO(page.screenshot()))
    finally:
        context.close()
    how: Any = {"method": Image.Quantize.MAXCOVERAGE, "kmeans": 2, "dither": Image.Dither.NONE}
    return picture.convert("RGB").quantize(128, **how)  # each request keeps its own


def take_lives(browser: Browser, languages: Mapping[str, str]) -> Iterator[Path]:
    """Take the picture in each language, each with its file name's suffix. Yields the files."""
    FOLDER.mkdir(exist_ok=True)
    for language, ending in languages.items():
        path = FOLDER / f"live{ending}"
        take_live(browser, language).save(path, optimize=True)
        yield path
