"""The corpus and the tokenizer of the shipped checkpoint: Python's own standard library.

Every Python installation carries the same few megabytes of clean, permissively licensed text: the
source of its standard library. Therefore a model can be trained on it offline, on any machine,
without a download. `corpus()` reads it, `train_tokenizer()` fits a byte-level BPE of 4,096 tokens
to it, and `token_stream()` returns it as one long row of token ids with an end-of-text token after
every document.

Two kinds of document are made. Whole files teach long-range structure. Snippets, one top-level
function or class each, teach the model that `def name(...):` may open a document and that the
document ends with its body: without them a model that has seen 700 ends of file never learns to
stop.

Files in `HELD_OUT` are in neither, nor in the tokenizer's training text. Losses are reported on
them."""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
VOCAB_SIZE = 4096

# Present in Python 3.10 to 3.13, and spread over the library's kinds of code.
HELD_OUT = (
    "bisect.py",
    "cmd.py",
    "contextlib.py",
    "csv.py",
    "graphlib.py",
    "heapq.py",
    "json/decoder.py",
    "queue.py",
    "shlex.py",
    "statistics.py",
    "textwrap.py",
    "asyncio/queues.py",
)

# Tests are not prose; the code pages are 120 near-copies of one table; the prefixes are of
# generated tables.
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "__pycache__",
}
_SKIPPED_PREFIXES = ("_sysconfigdata", "_uuid_")
_MAX_SNIPPET_CHARS = 2400

# A newline includes the indentation after it, a word the space before it: both are frequent in
# Python.
_PIECES = Regex(r"\n+ *| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+| +|\s+")


def corpus(stdlib: Path | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """Return `(training files, held-out files)`, each a map from the path inside the standard
    library to the text."""
    root = stdlib or Path(sysconfig.get_path("stdlib"))
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED_FOLDERS & set(name.parts) or name.name.startswith(_SKIPPED_PREFIXES):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            (held_out if name.as_posix() in HELD_OUT else train)[name.as_posix()] = text
    missing = set(HELD_OUT) - set(held_out)
    if missing:
        raise FileNotFoundError(f"held-out files not in {root}: {sorted(missing)}")
    return train, held_out


def snippets(text: str) -> Iterator[str]:
    """Yield the short top-level functions and classes of a file, each as a separate document."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # lib2to3 keeps Python 2 templates
        return
    lines = text.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            snippet = "".join(lines[node.lineno - 1 : node.end_lineno]).rstrip() + "\n"
            if len(snippet) <= _MAX_SNIPPET_CHARS:
                yield snippet


def train_tokenizer(texts: list[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE tokenizer: any bytes can be encoded, and decoding restores them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, files: dict[str, str], seed: int) -> np.ndarray:
    """Training documents in a seeded order, end-of-text after each: `[num_tokens]`, uint16."""
    documents = list(files.values())
    documents += [snippet for text in files.values() for snippet in snippets(text)]
    random.Random(seed).shuffle(documents)
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(documents, add_special_tokens=False):
        ids += encoding.ids
        ids.append(end)
    return np.array(ids, dtype=np.uint16)
