"""Make one HTML file from one or two films: styles, scripts and events, without any address that a
browser would fetch.

    make_page([Reel("with chunks", text), Reel("without", other)], title=("...", "..."))

`common/events/event_page.py` combines the page's files. Events are embedded as unchanged lines,
except that `<` is written as `\\u003c`, which is the same in JSON. From `PACKED_FROM` bytes on they
are packed, because 2,000 steps of 200 requests are about 20 MB."""

from __future__ import annotations

import base64
import gzip
import html
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.events.event_page import in_script, put_together
from workshop.watch.source_lines import RULES, source_lines

PACKED_FROM = 1_000_000  # bytes of events
START = Path(__file__).parent / "start.js"  # the page's last script


@dataclass(frozen=True, slots=True)
class Reel:
    """The events of one run, as the text of its file, and the run's name next to another run, in
    Chinese too if the name differs."""

    label: str
    text: str
    label_zh: str = ""


def make_page(
    reels: Sequence[Reel],
    title: tuple[str, str] | None = None,
    start: str = "",
    **settings: Any,
) -> str:
    """Return the page as text. `title` is in English and Chinese. `start`, such as
    "step=12&request=b", is where the page opens if its address has no position. `settings` are
    passed to the scripts."""
    settings = {"title": title, "start": start, "sources": source_lines(RULES), **settings}
    name = title[0] if title else "Watch the engine run"
    return put_together(name, settings, [_reel(reel) for reel in reels], starts=[START])


def _reel(reel: Reel) -> str:
    label, label_zh = (html.escape(one, quote=True) for one in (reel.label, reel.label_zh))
    head = f'<script type="application/x-ndjson" data-label="{label}" data-label-zh="{label_zh}"'
    if len(reel.text) < PACKED_FROM:
        return f"{head}>{in_script(reel.text)}</script>"
    packed = gzip.compress(reel.text.encode("utf-8"), mtime=0)  # the same bytes for the same run
    return f'{head} data-encoding="gzip">{base64.b64encode(packed).decode()}</script>'


def write_page(path: Path, page: str, is_opened: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", newline="\n")
    size = f"{len(page) / 1e6:.1f} MB; works offline."
    if is_opened and webbrowser.open(path.resolve().as_uri()):
        print(f"{path}: {size}")
    else:
        print(f"{path}: open it in a browser{'' if is_opened else ', or add --open'}. {size}")
