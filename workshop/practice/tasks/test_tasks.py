"""The tasks as they are written, their blanks, and the workbench. Commands: `transcripts.txt`."""

from __future__ import annotations

import ast
import sys
from itertools import groupby
from pathlib import Path

import pytest

from workshop.book.text_rows import is_chinese
from workshop.practice.apart import apart
from workshop.practice.module_swap import ModuleSwap
from workshop.practice.named_tests import Failure
from workshop.practice.source_patch import ROOT
from workshop.practice.tasks.answer import Answer, answer_to, is_blank
from workshop.practice.tasks.blank import function_at, make_blank, signature
from workshop.practice.tasks.course import (
    EVENINGS,
    TASKS,
    Task,
    blank_of,
    blank_text,
    task_numbered,
)
from workshop.practice.tasks.demo_on_yours import engine_on
from workshop.practice.tasks.grade import (
    _in_the_text,
    _shown,
    _told,
    _Trial,
    example_with,
    recognised,
)
from workshop.practice.tasks.workbench import Workbench

EVERY_TASK = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.number)


def the(number: str) -> Task:
    task = task_numbered(number)
    assert task is not None
    return task


def test_three_tasks_an_evening_and_more_from_easy_to_hard() -> None:
    numbers = {
        evening: [task.number for task in group]
        for evening, group in groupby(TASKS, key=lambda task: task.evening)
    }
    assert list(numbers) == list(EVENINGS)
    for evening, found in numbers.items():
        assert found == [f"{evening}.{i + 1}" for i in range(len(found))] and len(found) >= 3
        assert the(f"{evening}.1").difficulty == "easy"


@EVERY_TASK
def test_a_task_has_its_texts_and_blank_and_solution_are_the_source(task: Task) -> None:
    assert "Keep this:" in task.english.text("write")
    assert 2 <= len(task.english.said["hint"]) <= 4 and 5 <= task.minutes <= 30
    page = (ROOT / "COURSE.zh.md").read_text(encoding="utf-8")
    assert f"| `make task N={task.number}` | {task.chinese.text('title')} |" in page
    blank = blank_of(task)
    assert blank.solved == task.source()
    assert blank.solution.strip() and blank.solution not in blank.text
    assert max(map(len, blank.stub.splitlines())) <= 100


@EVERY_TASK
def test_each_typical_mistake_is_another_program(task: Task) -> None:
    texts = [task.source(), *(mistake.apply() for mistake in task.mistakes)]
    assert {mistake.module for mistake in task.mistakes} == {task.module}
    assert len({ast.dump(ast.parse(text)) for text in texts}) == len(texts)
    blank = blank_of(task)
    for text in texts:  # the mistake is in what the reader writes
        assert text.startswith(blank.before) and text.endswith(blank.after)


@EVERY_TASK
def test_a_task_is_tried_with_our_lines_in_the_other_holes(task: Task) -> None:
    blank, text = blank_of(task), blank_text(task.module)
    solved = text.replace(blank.stub, blank.solution)
    assert answer_to(text, (), task.module).text == task.source()
    for given, expected in ((text, blank.text), (solved, task.source())):
        tried = answer_to(given, [task], task.module)
        assert function_dump(tried.text, task) == function_dump(expected, task)
        assert is_blank(given, task) == (given is text)
    marked = f"{text}# the end\n"
    answer = answer_to(marked, (), task.module)
    line = answer.line(answer.text.split("\n").index("# the end") + 1)
    assert line == marked.count("\n"), "lines are counted in the reader's file"


def function_dump(text: str, task: Task) -> str:
    function = function_at(ast.parse(text), task.place)
    assert function is not None
    return ast.dump(function)


SOURCE = '''\
class A:
    def f(self, n: int, *, m: int = 2) -> int:
        """It says."""
        # This would tell.
        if n:
            return m
        return n  # to the end

    def g(self):
        a = 1
        b = a
        for c in range(3):
            b += c
        return b
'''


def test_a_body_is_taken_out_and_the_docstring_stays() -> None:
    blank = make_blank(SOURCE, "A.f", (), "A title", "Some words.\n\n    a   drawing", "1.1")
    lines = blank.text.splitlines()
    assert lines[2:9] == [
        '        """It says."""',
        "        # Task 1.1: A title",
        "        #",
        "        # Some words.",
        "        #",
        "        #     a   drawing",
        '        raise NotImplementedError("task 1.1: not written yet")',
    ]
    assert lines[9:] == SOURCE.splitlines()[7:]
    assert (blank.line, blank.first_line) == (9, 4)
    assert make_blank(SOURCE, "A.g", ("b", "c"), "", "", "").solution == (
        "        b = a\n        for c in range(3):\n            b += c\n"
    )
    for place, names in (("A.h", ()), ("A.g", ("c", "b"))):
        with pytest.raises(LookupError):
            make_blank(SOURCE, place, names, "", "", "")
    (function,) = ast.parse("def f(a: int, /, *b: str, c: float = 2, **d) -> None: ...").body
    assert isinstance(function, ast.FunctionDef) and signature(function) == "(a, /, *b, c=2, **d)"


# -- the workbench


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path / "my")


