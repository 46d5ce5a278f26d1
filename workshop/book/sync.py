"""Update derived files: `make sync`, `python -m workshop.sync [--since COMMIT] [--all]`.

    quotations        `python file=...` blocks of every page, from the source they name
    pages             MUSEUM.md in two languages, the tables of MODELS.md
    tables            from records, if their script or their records changed
    notebooks         made of their scripts, without outputs
    drawings          the style of each SVG that is edited by hand, and its Chinese twin
    Chinese pages     numbers in tables that changed in the English page of the same name

git compares the working tree with COMMIT (HEAD) to find the changes. `--all` also makes all tables,
all plots and the stills of the films again, which takes minutes and a browser.

A Chinese section that was in step, and whose English section changed since COMMIT only in quoted
code or numbers in tables, stays in step: its digest is updated. Sections and
exercises that are older than the English are listed before the last lines of the output, which name
what has to be mended."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from workshop.book import drawings, figure_words, models_page, notebooks
from workshop.book.path import ROOT
from workshop.book.quoted import filled, unfilled
from workshop.book.translation import (
    DIGEST,
    GENERATED,
    NUMBER,
    Section,
    chinese_pages,
    differences,
    english_of,
    older,
    sections,
)
from workshop.practice.museum import museum_page
from workshop.practice.museum.exhibits import EXHIBITS
from workshop.practice.tasks.course import TASKS

_SKIPPED = {"build", "dist", "my", "shared", "checkpoints"}
_CELL = re.compile(r"(?<!\\)\|")
# Scripts that write tables from a folder's records; a chapter's plot scripts write its tables.
_BENCH = "workshop/measure/bench/"
_TABLES = (
    "workshop.bench --write-readme",
    "workshop.ladder --write-readme",
    "workshop.bench.gpu pages",
)


def pages() -> Iterator[Path]:
    for folder, folders, files in os.walk(ROOT):
        folders[:] = sorted(n for n in folders if n[0] != "." and n not in _SKIPPED)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".md"))


# -- what is written


def renew_pages() -> Iterator[str]:
    """Update the pages. Yields a sentence for each quotation that cannot be found."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        _write(page, filled(text, page.parent))
        yield from (
            f"{page.relative_to(ROOT)}: {complaint}"
            for complaint in unfilled(page.read_text(encoding="utf-8"), page.parent)
        )
    _write(museum_page.PAGE, museum_page.render())
    _write(museum_page.PAGE.with_suffix(".zh.md"), museum_page.render(is_chinese=True))
    _write(models_page.PAGE, models_page.render())
    for script in notebooks.demo_scripts():
        _write(script.with_suffix(".ipynb"), notebooks.notebook_text(script))
    words = figure_words.Words()
    for drawing in drawings.drawings():
        try:
            for path, svg in drawings.derived(drawing, words).items():
                _write(path, svg)
        except ValueError as complaint:
            yield str(complaint)


def _write(page: Path, text: str) -> None:
    if not page.exists() or page.read_text(encoding="utf-8") != text:
        page.write_text(text, encoding="utf-8")


def commands_for(changed: Sequence[str], is_all: bool) -> list[list[str]]:
    """Return the commands for the tables whose records or scripts changed."""
    found = []
    for script in sorted((ROOT / "workshop" / "measure").glob("plot_*.py")):
        topic = script.stem.removeprefix("plot_")
        made_of = (f"workshop/measure/plot_{topic}", f"workshop/measure/records/{topic}")
        is_new = is_all or any(name.startswith(made_of) for name in changed)
        if is_new and "run_lab(" in script.read_text(encoding="utf-8"):  # else a part of another
            found.append(["-m", f"workshop.{script.stem}", "--tables"])
    if is_all or any(n.startswith(_BENCH) and n.endswith(".json") for n in changed):
        found += [["-m", *command.split()] for command in _TABLES]
    return [*found, ["-m", "workshop.watch", "--stills"]] if is_all else found


def changed_since(commit: str) -> list[str]:
    """Return the changed paths, relative to the root. Empty where there is no git."""
    if not (ROOT / ".git").exists():
        return []
    commands = (["diff", "--name-only", commit], ["ls-files", "-o", "--exclude-standard"])
    runs = [
        subprocess.run(["git", *c], cwd=ROOT, capture_output=True, text=True, check=True)
        for c in commands
    ]
    return [line for run in runs for line in run.stdout.splitlines()]


