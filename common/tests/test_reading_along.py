"""READING_ALONG.zh.md says what runs: its code, its tables, its classes and calls, its errata.

Readers of the Chinese posts read it, so there is no English page of it."""

from __future__ import annotations

import re
from code import InteractiveConsole
from collections.abc import Iterator

import pytest

from common.events.step_trace import batch_line
from common.llm import LLM, SamplingParams
from workshop.book.quoted import unfilled
from workshop.book.translation import ROOT, Section, sections_of
from workshop.book.worked_steps import worked_table

PAGE = ROOT / "READING_ALONG.zh.md"
TEXT = PAGE.read_text(encoding="utf-8")
SECTIONS = sections_of(PAGE)
BLOCKS = [
    (section, code) for section in SECTIONS for info, code in section.code() if info == "python"
]
# `file.py`<br>[`::name`](room/file.py); [`test_name`](room/test_file.py)
PLACE = re.compile(r"`(\w+\.py)`(?:<br>| )\[`::([\w.]+)`\]\(([\w/]+\.py)\)")
TEST = re.compile(r"\[`(test_\w+)`\]\(([\w/]+\.py)\)")
# or a case of a step log, [`plans.txt::a title`](04_scheduler/plans.txt)
ROW = re.compile(r"\[`\w+\.txt::[^`]+`\]\([\w/]+\.txt\)")
ERRATUM = re.compile(r"(?<![A-Za-z0-9])([A-E]\d+)(?![A-Za-z0-9])")


def section(title: str) -> Section:
    (found,) = (s for s in SECTIONS if s.title == title)
    return found


def rows(title: str) -> Iterator[list[str]]:
    """The cells of the tables of a section, heads left out."""
    for line in section(title).source.splitlines():
        if line.startswith("| ") and not line.startswith(("| 文章中 |", "| 文章说 |")):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


# -- typed from the posts


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=lambda n: f"{n}-{BLOCKS[n][0].anchor}")
def test_what_is_to_be_typed_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As `python` takes what is pasted into it: a block ends with an empty line."""
    console = InteractiveConsole({"__name__": "typed"})
    for line in [*BLOCKS[number][1].splitlines(), ""]:
        console.push(line)
    assert "Error" not in capsys.readouterr().err


# -- the errata


ERRATA = {  # | **A1** what the post says | what is right |
    (words := said.split("**"))[1]: (words[2], right)
    for title in ("A 和 B", "C", "D", "E")
    for said, right in rows(f"文章 {title} 的勘误")
}


def test_errata_are_numbered_and_each_names_a_function_and_a_test() -> None:
    """The site adds the lines that the links lead to, and misses what is not there."""
    numbers = [f"{post}{n}" for post in "ACDE" for n in range(1, 99)]
    assert list(ERRATA) == [name for name in numbers if name in ERRATA]
    counts = [sum(name[0] == post for name in ERRATA) for post in "ACDE"]
    assert min(counts) >= 8 and {f"{p}{n}" for p, n in zip("ACDE", counts)} <= ERRATA.keys()
    assert set(ERRATUM.findall(TEXT)) <= ERRATA.keys(), "is referred to"
    for name, (said, right) in ERRATA.items():
        worked_out, file, symbol, test = right.split("<br>")
        assert said.strip() and worked_out, name
        assert PLACE.fullmatch(f"{file}<br>{symbol}"), name
        assert TEST.fullmatch(test) or ROW.fullmatch(test), name
    assert len(PLACE.findall(TEXT)) == TEXT.count("`::") > 200
    assert not list(unfilled(TEXT, ROOT))


def test_the_line_of_a_batch_counts_what_was_computed_and_what_was_found() -> None:
    """D22, and D4: by the post, a prompt of 36 tokens of which 32 are found has 36 new ones."""
    llm = LLM(device="cpu", block_size=16, policy="fcfs", compile=False, num_threads=1)
    lines: list[str] = []
    llm.engine.on_step = lambda record: lines.append(batch_line(record))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompt = list(range(40, 72))
    for asked in ([*prompt, 7], [*prompt, 8, 9, 10, 11]):
        llm.generate([asked], params, use_tqdm=False)
    assert lines[1] == lines[3] == "Decode batch. #running-req: 1, #queue-req: 0"
    assert lines[::2] == [
        f"Prefill batch. #new-seq: 1, #new-token: {new}, #cached-token: {cached}, "
        f"cache-hit-rate: {rate}, #running-req: 0, #queue-req: 0"
        for new, cached, rate in ((33, 0, "0.00"), (4, 32, "0.89"))
    ]


def test_the_table_of_three_steps_is_what_the_engine_does() -> None:
    ((_, block),) = section("三个请求，三步迭代").code()
    assert block == f"{worked_table()}\n", "run: python -m workshop.worked_steps"
