"""The tasks as they are written, their blanks, the workbench, and the command."""

from __future__ import annotations

import ast
import subprocess
from itertools import groupby
from pathlib import Path

import pytest

from workshop.book.text_rows import is_chinese
from workshop.practice import command
from workshop.practice.command import tasks as main
from workshop.practice.source_patch import ROOT
from workshop.practice.tasks.answer import answer_to, is_blank
from workshop.practice.tasks.blank import function_at, make_blank, signature
from workshop.practice.tasks.course import (
    EVENINGS,
    TASKS,
    Task,
    blank_of,
    blank_text,
    task_numbered,
)
from workshop.practice.tasks.grade import Verdict
from workshop.practice.tasks.workbench import FOLDER, Workbench

EVERY_TASK = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.number)
ONE = TASKS[0]
HINTS = ONE.english.said["hint"]


def test_eighteen_tasks_and_more_over_six_evenings_each_from_easy_to_hard() -> None:
    assert len(TASKS) >= 18
    numbers = {
        evening: [task.number for task in group]
        for evening, group in groupby(TASKS, key=lambda task: task.evening)
    }
    assert list(numbers) == list(EVENINGS)
    for evening, found in numbers.items():
        assert found == [f"{evening}.{i + 1}" for i in range(len(found))] and len(found) >= 3
        first = task_numbered(f"{evening}.1")
        assert first is not None and first.difficulty == "easy"
    assert len({task.title for task in TASKS}) == len(TASKS)


@EVERY_TASK
def test_a_task_states_the_function_and_its_requirements(task: Task) -> None:
    write = task.english.text("write")
    assert "Keep this:" in write
    assert 2 <= len(task.english.said["hint"]) <= 4 and task.mistakes
    assert 5 <= task.minutes <= 30
    assert max(map(len, blank_of(task).stub.splitlines())) <= 100
    lines = write.splitlines()
    assert all(line.startswith("    ") or "  " not in line for line in lines), "not a drawing"


@EVERY_TASK
def test_the_chinese_course_names_a_task_by_its_title(task: Task) -> None:
    page = (ROOT / "COURSE.zh.md").read_text(encoding="utf-8")
    assert f"| `make task N={task.number}` | {task.chinese.text('title')} |" in page


@EVERY_TASK
def test_blank_and_solution_are_the_source_byte_for_byte(task: Task) -> None:
    blank = blank_of(task)
    assert blank.solved == task.source()
    assert blank.solution.strip() and blank.solution not in blank.text
    ours, theirs = (
        {
            (n.name, signature(n))
            for n in ast.walk(ast.parse(text))
            if isinstance(n, ast.FunctionDef)
        }
        for text in (task.source(), blank.text)
    )
    assert theirs <= ours and task.place.rpartition(".")[2] in {name for name, _ in theirs}


@EVERY_TASK
def test_each_typical_mistake_is_another_program(task: Task) -> None:
    texts = [task.source(), *(mistake.apply() for mistake in task.mistakes)]
    assert {mistake.module for mistake in task.mistakes} == {task.module}
    assert len({ast.dump(ast.parse(text)) for text in texts}) == len(texts)
    blank = blank_of(task)
    for text in texts:  # the mistake is in what the reader writes
        assert text.startswith(blank.before) and text.endswith(blank.after)


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


def test_statements_are_taken_out_by_the_names_that_they_bind() -> None:
    assert make_blank(SOURCE, "A.g", ("b", "c"), "", "", "").solution == (
        "        b = a\n        for c in range(3):\n            b += c\n"
    )
    assert make_blank(SOURCE, "A.g", ("b",), "", "", "").solution == "        b = a\n"


@pytest.mark.parametrize(("place", "names"), [("A.h", ()), ("B", ()), ("A.g", ("c", "b"))])
def test_a_missing_function_cannot_be_removed(place: str, names: tuple[str, ...]) -> None:
    with pytest.raises(LookupError):
        make_blank(SOURCE, place, names, "", "", "")


def test_a_signature_is_without_its_types() -> None:
    (function,) = ast.parse("def f(a: int, /, *b: str, c: float = 2, **d) -> None: ...").body
    assert isinstance(function, ast.FunctionDef)
    assert signature(function) == "(a, /, *b, c=2, **d)"


