"""Keep pages in two languages in step: `NAME.md`, and next to it `NAME.zh.md` in Chinese.

    python -m workshop.translation                      list sections that differ, or are older

A section extends from a heading to the next heading of any level. Directly under each heading, the
Chinese page names the English section that it renders, by a digest of that section's text:

    ## 怎么读
    <!-- en: 3f0c91a2b7de -->

When the English section changes, its digest changes, and the Chinese one is older: it is listed
here with the new digest, and by `make sync`, the site says under its heading that the English is
newer, and no test fails. After comparing both sections and correcting the Chinese one, the
translator writes the new digest. The command never does: a digest means that a person has compared
the sections. `make sync` does where only code and numbers changed.

A digest ignores line breaks, and text that a script writes between `<!-- table:x -->` and
`<!-- /table:x -->`; but the numbers and the code of that text must be in the Chinese section too.
Headings, code and numbers in tables can be compared without knowing a language, so they are. Of
code outside Python, lines and numbers are. A link from a Chinese page goes to a Chinese page; a
link to a page that exists only in English is marked: （英文）.

A Chinese page that renders no English one has the digest `none` under its title: the English page
of its name only says what it holds, and only the links of the Chinese one are compared."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
SUFFIX = ".zh.md"
GENERATED = re.compile(r"<!-- ((?:table|output):\w+) -->.*?<!-- /\1 -->", re.DOTALL)
DIGEST = re.compile(r"<!-- en: (\S*) -->")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
ASIDE = re.compile(r"^\|[^\n]*$|^```.*?^```$|<!--.*?-->", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`[^`\n]+`")
CHINESE = re.compile(r"[\u4e00-\u9fff]")
LINK = re.compile(r"(?<!\[English)(?<!\[英文)\]\(([^)#\s]+)[^)]*\)(（英文）)?")
_MARKDOWN = MarkdownIt("commonmark").enable("table")


@dataclass(slots=True)
class Section:
    """A heading and the text under it, up to the next heading."""

    level: int
    title: str
    anchor: str
    source: str
    tokens: list[Token] = field(default_factory=list)  # all of it, the heading's included

    @property
    def digest(self) -> str:
        """The digest of an English section: 12 hex digits."""
        return _digest(self.source)

    @property
    def rendered(self) -> str | None:
        """The English digest that a Chinese section has directly under its heading, or None."""
        first = self.tokens[3:4]  # after the heading's open, inline and close
        found = DIGEST.fullmatch(first[0].content.strip()) if first else None
        return found[1] if found else None

    def code(self) -> list[tuple[str, str]]:
        return [(t.info, t.content) for t in self.tokens if t.type in ("fence", "code_block")]

    def tables(self) -> list[str]:
        """The numbers of each cell, in order of size, and what begins tables and rows."""
        found: list[str] = []
        for i, token in enumerate(self.tokens):
            if token.type in ("table_open", "tr_open"):
                found.append(token.type)
            elif token.type in ("th_open", "td_open"):
                found.append(" ".join(sorted(NUMBER.findall(_text(self.tokens[i + 1])))))
        return found

    def figures(self) -> list[str]:
        """The code in backticks, and then the numbers, that a script wrote outside tables."""
        return figures_of("\n".join(match[0] for match in GENERATED.finditer(self.source)))


def figures_of(source: str) -> list[str]:
    prose = ASIDE.sub("", source)
    return INLINE.findall(prose) + NUMBER.findall(INLINE.sub("", prose))


def _text(inline: Token) -> str:
    """The text of an inline token as a reader sees it."""
    kinds = ("text", "code_inline", "softbreak")
    return "".join(t.content or " " for t in inline.children or () if t.type in kinds)


def _normal(tokens: list[Token]) -> Iterator[str]:
    for token in tokens:
        if token.type in ("fence", "code_block"):
            yield f"{token.info}\n{token.content}"
        elif token.type == "inline":
            yield " ".join(token.content.split())
        elif token.type == "html_block":
            yield " ".join(DIGEST.sub("", token.content).split())
        else:
            yield token.type + token.tag


@cache
def _digest(source: str) -> str:
    tokens = _MARKDOWN.parse(GENERATED.sub("", source))
    return sha256("\n".join(_normal(tokens)).encode()).hexdigest()[:12]


@cache  # a page is asked for whenever another one links to it
def sections(page: str) -> list[Section]:
    """Return a page's sections. Raises `ValueError` if text precedes the first heading."""
    lines, tokens = page.splitlines(), _MARKDOWN.parse(page)
    starts = [t.map[0] for t in tokens if t.type == "heading_open" and t.level == 0 and t.map]
    ends = [*starts[1:], len(lines)]
    found: list[Section] = []
    num_seen: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if token.type == "heading_open" and token.level == 0:
            title = _text(tokens[i + 1])
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            num_seen[anchor] = num_seen.get(anchor, -1) + 1
            anchor += f"-{num_seen[anchor]}" if num_seen[anchor] else ""
            source = "\n".join(lines[starts[len(found)] : ends[len(found)]])
            found.append(Section(int(token.tag[1]), title, anchor, source))
        if not found:
            raise ValueError(f"a page must begin with a heading, got {token.content!r}")
        found[-1].tokens.append(token)
    return found