def test_of_two_functions_in_a_file_each_is_begun_again_tried_and_passed_alone(
    bench: Workbench,
) -> None:
    one, other = (task for task in TASKS if task.module == "kv_cache_manager")
    bench.open([one])
    bench.file(one).write_text(one.source().replace("is None", "== None"))
    bench.start_over(one)
    text = bench.file(one).read_text(encoding="utf-8")
    assert bench.is_blank(one) and not bench.is_blank(other) and "blocks == None" in text
    wrong = blank_text(one.module).replace(blank_of(other).stub, "        return 1 / 0\n")
    assert "1 / 0" not in answer_to(wrong, [one], one.module).text
    bench.file(one).write_text(one.source())
    bench.passed(one)
    bench.file(one).write_text(one.source().replace("if blocks is None:", "if not blocks:"))
    assert Workbench(bench.folder).has_passed(one) and not bench.has_passed(other)
    bench.file(one).write_text(one.source().replace("pos % size", "pos & size"))
    assert not bench.has_passed(one), "an answer that has changed"


def test_a_file_in_another_encoding_is_an_answer_and_can_be_set_aside(bench: Workbench) -> None:
    task = the("1.1")
    bench.open([task])
    bench.file(task).write_bytes("caf\u00e9".encode("latin-1"))
    assert not bench.is_blank(task)
    bench.start_over(task)
    assert (bench.folder / "answers" / "1.1_request.py").read_bytes() == b"caf\xe9"
    bench.file(task).write_text(blank_of(task).text, encoding="utf-8-sig")
    assert bench.is_blank(task)


def test_the_language_is_that_of_the_first_variable_that_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LANGUAGE", "LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    # Each counts before the one above it.
    for name, value in ("LANG", "zh_CN"), ("LC_ALL", "C.UTF-8"), ("LANGUAGE", "zh:en"):
        monkeypatch.setenv(name, value)
        assert is_chinese() is value.startswith("zh"), name


# -- the grader


def test_an_examples_result_leads_to_its_mistake_and_other_results_to_none() -> None:
    task = the("1.2")
    ours = example_with(task, task.source())
    results = [example_with(task, mistake.apply()) for mistake in task.mistakes]
    for words, mistake in zip(results, task.mistakes, strict=True):
        assert recognised(task, words, ours, results) is mistake
    assert recognised(task, "something else", ours, results) is None
    # Two mistakes at once: the first line that differs is one's alone.
    both = "\n".join([results[0].splitlines()[0], "and all else is another's"])
    assert recognised(task, both, ours, results) is task.mistakes[0]
    alike = [f"begins as all do\n{number}" for number in range(len(results))]
    assert recognised(task, "begins as all do\nand is another", ours, alike) is None


def test_a_raise_in_a_comment_is_none_and_a_mark_of_utf_8_is_no_error(tmp_path: Path) -> None:
    task, file = the("2.2"), tmp_path / "block_pool.py"
    stub = blank_of(task).stub.splitlines()[-1].strip()
    text = task.source() + f"# {stub}\n"
    file.write_text(text, encoding="utf-8-sig")
    assert _in_the_text(task, file) == ""
    file.write_text(f"{text}\nif 0:\n    {stub}\n", encoding="utf-8")
    line = text.count("\n") + 3
    assert _in_the_text(task, file).startswith(f"Line {line} of block_pool.py still raises")


def test_the_readers_line_is_shown_where_it_makes_our_code_raise() -> None:
    task = the("2.2")
    swap = ModuleSwap(task.module, ROOT / "other" / "block_pool.py")
    failure = Failure("conftest.py::test_b", "TypeError: no", "common/llm.py", 1, 7, "")
    shown = _told(failure, _Trial(task, task.path, swap, Answer(task.source()), 1))
    assert "common/llm.py:1\n" in shown and "line 7 of 02_paged_kv/block_pool.py:" in shown


def test_a_random_failure_is_shown_without_lines_for_pytest() -> None:
    message = (
        f"AssertionError: assert {bytes(range(30))!r} == 5\n  Use -v to get more diff\n"
        "You can reproduce this example by temporarily adding @reproduce_failure('6.1', b'AXic')"
    )
    assert _shown(message) == "    AssertionError: assert hash 00010203 == 5"
    for cut in ("b'" + r"\xb7" * 30 + "...", r"b'\xf0\x9...\x01\x02\x03\x04'"):
        assert _shown(cut) == f"    {cut}", "what pytest has cut stays as it is"


def _run(engines: list[dict]) -> list[set[tuple[str, int]]]:
    """Which functions, by file and line, each engine has called."""
    found: list[set[tuple[str, int]]] = []

    def note(frame, event, arg) -> None:
        if event == "call":
            found[-1].add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    for options in engines:
        found.append(set())
        sys.setprofile(note)
        engine_on(options)
        sys.setprofile(None)
    return found


def test_the_engine_calls_the_function_where_a_task_says_so() -> None:
    tasks = [task for task in TASKS if task.engine is not None]
    engines = {repr(task.engine): task.engine for task in tasks}
    called = dict(zip(engines, apart(_run, (list(engines.values()),), 120), strict=True))
    for task in tasks:
        function = function_at(ast.parse(task.source()), task.place)
        assert function is not None
        assert (str(ROOT / task.file), function.lineno) in called[repr(task.engine)], task.number
