"""READING_ALONG.md says what runs: its code, its table, its classes and calls, and its errata."""

from __future__ import annotations

import ast
import re
import sys
from code import InteractiveConsole
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

import pytest

from common.llm import LLM, SamplingParams
from common.workshop.bench.bench_record import replace_between_markers
from common.workshop.tools.translation import ROOT, Section, sections_of
from common.workshop.tools.worked_steps import worked_table
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request
from scheduler_interface import StepOutput

PAGE, CHINESE = ROOT / "READING_ALONG.md", ROOT / "READING_ALONG.zh.md"
SECTIONS = sections_of(PAGE)
BLOCKS = [
    (section, code) for section in SECTIONS for info, code in section.code() if info == "python"
]
# [`file.py`](room/file.py) and, behind it, `::name`; [`test_name`](room/test_file.py)
PLACE = re.compile(r"\[`(\w+\.py)`\]\(([\w/]+\.py)\)(?:<br>| )`::([\w.]+)`")
TEST = re.compile(r"\[`(test_\w+)`\]\(([\w/]+\.py)\)")
# [Ch. 1, §2: The picture](01_batching/README.md#2-the-picture), and so in Chinese
PLACE_IN_A_CHAPTER = re.compile(r"\[[^\]]*§(\d+):? ([^\]]+)\]\(([\w/.]+)#([^)]+)\)")
# | a section of a post | [The queue](01_batching/README.md#the-queue)
PLACE_IN_A_ROW = re.compile(r"^\| [^|]+ \| \[([^\]]+)\]\((0[\w/.]+)#([^)]+)\)", re.MULTILINE)
ERRATUM = re.compile(r"\b([A-E]\d+)\b")


def section(title: str) -> Section:
    (found,) = (s for s in SECTIONS if s.title == title)
    return found


def rows(title: str) -> Iterator[list[str]]:
    """The cells of the tables of a section, heads left out."""
    for line in section(title).source.splitlines():
        if line.startswith("| ") and not line.startswith("| |"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


# -- typed from the posts


class Typing(InteractiveConsole):
    """As `python` takes what is pasted into it: a block ends with an empty line. Errors are
    raised."""

    def showtraceback(self) -> None:
        raise

    def showsyntaxerror(self, *_, **__) -> None:
        raise


def type_in(code: str) -> None:
    console = Typing({"__name__": "typed"})
    for line in [*code.splitlines(), ""]:
        console.push(line)


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=lambda n: f"{n}-{BLOCKS[n][0].anchor}")
def test_what_is_to_be_typed_runs(number: int) -> None:
    type_in(BLOCKS[number][1])


@pytest.mark.parametrize("code", ["x = y", "assert False", "for x in (): pass\nx = 1", "x ="])
def test_what_does_not_run_when_it_is_typed_is_noticed(code: str) -> None:
    with pytest.raises((NameError, AssertionError, SyntaxError)):
        type_in(code)


def test_every_post_has_something_to_type_and_something_besides() -> None:
    for post in "ABCDE":
        assert any(s.title == f"Typed from post {post}" and s.code() for s in SECTIONS)
        section(f"What post {post} has besides")


# -- the errata


ERRATA = {
    cells[0]: cells
    for title in ("posts A and B", "post C", "post D", "post E")
    for cells in rows(f"Errata of {title}")
}


