"""Count the private words left in each file: `python -m workshop.words`.

    (nothing)           hits per 1,000 words, by folder
    PATH ...            each hit in these files or folders, with its replacement
    --write             lower the numbers in `words_left.tsv` to the current ones
    --removed COMMIT    facts of COMMIT that are no longer here, and the number of docstrings

`vocabulary.tsv` has the expressions. They are searched in docstrings, comments, pages and text
tables, without code. `words_left.tsv` has three numbers for each file: words, docstrings that
begin wrongly, identifiers. A test compares them with the files, in both directions.

`--write` compares with the commit that last changed `words_left.tsv`, or with `--since COMMIT`. A
file that git detects as moved keeps its number. After a split or a merge, a file takes over the
numbers of removed files and, if it is new, the hits that others lost. No total rises, and no other
number does: such a rise is printed and not written. A missing `words_left.tsv` is written with the
current numbers."""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from common.tests.budgets import folder_of
from common.tests.house import House
from workshop.book.private_words import KINDS, Hit, docstrings, hits_of

ROOT = Path(__file__).resolve().parents[2]
LEFT = Path(__file__).with_name("words_left.tsv")
HEAD = "# Private words that are left (words.py); to lower: python -m workshop.words --write\n"
SUFFIXES = (".py", ".md", ".txt")
FACT = re.compile(r"\bTrap\s\d+|\barXiv:?\s?\d{4}\.\d{4,5}")
RAISES = re.compile(r"\b[Rr]aises? [^.]*?`(\w+)")

Numbers = dict[str, dict[str, int]]  # by kind, by file
Found = dict[str, tuple[list[Hit], int]]  # by file: hits, number of words


def texts(house: House) -> dict[str, str]:
    paths = [path for path in house.files if path.suffix in SUFFIXES]
    return {house.name(path): path.read_text(encoding="utf-8") for path in paths}


def search(house: House) -> Found:
    return {name: hits_of(name, source) for name, source in texts(house).items()}


def count(found: Found) -> Numbers:
    """Return the numbers of every file, including files without a hit."""
    return {k: {f: sum(h.kind == k for h in hits) for f, (hits, _) in found.items()} for k in KINDS}


# -- the table of remaining hits


def read_numbers(table: str) -> Numbers:
    rows = [line.split("\t") for line in table.splitlines() if line[0] != "#"]
    return {kind: {row[0]: int(row[i]) for row in rows} for i, kind in enumerate(KINDS, 1)}


def write_numbers(numbers: Numbers) -> str:
    files = sorted({file for kind in numbers.values() for file, number in kind.items() if number})
    rows = ["\t".join([f, *(str(kind.get(f, 0)) for kind in numbers.values())]) for f in files]
    return "\n".join([HEAD + "\t".join(["# file", *numbers]), *rows]) + "\n"


def complaints(table: Numbers, found: Found) -> Iterator[str]:
    """Yield a sentence for each difference between files and table."""
    for kind, numbers in count(found).items():
        for file in sorted({*numbers, *table[kind]}):
            now, left = numbers.get(file, 0), table[kind].get(file, 0)
            if now < left:
                yield f"{file}: {now} {kind} and not {left}: python -m workshop.words --write"
            elif now > left:
                yield f"{file}: {now} private {kind}, and {left} may be left. Write others:"
                yield from (f"  {line}" for line in listed(file, found[file][0], kind))


def listed(file: str, hits: Sequence[Hit], kind: str = "") -> list[str]:
    chosen = [hit for hit in hits if kind in ("", hit.kind)]
    return [f"{file}:{hit.line}: {hit.found!r} -> {hit.instead}" for hit in chosen]


