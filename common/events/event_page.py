"""Assemble the watch page: styles, scripts and data in one HTML text without any URL that a browser
would fetch.

Its files are in `page/`, and are read here as data. `make watch` uses them for complete films, the
server for a live one. Each adds its own last script.

See common/events/README.md#the-film"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.events import page_colours
from common.events.frames import REASONS, VERSION

PAGE = Path(__file__).parent / "page"

# Each script has a scope of its own, adds to the one global, `Watch`, and uses earlier ones. Scenes
# are in reading order.
SCRIPTS = (
    *("language.js", "frames.js", "film.js", "store.js", "colours.js", "canvas.js", "reasons.js"),
    *("shell.js", "panels.js", "moments.js", "files.js", "compare.js", "knob.js", "guide.js"),
    *("caption.js", "keys.js", "token_text.js", "block_facts.js", "source_view.js"),
    *("grid_words.js", "grid_paint.js", "grid.js"),
    *("sentence_words.js", "words_sentences.js", "words_tokens.js", "words.js"),
    *("pool_details.js", "pool_painters.js", "pool.js"),
    *("cache_layout.js", "cache_map.js", "cache.js"),
    *("queue.js", "clock.js"),
)
STYLES = ("watch.css", "scenes.css", "caption.css")


def put_together(
    title: str,
    settings: dict[str, Any],
    reels: Sequence[str] = (),
    *,
    starts: Sequence[Path],
    styles: Sequence[Path] = (),
    policy: str = "",
) -> str:
    """Return the page's HTML. `settings` are passed to the scripts, `reels` are elements with
    frames. `starts`: the last scripts; `styles` and `policy`: added to those of every page."""
    settings = {"version": VERSION, "reasons": REASONS, **settings}
    said = in_script(json.dumps(settings))
    scripts = [*(PAGE / name for name in SCRIPTS), *starts]
    parts = {
        "title": html.escape(title),
        "policy": policy,
        "style": "\n".join(
            [palette_rules(), *map(_read, [PAGE / s for s in STYLES]), *map(_read, styles)]
        ),
        "data": "\n".join(
            [f'<script type="application/json" id="settings">{said}</script>', *reels]
        ),
        "script": "\n".join(['"use strict";', *map(_in_scope, scripts)]),
    }
    # In one pass, because an inserted text can contain {{script}} itself.
    template = _read(PAGE / "watch.html")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def in_script(text: str) -> str:
    """Escape JSON so that no HTML parser finds the end of a script in it: in JSON, `<` occurs only
    within strings."""
    return text.replace("<", "\\u003c")


def palette_rules() -> str:
    """Return the book's colours as CSS variables."""
    colours = {name: value for name, value in vars(page_colours).items() if name.isupper()}
    rules = [f"--{name.lower()}: {value};" for name, value in colours.items()]
    return f":root {{ {' '.join(rules)} }}"


def _in_scope(script: Path) -> str:
    return f"(() => {{\n{_read(script)}}})();"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
