"""READING_ALONG.zh.md says what runs: its code, its tables, its classes and calls.

Readers of the Chinese posts read it, so there is no English page of it."""

from __future__ import annotations

from code import InteractiveConsole

import pytest

from common.events.step_trace import batch_line
from common.llm import LLM, SamplingParams
from workshop.book.translation import ROOT, Section, sections_of

SECTIONS = sections_of(ROOT / "READING_ALONG.zh.md")
BLOCKS = [
    (section, code) for section in SECTIONS for info, code in section.code() if info == "python"
]


def section(title: str) -> Section:
    (found,) = (s for s in SECTIONS if s.title == title)
    return found


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=lambda n: f"{n}-{BLOCKS[n][0].anchor}")
def test_what_is_to_be_typed_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As `python` takes what is pasted into it: a block ends with an empty line."""
    console = InteractiveConsole({"__name__": "typed"})
    for line in [*BLOCKS[number][1].splitlines(), ""]:
        console.push(line)
    assert "Error" not in capsys.readouterr().err


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


def test_the_three_steps_print_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    (_, program), (_, printed) = section("三个请求，三步迭代").code()
    exec(program, {})
    assert capsys.readouterr().out == printed
