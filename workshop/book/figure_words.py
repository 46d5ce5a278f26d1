"""The Chinese texts of all figures. `figures.zh.tsv` has each English text, a tab, and the Chinese
one.

    step {} computed {}	第 {} 步算了 {} 个

`{}` matches a number or a name; the Chinese text has them in the same order, or numbered. `\\n`
ends a line. Names of code and texts without words need no Chinese.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from xml.sax.saxutils import escape, unescape

LANGUAGE = "zh-CN"
TABLE = Path(__file__).with_name("figures.zh.tsv")
# A word that is neither part of a name of code (`num_tokens`, `EngineCore`, `wait()`) nor a letter.
WORD = re.compile(r"(?<![\w.(/])[A-Za-z][a-z]+(?![\w.(/])")
_TEXTS = re.compile(r"(<(text|title|desc)\b[^>]*>)(.*?)(?=</\2>)", re.S)


@dataclass
class Words:
    path: Path = field(default_factory=lambda: TABLE)
    used: set[str] = field(default_factory=set)  # English texts that were looked up

    @cached_property
    def pairs(self) -> dict[str, str]:
        pairs: dict[str, str] = {}
        for line in self.path.read_text(encoding="utf-8").splitlines():
            if line[:1] not in "#":
                english, chinese = line.replace("\\n", "\n").split("\t")
                if english in pairs:
                    raise ValueError(f"{self.path.name} has {english!r} twice")
                pairs[english] = chinese
        return pairs

    @cached_property
    def patterns(self) -> list[tuple[re.Pattern[str], str]]:
        """The patterns of texts with `{}`, the most specific first."""
        templates = sorted(
            (english for english in self.pairs if "{}" in english),
            key=lambda english: len(english.replace("{}", "")),
            reverse=True,
        )
        return [
            (re.compile("(.+?)".join(map(re.escape, english.split("{}")))), english)
            for english in templates
        ]

    def __call__(self, text: str) -> str:
        """Return the Chinese text. Raises `ValueError` for words without Chinese."""
        if text in self.pairs:
            self.used.add(text)
            return self.pairs[text]
        for pattern, english in self.patterns:
            found = pattern.fullmatch(text)
            if found and not any(WORD.search(what) for what in found.groups()):
                self.used.add(english)
                return self.pairs[english].format(*found.groups())
        if WORD.search(text):
            raise ValueError(f"{self.path.name} has no Chinese for {text!r}")
        return text


def in_chinese(svg: str, words: Words) -> str:
    """Return the figure with Chinese words. A text of several lines is one text of the table; a
    text with the class `code` stays."""

    def say(found: re.Match[str]) -> str:
        head, _, inner = found.groups()
        if re.search(r'class="[^"]*\bcode\b', head):
            return found[0]
        pieces = re.split(r"(<[^>]*>)", inner)  # lines, and the tags between them
        english = "\n".join(unescape(line) for line in pieces[::2] if line.strip())
        chinese = words(english).split("\n")
        if len(chinese) > english.count("\n") + 1:
            raise ValueError(f"{words.path.name}: {english!r} has more lines in Chinese")
        lines = iter(chinese)
        pieces[::2] = [escape(next(lines, "")) if x.strip() else x for x in pieces[::2]]
        return head + "".join(pieces)

    return _TEXTS.sub(say, svg).replace("<svg ", f'<svg lang="{LANGUAGE}" ', 1)
