"""The grader, on what a reader may do wrong. The solution is the source, and its tests run as such:
two tasks show that it passes."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from workshop.practice.apart import apart
from workshop.practice.module_swap import ModuleSwap
from workshop.practice.named_tests import Failure
from workshop.practice.source_patch import ROOT
from workshop.practice.tasks.answer import Answer
from workshop.practice.tasks.blank import function_at
from workshop.practice.tasks.course import TASKS, Task, blank_of, blank_text, task_numbered
from workshop.practice.tasks.demo_on_yours import engine_on
from workshop.practice.tasks.grade import (
    Verdict,
    _in_the_text,
    _shown,
    _told,
    _Trial,
    example_with,
    grade,
    recognised,
)
from workshop.practice.trial import NEVER_ENDS


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


# -- what a reader may do


def the(number: str) -> Task:
    task = task_numbered(number)
    assert task is not None
    return task


def graded(task: Task, text: str, folder: Path, limit_s: float = 20) -> Verdict:
    file = folder / Path(task.file).name
    file.write_text(text, encoding="utf-8")
    return grade(task, file, limit_s)


def answer(task: Task, *lines: str) -> str:
    blank = blank_of(task)
    margin = blank.stub[: len(blank.stub) - len(blank.stub.lstrip())]
    return blank.before + "".join(f"{margin}{line}\n" for line in lines) + blank.after


@pytest.mark.parametrize(
    ("number", "counted"),
    [("2.2", "3 tests passed, in 9 cases."), ("3.4", "4 tests passed, in 5 cases.")],
)
def test_the_solution_is_right_and_its_tests_are_counted_as_they_were_announced(
    number: str, counted: str, tmp_path: Path
) -> None:
    task = the(number)
    messages: list[str] = []
    file = tmp_path / Path(task.file).name
    file.write_text(task.source(), encoding="utf-8")
    assert grade(task, file, 20, messages.append) == Verdict(True, f"Right. {counted}")
    assert messages[-1] == f"Its tests ({counted[0]}) ..."


def test_a_typical_mistake_gets_its_message_after_the_failing_test(tmp_path: Path) -> None:
    task = the("2.2")
    mistake = task.mistakes[1]
    verdict = graded(task, mistake.apply(), tmp_path)
    assert not verdict.is_right and verdict.mistake is mistake
    first, second = (
        'What does not hold: "blocks are reused in the order in which they were freed"',
        "This looks like a common mistake. Freed blocks go to the front",
    )
    assert first in " ".join(verdict.text.split()) and second in " ".join(verdict.text.split())
    assert verdict.text.index("What does not hold") < verdict.text.index("common mistake")
    assert "assert " in verdict.text and "Traceback" not in verdict.text


def test_a_mistake_is_known_for_any_error_text_and_explained_in_the_readers_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGUAGE", "zh_CN:en")
    task = the("3.3")
    text = answer(
        task,
        "held = self._cached(blocks, 'release')",
        "if any(one.ref_cnt == 1 for one in held):",
        "    raise ValueError('words of mine')",
        "self.pool.free([one.block for one in held])",
        "self._evictable.update((one.block_id, one) for one in held[::-1] if one.ref_cnt == 1)",
    )
    verdict = graded(task, text, tmp_path)
    assert verdict.mistake is not None and "`cached.ref_cnt`" in verdict.mistake.message
    messages = task.chinese.said["mistake"][task.mistakes.index(verdict.mistake)]
    assert "缓存" in messages and messages in verdict.text


def test_an_exception_is_shown_with_the_readers_line_and_output(tmp_path: Path) -> None:
    task = the("2.2")
    verdict = graded(task, answer(task, "print('I am here')", "blocks.frobnicate()"), tmp_path)
    line = blank_of(task).before.count("\n") + 2
    assert f"Your code raised an exception at line {line} of block_pool.py:" in verdict.text
    assert "blocks.frobnicate()" in verdict.text and "I am here" in verdict.text
    assert "AttributeError: 'list' object has no attribute 'frobnicate'" in verdict.text


def test_a_crash_is_reported_once_with_the_next_action(tmp_path: Path) -> None:
    task, heard = the("2.1"), []
    file = _written(answer(task, "", "return blocks").encode(), tmp_path, "kv_cache_manager.py")
    verdict = grade(task, file, 20, heard.append)
    assert verdict.text.count("NameError: name 'blocks' is not defined") == 1
    assert "A small example" not in verdict.text
    assert [words.split()[0] for words in heard] == ["Importing", "Its", "One"]


def test_one_hole_is_graded_while_the_other_is_open(tmp_path: Path) -> None:
    task = the("2.1")
    open_text = blank_text(task.module)
    right = open_text.replace(blank_of(task).stub, blank_of(task).solution)
    assert graded(task, right, tmp_path).is_right
    wrong = open_text.replace(blank_of(task).stub, "        return []\n        return 1 / 0\n")
    verdict = graded(task, wrong.replace("return []", "1 + {}"), tmp_path)
    line = wrong.split("\n").index("        return []") + 1
    assert f"exception at line {line} of kv_cache_manager.py" in verdict.text


def test_an_endless_loop_ends_by_the_time_limit(tmp_path: Path) -> None:
    task = the("2.2")
    verdict = graded(task, answer(task, "while True:", "    pass"), tmp_path, limit_s=1)
    assert "it did not end. Does a loop never stop?" in verdict.text
    assert NEVER_ENDS in verdict.text and "of block_pool.py" in verdict.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("def free(", "def free("), "It is still the blank"),
        (lambda text: text.replace("raise N", "pass\n        raise N"), "Error. Take it out"),
        (lambda text: text.replace("raise NotImpl", "for in x: Impl"), "Python cannot read line"),
        (lambda text: text.replace("def free(", "def fre("), "There is `fre`. Give it its name"),
        (lambda text: text.replace("def free(self, blocks", "def free(self"), "takes (self"),
    ],
    ids=["blank", "the raise", "syntax", "name", "arguments"],
)
def test_an_invalid_text_is_reported_before_it_is_run(change, words, tmp_path) -> None:
    verdict = graded(the("2.2"), change(blank_of(the("2.2")).text), tmp_path)
    assert not verdict.is_right and words in verdict.text


def test_a_raise_in_a_comment_is_none(tmp_path: Path) -> None:
    task = the("2.2")
    stub = blank_of(task).stub.splitlines()[-1].strip()
    text = task.source() + f"# {stub}\n"
    assert _in_the_text(task, _written(text.encode(), tmp_path)) == ""
    raised = _in_the_text(task, _written(f"{text}\nif 0:\n    {stub}\n".encode(), tmp_path))
    line = text.count("\n") + 3
    assert raised.startswith(f"Line {line} of block_pool.py still raises")


def test_a_mark_of_utf_8_is_no_error_and_another_encoding_is_said(tmp_path: Path) -> None:
    task = the("2.2")
    assert _in_the_text(task, _written(task.source().encode("utf-8-sig"), tmp_path)) == ""
    text = f"{task.source()}# caf\u00e9\n"
    assert "is not UTF-8" in _in_the_text(task, _written(text.encode("latin-1"), tmp_path))


def _written(text: bytes, folder: Path, name: str = "block_pool.py") -> Path:
    file = folder / name
    file.write_bytes(text)
    return file


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
    assert _shown("{'a': 5, 'b': 7}, blocks: {'b': 2}") == "    {'a': 5, 'b': 7}, blocks: {'b': 2}"
    # What pytest has cut stays as it is, and takes no longer.
    for cut in ("b'" + r"\xb7" * 30 + "...", r"b'\xf0\x9...\x01\x02\x03\x04'"):
        assert _shown(cut) == f"    {cut}"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named"),
        ("1 / 0", "ZeroDivisionError: division by zero, line"),
        ("exit()", "SystemExit"),
        ("import os; os._exit(3)", "ended the whole process"),
        ("while True: pass", "does not end within 2 seconds"),
    ],
)
def test_an_error_at_import_is_reported(line: str, words: str, tmp_path: Path) -> None:
    task = the("2.2")
    verdict = graded(task, f"{task.source()}\n{line}\n", tmp_path, limit_s=2)
    assert "block_pool.py cannot be imported" in verdict.text and words in verdict.text


def test_a_module_without_an_imported_name_is_reported(tmp_path: Path) -> None:
    task = the("1.3")
    verdict = graded(task, task.source().replace("RunnerState", "State"), tmp_path)
    assert "ImportError: cannot import name 'RunnerState'" in verdict.text


def test_a_changed_file_is_reported(tmp_path: Path) -> None:
    task = the("2.2")
    text = task.source().replace("popitem(last=False)", "popitem(last=True)")
    assert "Outside of BlockPool.free, block_pool.py is not as" in graded(task, text, tmp_path).text


# -- the engine on the reader's module


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