def sections_of(page: Path) -> list[Section]:
    return sections(page.read_text(encoding="utf-8"))


def chinese_pages(root: Path = ROOT) -> list[Path]:
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name[0] != "." and name not in ("build", "dist")]
        found += [Path(folder, name) for name in files if name.endswith(SUFFIX)]
    return sorted(found)


def english_of(page: Path) -> Path:
    return page.with_name(page.name.removesuffix(SUFFIX) + ".md")


def differences(chinese: Path, root: Path = ROOT) -> list[str]:
    """Return a sentence for each place where a Chinese page is out of step with the English one.
    Sections that are older than the English ones are not among them: see `older`."""
    english = english_of(chinese)
    ours, theirs = chinese.relative_to(root).as_posix(), english.relative_to(root).as_posix()
    if not english.is_file():
        return [f"{ours} renders {theirs}, which does not exist"]
    left, right = sections_of(english), sections_of(chinese)
    if right[0].rendered == "none":
        return [f"{ours}, {zh.title!r} {f}" for zh in right for f in _english_pages(zh, chinese)]
    for i in range(max(len(left), len(right))):
        levels = [f"{'#' * s[i].level} {s[i].title}" if i < len(s) else "" for s in (left, right)]
        if not all(levels) or left[i].level != right[i].level:
            return [
                f"heading {i + 1} is {levels[0] or 'missing'!r} in {theirs} "
                f"and {levels[1] or 'missing'!r} in {ours}"
            ]
    found: list[str] = []
    for en, zh in zip(left, right, strict=True):
        where = f"{ours}, section {zh.title!r} ({theirs}, {en.title!r})"
        if not zh.rendered:
            found.append(f"{where} has no digest under its heading: <!-- en: {en.digest} -->")
        for what, a, b in (
            ("code blocks", *(list(map(_comparable, s.code())) for s in (en, zh))),
            ("numbers in tables", en.tables(), zh.tables()),
        ):
            if a != b:
                found.append(f"{where} has other {what}: {_first_difference(a, b)}")
        there = figures_of(zh.source)
        if missing := [figure for figure in en.figures() if figure not in there]:
            found.append(f"{where} lacks what a script writes: {', '.join(missing)}")
        found += [f"{where} {fault}" for fault in _english_pages(zh, chinese)]
    return found


def older_sections(chinese: Path) -> list[tuple[Section, Section]]:
    """Return the sections of a Chinese page that are older, each after its English one."""
    english = english_of(chinese)
    if not english.is_file():
        return []
    pairs = zip(sections_of(english), sections_of(chinese))
    return [(en, zh) for en, zh in pairs if zh.rendered not in (None, "none", en.digest)]


def older(chinese: Path, root: Path = ROOT) -> list[str]:
    """Return a sentence for each section of a Chinese page whose English section is newer."""
    ours, theirs = (p.relative_to(root).as_posix() for p in (chinese, english_of(chinese)))
    return [
        f"{ours}, section {zh.title!r} ({theirs}, {en.title!r}) renders {zh.rendered}. Read both, "
        f"put the Chinese one right, and write under its heading: <!-- en: {en.digest} -->"
        for en, zh in older_sections(chinese)
    ]


def _comparable(block: tuple[str, str]) -> tuple[str, str]:
    """Return what a block must have in both languages: Python all of it, others their numbers."""
    info, code = block
    numbers = (" ".join(sorted(NUMBER.findall(line))) for line in code.splitlines())
    return info, code if info.startswith("python") else "\n".join(numbers)


def _english_pages(section: Section, page: Path) -> Iterator[str]:
    """Yield a sentence for each wrong link from a Chinese section to an English page."""
    for path, mark in LINK.findall(section.source):
        target = (page.parent / unquote(path)).resolve()
        target = target / "README.md" if target.is_dir() else target
        if target.suffix != ".md" or target.name.endswith(SUFFIX) or not target.is_file():
            continue
        if target.with_suffix(SUFFIX).is_file():
            yield f"links to {path}, though {target.stem}{SUFFIX} is there"
        elif not mark:
            yield f"links to {path}, which is in English: write （英文） behind the link"


def _first_difference(a: list, b: list) -> str:
    pairs = zip_longest(a, b)
    left, right = next((left, right) for left, right in pairs if left != right)
    return f"{left!r} in English, {right!r} in Chinese"


def main() -> int:
    found = [line for page in chinese_pages() for line in differences(page)]
    aged = [line for page in chinese_pages() for line in older(page)]
    print("\n".join([*aged, *found]) or "every Chinese page is in step with the English one")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
