"""Grammars for tests, a tokenizer of 97 tokens, and what may follow by trying everything."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from common.requests.tokenizer import Tokenizer
from grammars import Choice, Ebnf, Grammar, Json, Regex

EOS = 1
NUM_TOKENS = 97
_WORDS = "true false null aa ab ba bb abba aab abb no yes not none tru es on"
_PIECES = [
    *_WORDS.split(),
    '{"',
    '": ',
    '"a',
    '", ',
    "01",
    "10",
    "00",
    "-1",
    " a",
    "  ",
    "}}",
    '"}',
    "e}",
]


def small_tokenizer() -> Tokenizer:
    """A byte-level one: two special tokens, single characters, words that overlap."""
    characters = '{}[]",:. -+_abcdefghijklmnopqrstuvwxyzABCDEFG0123456789'
    pieces = [*dict.fromkeys([*characters, *_PIECES])][: NUM_TOKENS - 2]
    pieces += [f"<{i}>" for i in range(NUM_TOKENS - 2 - len(pieces))]
    spelled = [piece.replace(" ", "Ġ") for piece in pieces]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *spelled])}
    backend = Backend(models.BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<eos>"])
    tokenizer = Tokenizer(backend, EOS)
    assert tokenizer.vocab_size == NUM_TOKENS
    return tokenizer


FLAG = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
# Each with all of its texts, or those that are short enough to matter.
CASES: dict[str, tuple[Grammar, Callable[[], Iterable[str]]]] = {
    "choice": (Choice(["yes", "no", "none", "no, not"]), lambda: ["yes", "no", "none", "no, not"]),
    "regex": (
        Regex("[ab]{2,4}(01)?"),
        lambda: (w + e for w in _all_words("ab", 2, 4) for e in ("", "01")),
    ),
    "nested": (
        Ebnf('root ::= "a" root "b" | "ab"'),
        lambda: ("a" * n + "b" * n for n in range(1, 99)),
    ),
    "json": (
        Json(FLAG, max_whitespace=0),
        lambda: (json.dumps({"a": flag}) for flag in (True, False)),
    ),
}


def _all_words(letters: str, min_across: int, most: int) -> Iterable[str]:
    words = [""]
    for length in range(1, most + 1):
        words = [w + c for w in words for c in letters]
        if length >= min_across:
            yield from words


@cache
def texts_of(name: str) -> frozenset[bytes]:
    return frozenset(text.encode() for text in CASES[name][1]())


def may_follow(tokenizer: Tokenizer, texts: Iterable[bytes], token_ids: list[int]) -> list[int]:
    """Ids with which the text of `token_ids` can still become one of `texts`, and EOS if it is."""
    so_far = b"".join(map(tokenizer.token_bytes, token_ids))
    runnable_ids = [text for text in texts if text.startswith(so_far)]
    assert tokenizer.eos_token_id is not None
    allowed = [tokenizer.eos_token_id] if so_far in runnable_ids else []
    for token_id in range(tokenizer.vocab_size):
        piece = b"" if token_id in tokenizer.special_ids else tokenizer.token_bytes(token_id)
        if piece and any(text.startswith(so_far + piece) for text in runnable_ids):
            allowed.append(token_id)
    return allowed


# Other limits of an answer within a grammar. Token 0 is special; "b" is a letter of texts.
LIMITS: dict[str, dict[str, Any]] = {
    "none": {},
    "strings": {"stop": ["e", "bb"], "min_tokens": 1},
    "tokens": {"stop_token_ids": [0, small_tokenizer().encode("b")[0]], "min_tokens": 2},
}


def may_come(
    tokenizer: Tokenizer, texts: Iterable[bytes], token_ids: list[int], limits: dict[str, Any]
) -> list[int]:
    """`may_follow` with stop tokens where the text is complete, and before `min_tokens` without end
    tokens where another token may follow."""
    allowed = may_follow(tokenizer, texts, token_ids)
    stops = limits.get("stop_token_ids", [])
    if tokenizer.eos_token_id in allowed:
        allowed += [stop for stop in stops if stop not in allowed]
    if len(token_ids) < limits.get("min_tokens", 0):
        allowed = [t for t in allowed if t not in (tokenizer.eos_token_id, *stops)] or allowed
    return allowed


@torch.inference_mode()
def greedy_within(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    prompt: list[int],
    name: str | None,
    most: int,
    limits: str,
) -> list[int]:
    """By `transformers`, a whole pass for each token: the highest of those that may come."""
    outputs: list[int] = []
    kwargs = LIMITS[limits]
    ends = {tokenizer.eos_token_id, *kwargs.get("stop_token_ids", [])}
    while len(outputs) < most and (not outputs or name is None or outputs[-1] not in ends):
        text = tokenizer.decode(outputs)
        before = tokenizer.decode(outputs[:-1])
        num = len(outputs)
        if num > kwargs.get("min_tokens", 0) and any(
            text.count(stop) > before.count(stop) for stop in kwargs.get("stop", ())
        ):
            break
        logits = model(torch.tensor([prompt + outputs])).logits[0, -1]
        if name is not None:
            allowed = may_come(tokenizer, texts_of(name), outputs, kwargs)
            kept = torch.full_like(logits, float("-inf"))
            kept[allowed] = logits[allowed]
            logits = kept
        outputs.append(int(logits.argmax()))
    return outputs