def lowered(old: dict[str, int], now: dict[str, int], known: Collection[str]) -> dict[str, int]:
    """Return the numbers to write: the current ones, or the old ones where a rise is not allowed.
    `old` is from a commit with the files `known`; `now` has every current file."""
    rise = {f: number - old.get(f, 0) for f, number in now.items() if number > old.get(f, 0)}
    freed = sum(number for file, number in old.items() if file not in now)
    lost = sum(max(0, old.get(file, 0) - number) for file, number in now.items())
    for file in sorted(rise, key=lambda file: (rise[file], file)):
        from_lost = 0 if file in known else min(lost, rise[file])
        if rise[file] - from_lost > freed:
            now = {**now, file: old.get(file, 0)}
        else:
            lost, freed = lost - from_lost, freed - rise[file] + from_lost
    return now


# -- with git


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def write_lower(since: str) -> list[str]:
    """Write the lowered table. Returns a sentence for each file with more hits than allowed."""
    found = search(House(ROOT))
    now = count(found)
    table = LEFT.relative_to(ROOT).as_posix()
    commit = since or git("log", "-1", "--format=%H", "--", table).decode().strip()
    if commit and (since or LEFT.exists()):
        old = read_numbers(git("show", f"{commit}:{table}").decode())
        known = set(git("ls-tree", "-r", "-z", "--name-only", commit).decode().split("\0"))
        changes = git("diff", "-M30%", "-l0", "--diff-filter=R", "--name-status", "-z", commit)
        fields = changes.decode().split("\0")
        moved = dict(zip(fields[1::3], fields[2::3]))
        known.update(moved.values())
        for kind in now:
            before = {moved.get(file, file): number for file, number in old[kind].items()}
            now[kind] = lowered(before, now[kind], known)
    LEFT.write_text(write_numbers(now), encoding="utf-8")
    return list(complaints(now, found))


def facts(sources: dict[str, str]) -> Counter[str]:
    """Count the mentions of each trap and paper, each function's documented errors, docstrings."""
    found: Counter[str] = Counter()
    for name, source in sources.items():
        found.update(re.sub(r"\s+", " ", fact) for fact in FACT.findall(source))
        if name.endswith(".py"):
            for of, _, text in docstrings(ast.walk(ast.parse(source))):
                found.update(["docstrings", *(f"{of} raises {e}" for e in RAISES.findall(text))])
    return found


def removed(commit: str) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as tar:
        files = {m.name: tar.extractfile(m) for m in tar if m.name.endswith(SUFFIXES)}
        before = facts({name: file.read().decode() for name, file in files.items() if file})
    after = facts(texts(House(ROOT)))
    return [f"{f}: {n} -> {after[f]}" for f, n in sorted(before.items()) if after[f] < n]


def shares(found: Found) -> Iterator[str]:
    """Yield hits per 1,000 words, by folder, with tests separate."""
    numbers, words, hits = count(found)["words"], Counter[str](), Counter[str]()
    for file, (_, num_words) in found.items():
        is_test = "/test_" in f"/{file}" or "/tests/" in file or "conftest" in file
        for key in ("tests" if is_test else folder_of(file), "all"):
            words[key] += num_words
            hits[key] += numbers[file]
    yield from (
        f"{key:24} {hits[key]:5} {words[key]:8,} {1000 * hits[key] / words[key]:5.1f}"
        for key in sorted(words)
        if words[key]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.words",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", help="files or folders, from the root")
    parser.add_argument("--write", action="store_true", help="lower the numbers")
    parser.add_argument("--since", default="", metavar="COMMIT", help="which table --write lowers")
    parser.add_argument("--removed", metavar="COMMIT", help="facts that were there")
    options = parser.parse_args(arguments)
    if options.removed:
        print("\n".join(removed(options.removed)))
        return 0
    if options.write:
        refused = write_lower(options.since)
        print("\n".join(refused) or f"{LEFT.name} has the numbers of today")
        return 1 if refused else 0
    found = search(House(ROOT))
    if not options.paths:
        print("\n".join(shares(found)))
    for path in options.paths:
        for file, (hits, _) in found.items():
            if f"{file}/".startswith(f"{path.rstrip('/')}/"):
                print("\n".join(listed(file, hits)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
