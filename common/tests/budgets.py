"""How much each top folder may hold: `python -m common.tests.budgets` prints it, and fails if one
holds more. Then take something out, or raise the number in the same commit and say why."""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

from common.tests.house import House

# Tokens are those of `tokenize`, without comments, docstrings and line ends (an f-string is one, as
# before Python 3.12); of C++ and text tables, words and marks. Tests are what only tests use, the
# chapters' text tables too. Words are those of Markdown, in both languages.
KINDS = ("code tokens", "test tokens", "test lines", "page lines", "table lines", "words")
BUDGETS = {
    ".": (130, 2300, 360, 0, 0, 26_200),
    "01_batching": (10_800, 12_700, 1500, 0, 0, 8100),
    "02_paged_kv": (18_000, 14_100, 1700, 0, 0, 9300),
    "03_prefix_cache": (19_100, 31_300, 3650, 0, 0, 9850),
    "04_scheduler": (12_500, 25_800, 3000, 0, 0, 13_700),
    "05_spec_decode": (9950, 19_100, 2200, 0, 0, 6750),
    "06_chunked_prefill": (4550, 8250, 950, 0, 0, 5700),
    "common": (100_000, 147_200, 17_400, 5550, 70, 13_600),
    "workshop": (74_600, 38_000, 4950, 740, 3700, 3900),
}
LOADED_LINES = 12_540  # of what a default `LLM()` loads, docstrings and the pages they name too
F_START, F_END = (getattr(tokenize, f"FSTRING_{name}", -1) for name in ("START", "END"))
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def count_tokens(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return len(re.findall(r"\w+|[^\w\s]", re.sub(r"//.*", "", text)))
    number = 0
    depth = 0
    begins = True
    for kind, *_ in tokenize.generate_tokens(io.StringIO(text).readline):
        number += not depth and kind not in SKIPPED and not (begins and kind == tokenize.STRING)
        begins = kind in SKIPPED and (begins or kind == tokenize.NEWLINE)
        depth += (kind == F_START) - (kind == F_END)
    return number - 1  # the end of the file


def amounts(house: House) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for path in house.files:
        name = house.name(path)
        held = found[name.partition("/")[0] if "/" in name else "."]
        num_lines = path.read_bytes().count(b"\n")
        is_test = house.is_test(name) or (path.suffix == ".txt" and name[0].isdigit())
        if path.suffix == ".txt" and not is_test:
            held["table lines"] += num_lines
        elif path.suffix in (".py", ".cpp", ".h", ".txt"):
            held["test tokens" if is_test else "code tokens"] += count_tokens(path)
            held["test lines"] += num_lines * is_test
        elif path.suffix in (".js", ".css", ".html"):
            held["page lines"] += num_lines
        elif path.suffix == ".md":
            held["words"] += len(path.read_text(encoding="utf-8").split())
    return {folder: held for folder, held in found.items() if held.total()}


def main() -> int:
    found = amounts(House(Path(__file__).resolve().parents[2]))
    print(f"{'':20}" + "".join(f"{kind:>22}" for kind in KINDS))
    has_room = True
    for folder, held in sorted(found.items()):
        limits = dict(zip(KINDS, BUDGETS.get(folder, ())))
        cells = [f"{held[kind]:,} of {limits.get(kind, 0):,}" for kind in KINDS]
        over = [kind for kind in KINDS if held[kind] > limits.get(kind, 0)]
        print(f"{folder:20}" + "".join(f"{c:>22}" for c in cells) + "  over: " * bool(over), *over)
        has_room &= not over
    total = sum(found.values(), Counter[str]())
    print(f"{'all':20}" + "".join(f"{total[kind]:>22,}" for kind in KINDS))
    return 0 if has_room else 1


if __name__ == "__main__":
    sys.exit(main())
