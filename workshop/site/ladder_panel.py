"""The ladder's picture as a panel of the site, which `panels.js` fills: rows can be hidden, and two
compared. It shows numbers of the ladder's record only."""

from __future__ import annotations

import html
import json
import re
from typing import Any

from workshop.book.figure_words import Words
from workshop.book.palette import BASELINE, DECODE
from workshop.book.path import ROOT
from workshop.measure.bench.bench_record import percentiles, read_record

RECORD = ROOT / "workshop/measure/bench/records/ladder.json"
PICTURE = re.compile(r"!\[[^\]]*\]\(\S*figures/ladder(?:\.zh)?\.svg\)")
NUMBERS = ("output_tokens_per_s", "ttft_ms_p50", "inter_token_ms_p99")
_TITLES = {
    "many": ("many users: {} requests, {:g} a second", "用户多：{} 个请求，每秒来 {:g} 个"),
    "few": ("few users: {} requests, {:g} a second", "用户少：{} 个请求，每秒来 {:g} 个"),
}


def with_panel(text: str, is_chinese: bool) -> str:
    """Return a page's Markdown with the panel in place of the picture. Without JavaScript the
    picture, which stays in the panel, is shown."""
    data = html.escape(json.dumps(workloads(is_chinese), ensure_ascii=False))
    style = f"--with: {DECODE}; --without: {BASELINE}"
    panel = f'<div class="ladder" style="{style}" data-ladder="{data}">'
    return PICTURE.sub(lambda match: f"{panel}\n\n{match[0]}\n\n</div>", text)


def workloads(is_chinese: bool) -> list[dict[str, Any]]:
    """Return a title and rows for each workload of the record. A row has three numbers (tokens per
    second, ms, ms), each as the lowest of the runs, their median and the highest."""
    words = Words() if is_chinese else str
    return [
        {
            "title": _TITLES[name][is_chinese].format(work["num_requests"], work["arrivals_per_s"]),
            "rows": [
                {
                    "title": words(config["title"]),
                    "isChapter": config["title"][0].isdigit(),
                    "numbers": [
                        percentiles([run[number] for run in config["runs"]], [0, 50, 100])
                        for number in NUMBERS
                    ],
                }
                for config in work["rungs"].values()
            ],
        }
        for name, work in read_record(RECORD)["regimes"].items()
    ]