@cache
def _definitions(path: Path) -> dict[int, str]:
    """Line of its `def`, or of its first decorator -> qualified name."""
    found: dict[int, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                found[first] = prefix + child.name
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


@pytest.mark.parametrize("name", ERRATA)
def test_an_erratum_names_a_function_and_a_test(name: str) -> None:
    _, said, right = ERRATA[name]
    worked_out, here, test = right.split("<br>")
    assert said and worked_out
    assert here.startswith("*Here:* ") and PLACE.fullmatch(here.removeprefix("*Here:* "))
    assert test.startswith("*Test:* ") and TEST.fullmatch(test.removeprefix("*Test:* "))


@pytest.mark.parametrize("page", [PAGE, CHINESE], ids=lambda page: page.name)
def test_every_function_and_test_that_is_linked_stands_in_its_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    places = [(path, name) for file, path, name in PLACE.findall(text) if path.endswith(f"/{file}")]
    tests = [(path, name) for name, path in TEST.findall(text)]
    assert len(places) == text.count("`::") > 100 and len(tests) >= len(ERRATA)
    assert not [(p, n) for p, n in places + tests if n not in _definitions(ROOT / p).values()]


@pytest.mark.parametrize("page", [PAGE, CHINESE], ids=lambda page: page.name)
def test_a_section_of_a_chapter_is_called_as_the_chapter_calls_it(page: Path) -> None:
    places = PLACE_IN_A_CHAPTER.findall(page.read_text(encoding="utf-8"))
    assert len(places) == page.read_text(encoding="utf-8").count("§") > 30
    for number, title, chapter, anchor in places:
        headings = {section.anchor: section.title for section in sections_of(ROOT / chapter)}
        assert headings[anchor] == f"{number}. {title}"


@pytest.mark.parametrize("page", [PAGE, CHINESE], ids=lambda page: page.name)
def test_a_row_names_the_heading_that_it_leads_to(page: Path) -> None:
    """Or by a part of it; a section with a number may be called by that, or by its chapter."""
    places = PLACE_IN_A_ROW.findall(page.read_text(encoding="utf-8"))
    assert len(places) > 60
    for label, chapter, anchor in places:
        headings = {section.anchor: section.title for section in sections_of(ROOT / chapter)}
        heading = headings[anchor]
        assert re.match(r"\d+\. ", heading) or label.lower() in heading.lower(), (label, heading)


def test_errata_are_numbered_and_those_that_are_referred_to_are_there() -> None:
    counts = dict.fromkeys("ABCDE", 0)
    for name in ERRATA:
        counts[name[0]] += 1
        assert name == f"{name[0]}{counts[name[0]]}"
    assert counts["B"] == 0 and all(counts[post] >= 8 for post in "ACDE"), counts
    assert set(ERRATUM.findall(PAGE.read_text(encoding="utf-8"))) <= ERRATA.keys()


# -- rules of the posts in miniature, beside this engine's


def test_a_queue_that_is_only_read_is_chosen_from_twice() -> None:
    """D12: requests that were chosen have to leave the queue."""
    waiting = ["a", "b"]
    chosen = [list(waiting) for _ in range(2)]  # the post reads, and removes none
    assert chosen == [["a", "b"], ["a", "b"]]
    scheduler = PrefillFirstScheduler(8, 64, 100)
    for name in waiting:
        scheduler.add_request(Request.from_tokens(name, [1, 2, 3], max_new_tokens=9))
    plans = [scheduler.schedule()]
    scheduler.update_from_output(plans[0], StepOutput({"a": [7], "b": [7]}))
    plans.append(scheduler.schedule())
    assert [plan.num_scheduled_tokens for plan in plans] == [{"a": 3, "b": 3}, {"a": 1, "b": 1}]


# -- the engine's own


def test_the_table_of_three_steps_is_what_the_engine_does() -> None:
    page = PAGE.read_text(encoding="utf-8")
    right = replace_between_markers(page, "three_steps", worked_table())
    assert page == right, "run: python -m common.workshop.tools.worked_steps"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", dtype="float64", compile=False, num_threads=1)


def test_who_holds_whom_is_so(llm: LLM) -> None:
    ((_, block),) = section("Who holds whom").code()
    lines = [line.split() for line in block.splitlines()]
    found = [[path, type(eval(path, {"llm": llm})).__name__] for path, _ in lines]
    assert found == lines


Calls = list[tuple[str, ...]]  # each with whoever was running then, the outermost first


def traced(llm: LLM) -> Calls:
    calls: Calls = []
    stack: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(f"{ROOT}/") and event in ("call", "return"):
            if event == "return":
                if stack:
                    stack.pop()
                return
            path = Path(code.co_filename)
            name = _definitions(path).get(code.co_firstlineno, code.co_name)
            stack.append(f"{path.name}::{name}")
            calls.append(tuple(stack))

    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    sys.setprofile(profile)
    try:
        llm.generate(["def f(x):"], params, use_tqdm=False)
    finally:
        sys.setprofile(None)
    return calls


def as_tree(block: str) -> Iterator[tuple[str, ...]]:
    """Each line with those above it that it stands under."""
    stack: list[str] = []
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        stack[depth:] = [line.strip()]
        yield tuple(stack)


def is_under(wanted: tuple[str, ...], call: tuple[str, ...]) -> bool:
    """It is the last of `wanted`, and the others were running, in this order."""
    running = iter(call)
    return wanted[-1] == call[-1] and all(name in running for name in wanted)


def first_calls(block: str, calls: Calls) -> list[int | None]:
    return [
        next((i for i, call in enumerate(calls) if is_under(wanted, call)), None)
        for wanted in as_tree(block)
    ]


def test_who_calls_whom_is_so(llm: LLM) -> None:
    ((_, block),) = section("Who calls whom").code()
    firsts = first_calls(block, traced(llm))
    missing = [line for line, at in zip(block.splitlines(), firsts, strict=True) if at is None]
    assert not missing, "\n".join(missing)
    assert firsts == sorted(firsts), "what stands first happens first"


def test_a_chain_that_is_not_so_is_noticed(llm: LLM) -> None:
    calls = traced(llm)
    top, step = "llm.py::LLM.generate", "  engine_core.py::EngineCore.step"
    added, processed = "engine.py::LLMEngine.add_request", "outputs.py::OutputProcessor.process"
    assert first_calls(f"{top}\n  sampler.py::Sampler.nothing", calls)[1] is None
    assert first_calls(f"{top}\n{step}\n    {added}", calls)[2] is None
    turned = first_calls(f"{top}\n  {processed}\n  {added}", calls)
    assert None not in turned and turned != sorted(turned)