def test_the_readers_folder_is_none_of_gits_business() -> None:
    if (ROOT / ".git").exists():  # else an unpacked source archive, and there may be no git
        path = FOLDER / "block_pool.py"
        ignored = subprocess.run(["git", "check-ignore", "-q", str(path)], cwd=ROOT)
        assert ignored.returncode == 0
    assert FOLDER == ROOT / "my"


# -- the workbench


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path / "my")


def test_one_task_writes_its_file_with_all_holes_of_the_evening(bench: Workbench) -> None:
    one, other = two_of_one_file()
    (text,) = bench.open([one])
    assert text == f"Written: my/rejection_sampler.py, which is {one.file} without the lines of " \
                   "5.3 and 5.4."  # fmt: skip
    assert bench.is_blank(one) and bench.is_blank(other)
    text = bench.file(one).read_text(encoding="utf-8")
    for task in (one, other):
        assert blank_of(task).stub in text and blank_of(task).solution not in text


def test_nothing_that_was_written_is_lost(bench: Workbench) -> None:
    for text in ("first", "second", "third"):
        bench.start_over(ONE)
        assert bench.is_blank(ONE)
        bench.file(ONE).write_text(text)
    output = bench.start_over(ONE)
    assert output[0].endswith("my/request.py is kept in my/answers/1.1_request_3.py.")
    names = ["1.1_request.py", "1.1_request_2.py", "1.1_request_3.py"]
    assert sorted(path.name for path in (bench.folder / "answers").iterdir()) == names
    kept = [(bench.folder / "answers" / name).read_text() for name in names]
    assert kept == ["first", "second", "third"]


def test_restarting_one_task_leaves_the_other_unchanged(bench: Workbench) -> None:
    one, other = (task for task in TASKS if task.module == "kv_cache_manager")
    bench.open([one])
    stub = blank_of(other).stub
    before = bench.file(one).read_text(encoding="utf-8")
    bench.file(one).write_text(one.source().replace("%", "+").replace("is None", "== None"))
    bench.start_over(one)
    text = bench.file(one).read_text(encoding="utf-8")
    assert bench.is_blank(one) and not bench.is_blank(other)
    assert stub in before and stub not in text and "blocks == None" in text


# -- of a file with several holes, one is tried


def two_of_one_file() -> tuple[Task, Task]:
    one, other = (task for task in TASKS if task.module == "rejection_sampler")
    return one, other


@EVERY_TASK
def test_a_task_is_tried_with_our_lines_in_the_other_holes(task: Task) -> None:
    blank, tried = blank_of(task), answer_to(blank_text(task.module), [task], task.module)
    assert function_dump(tried.text, task) == function_dump(blank.text, task)
    assert answer_to(blank_text(task.module), (), task.module).text == task.source()
    solved = blank_text(task.module).replace(blank.stub, blank.solution)
    assert function_dump(answer_to(solved, [task], task.module).text, task) == function_dump(
        task.source(), task
    )
    assert is_blank(blank_text(task.module), task) and not is_blank(solved, task)


def function_dump(text: str, task: Task) -> str:
    function = function_at(ast.parse(text), task.place)
    assert function is not None
    return ast.dump(function)


def test_a_wrong_answer_beside_it_does_not_count(bench: Workbench) -> None:
    one, other = (task for task in TASKS if task.module == "kv_cache_manager")
    text = blank_text(one.module).replace(blank_of(other).stub, "        return 1 / 0\n")
    assert "1 / 0" not in answer_to(text, [one], one.module).text
    assert "1 / 0" in answer_to(text, [other], one.module).text


# Files with one hole, with two, and with two of which the later one is filled first.
@pytest.mark.parametrize("number", ["1.1", "2.1", "4.2"])
def test_lines_are_counted_in_the_readers_file(number: str) -> None:
    task = next(task for task in TASKS if task.number == number)
    shorter = task.source().replace(blank_of(task).solution, "        pass\n")
    for text in (blank_text(task.module), shorter):
        marked = f"{text}# the end\n"
        answer = answer_to(marked, (), task.module)
        begins = [
            line for line in marked.splitlines() if line.lstrip().startswith(("class ", "def "))
        ]
        for name in (*(line for line in begins if begins.count(line) == 1), "# the end"):
            tried, readers = answer.text.split("\n"), marked.split("\n")
            assert answer.line(tried.index(name) + 1) == readers.index(name) + 1


