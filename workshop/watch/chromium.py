"""The system's Chromium, driven by playwright: for the tests of the page and for its stills.

    with started_browser() as browser: browser.new_page() ...

playwright is the extra `[browser]`; the browser is the system's (Debian: `chromium`), because
playwright's browser would be a separate download."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
# The same on every machine: no hinting by screen, no sub-pixels, and scroll bars without width.
FLAGS = ("--font-render-hinting=none", "--disable-lcd-text", "--hide-scrollbars")


class BrowserUnavailableError(RuntimeError):
    """No browser or no playwright is installed; the message names what to install."""


def find_chromium() -> str:
    """Find the browser. Raises `BrowserUnavailableError` if none of `PROGRAMS` is in the PATH."""
    for program in PROGRAMS:
        if path := shutil.which(program):
            return path
    raise BrowserUnavailableError(
        f"there is no browser ({', '.join(PROGRAMS)}). On Debian and Ubuntu: apt install chromium"
    )


@contextlib.contextmanager
def started_browser() -> Iterator[Browser]:
    """Run a browser without a window until the context ends. Raises `BrowserUnavailableError`.

    An asyncio event loop runs in this thread in the meantime, so no other one can be started."""
    program = find_chromium()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise BrowserUnavailableError(
            "playwright is not installed: pip install 'vllm-from-scratch[browser]'"
        ) from None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()
