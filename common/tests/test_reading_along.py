"""READING_ALONG.zh.md says what runs: its code, its tables, its classes and calls, its errata.

Readers of the Chinese posts read it, so there is no English page of it."""

from __future__ import annotations

import re
from code import InteractiveConsole
from collections.abc import Iterator

import pytest

from common.events.step_trace import batch_line
from common.llm import LLM, SamplingParams
from draft_plugin import DraftPlugin
from request import Request, RequestStatus
from scheduler import Scheduler
from scheduler_interface import StepOutput
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


# -- rules of the posts in miniature, beside this engine's


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", dtype="float64", compile=False, num_threads=1)


def test_an_end_that_is_asked_for_with_equality_and_not_after_a_prefill_is_missed() -> None:
    """C16, as in the flow charts: a prefill appends, a decode appends and asks."""

    def post(max_tokens: int, tokens: list[int], eos: int = 2) -> int | None:
        outputs = tokens[:1]
        for token in tokens[1:]:
            outputs.append(token)
            if token == eos or len(outputs) == max_tokens:
                return len(outputs)
        return None  # it goes on

    def ours(max_tokens: int, tokens: list[int]) -> int:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        request = Request("a", [1], params, eos_token_ids=[2])
        while not request.is_finished:
            request.append_output_token(tokens[request.num_output_tokens])
        return request.num_output_tokens

    assert (post(1, [7] * 50), ours(1, [7] * 50)) == (None, 1)
    assert (post(9, [2, *[7] * 50]), ours(9, [2, *[7] * 50])) == (9, 1)


def test_an_answer_is_the_completion_without_its_prompt(llm: LLM) -> None:
    """C19."""
    params = SamplingParams(temperature=0, max_tokens=8)
    (output,) = llm.generate(["def add(a, b):"], params, use_tqdm=False)
    token_ids = output.outputs[0].token_ids
    decode = llm.engine.tokenizer.decode
    assert output.outputs[0].text == decode(token_ids)
    by_post = decode([*output.prompt_token_ids, *token_ids])
    assert by_post.startswith("def add(a, b):") and by_post != output.outputs[0].text


def test_the_line_of_a_batch_counts_what_was_computed_and_what_was_found() -> None:
    """D22, and D4: by the post, a prompt of 36 tokens of which 32 are found has 36 new ones."""
    llm = LLM(device="cpu", block_size=16, policy="fcfs", compile=False, num_threads=1)
    lines: list[str] = []
    llm.engine.on_step = lambda record: lines.append(batch_line(record))
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    prompt = list(range(40, 72))
    llm.generate([[*prompt, 7]], params, use_tqdm=False)
    llm.engine.add_request("b", [*prompt, 8, 9, 10, 11], params)
    llm.engine.step()
    llm.engine.add_request("c", [5, 6], params)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    cold, warm = (
        f"Prefill batch. #new-seq: 1, #new-token: {new}, #cached-token: {cached}, "
        f"cache-hit-rate: {rate}, #running-req: 0, #queue-req: 0"
        for new, cached, rate in ((33, 0, "0.00"), (4, 32, "0.89"))
    )
    decode = "Decode batch. #running-req: 1, #queue-req: 0"
    mixed = cold.replace("33", "2").replace("running-req: 0", "running-req: 1")
    assert lines == [cold, decode, decode, warm, mixed, decode.replace("1", "2"), decode]


def test_an_abort_of_who_has_ended_changes_nothing() -> None:
    """E30: the post keeps who has ended in a dict, and `abort_request` writes its status first."""
    scheduler = Scheduler(num_gpu_blocks=4)
    request = Request.from_tokens("a", [1, 2], max_new_tokens=1)
    scheduler.add_request(request)
    scheduler.update_from_output(scheduler.schedule(), StepOutput({"a": [7]}))
    scheduler.abort_request("a")
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    scheduler.add_request(Request.from_tokens("a", [1, 2]))  # the name is free


def test_drafts_are_fed_after_the_last_token_and_its_own_token_is_not_accepted() -> None:
    """E28, E32: five drafts, of which two are right."""
    plugin = DraftPlugin()
    scheduler = Scheduler(num_gpu_blocks=4, plugins=[plugin])
    request = Request.from_tokens("a", [1, 2, 3], max_new_tokens=20)
    scheduler.add_request(request)
    drafts = {"a": [5, 6, 7, 8, 9]}
    scheduler.update_from_output(
        scheduler.schedule(), StepOutput({"a": [4]}, draft_token_ids=drafts)
    )
    plan = scheduler.schedule()
    assert plan.start_positions == [3] and plan.num_scheduled_tokens == {"a": 1 + 5}
    accepted_tokens = [5, 6, 40]  # the third is the target's own
    scheduler.update_from_output(plan, StepOutput({"a": accepted_tokens}))
    assert plugin.num_rejected_drafts == 5 - (len(accepted_tokens) - 1) == 3
    assert request.num_tokens - request.num_computed_tokens == 1
    by_post = 3 + 1 + 5 - (5 - len(accepted_tokens))
    assert request.num_tokens - by_post == 0  # nothing is left to compute


def test_the_table_of_three_steps_is_what_the_engine_does() -> None:
    ((_, block),) = section("三个请求，三步迭代").code()
    assert block == f"{worked_table()}\n", "run: python -m workshop.worked_steps"
