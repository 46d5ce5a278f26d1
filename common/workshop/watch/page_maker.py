"""One HTML file from one or two films: styles, scripts and the events themselves, with no address
in it that a browser would fetch.

    make_page([Reel("with chunks", text), Reel("without", other)], title=("...", "..."))

The scripts are those in `page/`, one behind the other in the order of `SCRIPTS`. Events stand in
the page as the lines that they are, `<` written as `\\u003c`, which in JSON is the same; from
`PACKED_FROM` bytes on they are packed, as 2,000 steps of 200 requests are some 20 MB."""

from __future__ import annotations

import ast
import base64
import gzip
import html
import json
import re
import webbrowser
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from common.events.event_kinds import KINDS, REASONS, VERSION
from common.workshop.watch.source_lines import source_lines
from common.workshop.watch.source_places import RULES

PAGE = Path(__file__).parent / "page"
PALETTE = Path(__file__).parents[1] / "tools" / "palette.py"
PACKED_FROM = 1_000_000  # bytes of events

# Each adds to the one global, `Watch`, and uses what stands before it. Scenes: in reading order.
SCRIPTS = (
    *("language.js", "settings.js", "events.js", "state.js", "on_event.js", "film.js"),
    *("store.js", "colours.js", "canvas.js", "reasons.js"),
    *(
        "shell.js",
        "panels.js",
        "moments.js",
        "files.js",
        "compare.js",
        "knob.js",
        "guide.js",
        "caption.js",
    ),
    *("help.js", "keys.js", "token_text.js", "block_facts.js", "source_view.js"),
    *("grid_marks.js", "grid_words.js", "grid_paint.js", "grid_legend.js", "grid.js"),
    *("sentence_words.js", "words_sentences.js", "words_tokens.js", "words.js"),
    *("pool_details.js", "pool_looks.js", "pool_painters.js", "pool.js"),
    *("cache_layout.js", "cache_boxes.js", "cache_map.js", "cache.js"),
    *("queue.js", "clock.js"),
    "start.js",
)
STYLES = ("watch.css", "scenes.css", "caption.css")


@dataclass(frozen=True, slots=True)
class Reel:
    """The events of one run, as the text of its file, and what to call it beside another, in
    Chinese too if that is another word."""

    label: str
    text: str
    label_zh: str = ""


def make_page(
    reels: Sequence[Reel],
    title: tuple[str, str] | None = None,
    start: str = "",
    **settings: Any,
) -> str:
    """The page, as text. `title` is in English and Chinese; `start` is where it opens when its
    address says nothing else, such as "step=12&request=b". `settings` are handed to the scripts."""
    settings = {
        "version": VERSION,
        "schema": schema(),
        "reasons": REASONS,
        "title": title,
        "start": start,
        "sources": source_lines(RULES),
        **settings,
    }
    data = [
        f'<script type="application/json" id="settings">{in_script(json.dumps(settings))}</script>'
    ]
    data += [_reel(reel) for reel in reels]
    parts = {
        "title": html.escape(title[0] if title else "Watch the engine run"),
        "style": "\n".join([palette_rules(), *map(_read, STYLES)]),
        "data": "\n".join(data),
        "script": "\n".join(map(_read, SCRIPTS)),
    }
    # In one pass: a text that is put in may say {{script}} itself.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("watch.html"))


def in_script(text: str) -> str:
    """JSON that no HTML parser takes for the end of a script: there, `<` stands in strings only."""
    return text.replace("<", "\\u003c")


def _reel(reel: Reel) -> str:
    label, label_zh = (html.escape(one, quote=True) for one in (reel.label, reel.label_zh))
    head = f'<script type="application/x-ndjson" data-label="{label}" data-label-zh="{label_zh}"'
    if len(reel.text) < PACKED_FROM:
        return f"{head}>{in_script(reel.text)}</script>"
    packed = gzip.compress(reel.text.encode("utf-8"), mtime=0)  # the same bytes for the same run
    return f'{head} data-encoding="gzip">{base64.b64encode(packed).decode()}</script>'


def schema() -> dict[str, dict[str, list[Any]]]:
    """Each kind's fields: the type, and what it is when it is left out, if it may be."""
    found: dict[str, dict[str, list[Any]]] = {}
    for name, kind in KINDS.items():
        found[name] = {}
        for field in fields(kind):
            entry: list[Any] = [field.type]
            if field.default is not MISSING:
                entry.append(field.default)
            elif field.default_factory is not MISSING:
                entry.append(field.default_factory())
            found[name][field.name] = entry
    return found


def palette_rules() -> str:
    """The book's colours as CSS variables. Read, not imported: matplotlib is not needed here."""
    rules = []
    for node in ast.parse(PALETTE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            name, value = ast.unparse(node.targets[0]), node.value.value
            if isinstance(value, str) and value.startswith("#"):
                rules.append(f"--{name.lower().replace('_', '-')}: {value};")
    return f":root {{ {' '.join(rules)} }}"


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def write_page(path: Path, page: str, is_opened: bool = False) -> None:
    path.write_text(page, encoding="utf-8", newline="\n")
    print(f"{path}: {len(page) / 1e6:.1f} MB. It needs nothing else, and no network.")
    if is_opened:
        webbrowser.open(path.resolve().as_uri())