def test_a_file_in_another_encoding_is_an_answer_and_can_be_set_aside(bench: Workbench) -> None:
    bench.open([ONE])
    bench.file(ONE).write_bytes("caf\u00e9".encode("latin-1"))
    assert not bench.is_blank(ONE)
    bench.start_over(ONE)
    assert (bench.folder / "answers" / "1.1_request.py").read_bytes() == b"caf\xe9"
    bench.file(ONE).write_text(blank_of(ONE).text, encoding="utf-8-sig")
    assert bench.is_blank(ONE)


# -- the command


def test_the_list_has_every_task_by_evening_with_its_time(
    bench: Workbench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.passed(ONE)
    assert main([], bench) == 0
    shown = capsys.readouterr().out
    for task in TASKS:
        (line,) = (line for line in shown.splitlines() if f" {task.number} " in line)
        assert task.title in line and f"{task.minutes:2} min" in line
        assert line.startswith(" [x]" if task is ONE else " [ ]")
    assert all(f"Evening {number}: {title}" in shown for number, title in EVENINGS.items())
    assert f"1 of {len(TASKS)} done" in shown


def test_a_blank_is_written_and_said_where(
    bench: Workbench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["1.1"], bench) == 0
    shown = capsys.readouterr().out
    assert "Written: my/request.py" in shown and "Keep this:" in shown
    assert "make task N=1.1 ARGS=--hint" in shown
    assert bench.file(ONE).read_text(encoding="utf-8") == blank_of(ONE).text
    assert f"my/request.py, line {blank_of(ONE).line}, in {ONE.place}" in shown
    assert main(["1.1"], bench) == 0
    assert "still blank" in capsys.readouterr().out


def test_an_evening_writes_all_its_files_and_over_none(
    bench: Workbench, capsys: pytest.CaptureFixture[str]
) -> None:
    for evening in EVENINGS:
        tonight = [task for task in TASKS if task.evening == evening]
        bench.folder.mkdir(exist_ok=True)
        mine = bench.file(tonight[0])
        mine.write_text("mine")
        assert main(["--evening", str(evening)], bench) == 0
        shown = capsys.readouterr().out
        assert mine.read_text() == "mine" and f"It is there: my/{mine.name}" in shown
        for task in tonight:
            assert f"my/{Path(task.file).name}" in shown and task.title in shown
            assert bench.file(task) == mine or bench.is_blank(task)
        assert f"make task N={tonight[0].number}" in shown
    assert {path.name for path in bench.folder.iterdir()} == {Path(t.file).name for t in TASKS}


def test_a_passed_answer_that_was_changed_counts_as_not_passed(bench: Workbench) -> None:
    one, other = (task for task in TASKS if task.module == "kv_cache_manager")
    bench.open([one])
    text = one.source()
    bench.file(one).write_text(text)
    assert not bench.has_passed(one)
    bench.passed(one)
    changed = text.replace("if blocks is None:", "if not blocks:")
    bench.file(one).write_text(changed)  # it belongs to the other task
    assert Workbench(bench.folder).has_passed(one) and not bench.has_passed(other)
    bench.file(one).write_text(text.replace("pos % size", "pos & size"))
    assert not bench.has_passed(one)


def test_an_answer_is_graded_and_a_pass_is_stored(
    bench: Workbench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = [Verdict(False, "NOT YET"), Verdict(True, "RIGHT")]
    monkeypatch.setattr(command, "grade", lambda *_, **options: verdicts.pop(0))
    main(["1.1"], bench)
    bench.file(ONE).write_text("mine")
    assert main(["1.1"], bench) == 1
    assert "NOT YET" in capsys.readouterr().out and not bench.progress.passed
    assert main(["1.1"], bench) == 0
    shown = capsys.readouterr().out
    assert "RIGHT" in shown and "make task N=1.2" in shown
    assert list(Workbench(bench.folder).progress.passed) == ["1.1"]
    assert bench.file(ONE).read_text() == "mine"
    verdicts.append(Verdict(True, "RIGHT"))
    bench.file(TASKS[-1]).write_text("mine")
    assert main([TASKS[-1].number], bench) == 0
    assert "The next: make task N=1.2 " in capsys.readouterr().out, "after the last, the first"


def test_hints_come_one_at_a_time(bench: Workbench, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(1, len(HINTS) + 1):
        main(["1.1", "--hint"], bench)
        shown = " ".join(capsys.readouterr().out.split())
        output = [" ".join(hint.split()) in shown for hint in HINTS]
        assert output == [n == number for n in range(1, len(HINTS) + 1)]
    main(["1.1", "--hint"], bench)
    shown = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(hint.split()) in shown for hint in HINTS) and "--solution" in shown


def test_a_terminal_that_speaks_chinese_is_told_in_chinese(
    bench: Workbench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ONE.chinese
    monkeypatch.setenv("LANGUAGE", "zh")
    for arguments, output in (
        ([], [words.text("title")]),
        (["1.1"], words.said["write"]),
        (["1.1", "--hint"], words.said["hint"][:1]),
    ):
        main(arguments, bench)
        shown = capsys.readouterr().out
        assert all(line in shown for line in output)
    for name in ("LANGUAGE", "LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    # Each counts before the one above it.
    for name, value in ("LANG", "zh_CN"), ("LC_ALL", "C.UTF-8"), ("LANGUAGE", "zh:en"):
        monkeypatch.setenv(name, value)
        assert is_chinese() is value.startswith("zh"), name


def test_the_solution_is_the_sources(bench: Workbench, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["1.2", "--solution"], bench) == 0
    shown = capsys.readouterr().out
    assert "01_batching/fcfs_scheduler.py, line " in shown
    assert "    admitted: dict[str, int] = {}\n    while self.waiting" in shown


def test_again_restarts_and_keeps_the_old(
    bench: Workbench, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["1.1"], bench)
    bench.file(ONE).write_text("old")
    assert main(["1.1", "--again"], bench) == 0
    assert "is kept in my/answers/1.1_request.py" in capsys.readouterr().out
    assert bench.is_blank(ONE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["9.9"], "got 9.9"),
        (["--hint"], "--hint must have a task"),
        (["1.1", "--hint", "--demo"], "not allowed with"),
        (["--evening", "7"], "invalid choice"),
        (["1.1", "--evening", "1"], "give nothing else with it"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str], words: str, bench: Workbench, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments, bench)
    assert words in capsys.readouterr().err
    assert not bench.folder.exists()


def test_progress_that_can_not_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "progress.json").write_text("{")
    monkeypatch.setattr(command, "Workbench", lambda: Workbench(tmp_path / "my"))
    with pytest.raises(SystemExit):
        main(["1.1"])
    assert "cannot read my/progress.json" in capsys.readouterr().err


def test_nothing_is_run_where_there_is_no_answer(
    bench: Workbench, capsys: pytest.CaptureFixture[str]
) -> None:
    for begun in (bench.folder, main(["1.1"], bench)):
        assert main(["1.1", "--demo"], bench) == 1
        assert "no answer to run yet" in capsys.readouterr().out, begun


@pytest.mark.parametrize(
    ("ends", "code", "expected"),
    [
        (KeyboardInterrupt, 130, "The demo was stopped."),
        (subprocess.TimeoutExpired("", 1), 1, "Does a loop never stop?"),
    ],
)
def test_a_demo_that_is_stopped_ends_with_a_sentence(
    ends: BaseException,
    code: int,
    expected: str,
    bench: Workbench,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopped(*arguments, **options) -> None:
        assert options["timeout"] == command.DEMO_S
        raise ends

    monkeypatch.setattr(command.subprocess, "run", stopped)
    bench.open([ONE])
    bench.file(ONE).write_text(ONE.source())
    assert main(["1.1", "--demo"], bench) == code
    assert expected in capsys.readouterr().out


def test_a_task_that_the_engine_does_not_run_shows_its_small_example(
    bench: Workbench, capfd: pytest.CaptureFixture[str]
) -> None:
    task = task_numbered("4.1")
    assert task is not None and task.engine is None
    bench.open([task])
    text = task.source().replace("+= 1", "+= 1000")
    bench.file(task).write_text(text)
    assert main(["4.1", "--demo"], bench) == 0
    shown = capfd.readouterr().out
    assert "with your lines" in shown and "served: zoe 1" in shown
