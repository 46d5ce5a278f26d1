"""The Chinese of a figure's texts.

In each `figures/` lies a `zh.txt`: an English text, and under it, indented, the Chinese one.

    step {} computed {}
        第 {} 步算了 {} 个

`{}` stands for what varies, a number or a name; the Chinese has them in the same order, or
numbered. `\\n` ends a line. Names of code and texts without words need no Chinese.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

LANGUAGE = "zh-CN"
# A word that is neither part of a name of code (`num_tokens`, `EngineCore`, `wait()`) nor a letter.
WORD = re.compile(r"(?<![\w.(/])[A-Za-z][a-z]+(?![\w.(/])")


@dataclass
class Words:
    path: Path
    used: set[str] = field(default_factory=set)  # English texts that were asked for

    @classmethod
    def beside(cls, folder: Path) -> Words:
        return cls(folder / "zh.txt")

    @cached_property
    def pairs(self) -> dict[str, str]:
        lines = [x for x in self.path.read_text(encoding="utf-8").splitlines() if x[:1] not in "#"]
        pairs = list(zip(lines[::2], lines[1::2], strict=True))
        for english, chinese in pairs:
            if english.startswith(" ") or not chinese.startswith("    "):
                raise ValueError(f"{self.path}: {english!r} and {chinese!r} are no pair")
        return {
            english.replace("\\n", "\n"): chinese.strip().replace("\\n", "\n")
            for english, chinese in pairs
        }

    @cached_property
    def patterns(self) -> list[tuple[re.Pattern[str], str]]:
        """The one that says most comes first."""
        templates = sorted(
            (english for english in self.pairs if "{}" in english),
            key=lambda english: len(english.replace("{}", "")),
            reverse=True,
        )
        return [
            (re.compile("(.+?)".join(map(re.escape, english.split("{}")))), english)
            for english in templates
        ]

    def __call__(self, text: str, is_code: bool = False) -> str:
        """Raises `ValueError` for words without Chinese, unless they are code."""
        if text in self.pairs:
            self.used.add(text)
            return self.pairs[text]
        for pattern, english in self.patterns:
            found = pattern.fullmatch(text)
            if found and not any(WORD.search(what) for what in found.groups()):
                self.used.add(english)
                return self.pairs[english].format(*found.groups())
        if WORD.search(text) and not is_code:
            raise ValueError(f"{self.path} has no Chinese for {text!r}")
        return text