def text_at(commit: str, page: Path) -> str:
    """Return a page as it was in a commit. Empty if the commit or git has none."""
    command = ["git", "show", f"{commit}:{page.relative_to(ROOT).as_posix()}"]
    if not (ROOT / ".git").exists():
        return ""
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    return run.stdout if run.returncode == 0 else ""


# -- the Chinese pages


def in_step(before: str, after: str, chinese: str) -> str:
    """Update a Chinese page that rendered `before` with the numbers in tables of `after`, and with
    the digests of sections that changed only in code and such numbers. Returns it unchanged if the
    headings do not agree."""
    old, new, zh = sections(before), sections(after), sections(chinese)
    if not len(old) == len(new) == len(zh):
        return chinese
    parts = []
    for was, now, theirs in zip(old, new, zh):
        text = _with_numbers(was.source, now.source, theirs.source)
        if theirs.rendered == was.digest != now.digest and _words(was) == _words(now):
            text = DIGEST.sub(f"<!-- en: {now.digest} -->", text, count=1)
        parts.append(text)
    return "\n".join(parts) + ("\n" if chinese.endswith("\n") else "")


def _words(section: Section) -> list[str]:
    """Return everything in a section except blocks of code, numbers in tables, and what a script
    writes."""
    words, depth = [], 0
    (written,) = sections(GENERATED.sub("", section.source))
    for token in written.tokens:
        depth += (token.type == "table_open") - (token.type == "table_close")
        if token.type not in ("fence", "code_block"):
            prose = " ".join(token.content.split())
            words.append(NUMBER.sub("0", prose) if depth else prose)
    return words


def _with_numbers(before: str, after: str, chinese: str) -> str:
    """Return the Chinese section with the numbers that changed in the English tables, cell by
    cell."""
    lines = chinese.split("\n")
    old, new, theirs = (_rows(text.split("\n")) for text in (before, after, chinese))
    if len({tuple(len(row) for _, row in rows) for rows in (old, new, theirs)}) > 1:
        return chinese
    for (_, was), (_, now), (number, row) in zip(old, new, theirs):
        cells = []
        for one, other, cell in zip(was, now, row):
            changed = dict(zip(NUMBER.findall(one), NUMBER.findall(other)))
            cells.append(NUMBER.sub(lambda m, new=changed: new.get(m[0], m[0]), cell))
        lines[number] = "|".join(cells)
    return "\n".join(lines)


def _rows(lines: list[str]) -> list[tuple[int, list[str]]]:
    """Return line number and cells of each table row outside code."""
    found, is_code = [], False
    for number, line in enumerate(lines):
        is_code ^= line.lstrip().startswith("```")
        if line.startswith("|") and not is_code:
            found.append((number, _CELL.split(line)))
    return found


# -- all of it


def sync(commit: str = "HEAD", is_all: bool = False) -> list[str]:
    """Update derived files. Returns a sentence for each place that has to be mended."""
    complaints = list(renew_pages())
    for command in commands_for(changed_since(commit), is_all):
        print(f"  {' '.join(command)}", flush=True)
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    for page in chinese_pages():
        if before := text_at(commit, english_of(page)):
            english = english_of(page).read_text(encoding="utf-8")
            _write(page, in_step(before, english, page.read_text(encoding="utf-8")))
    return [*complaints, *(line for page in chinese_pages() for line in differences(page))]


def aged() -> list[str]:
    """Return a sentence for each Chinese text that is older than the English one."""
    exercises = (one for one in (*EXHIBITS, *TASKS) if one.english.text("en") != one.digest)
    return [
        *(line for page in chinese_pages() for line in older(page)),
        *(
            f"{one.english.head!r} renders {one.english.text('en')} and not {one.digest}"
            for one in exercises
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.sync",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--since", default="HEAD", metavar="COMMIT", help="what is new (HEAD)")
    parser.add_argument("--all", action="store_true", help="all tables, plots and stills, too")
    options = parser.parse_args(arguments)
    wanting = sync(options.since, options.all)
    if lines := aged():
        print("\n".join(["English is newer:", *lines, ""]))
    print("\n".join(wanting) or "nothing has to be mended")
    return 1 if wanting else 0


if __name__ == "__main__":
    sys.exit(main())
