"""Rules for a request's output tokens: `allowed_token_ids`, `bad_words`, and `logit_bias`.

    logits                1.0   2.0   0.5   3.0      tokens 0 to 3
    only 0, 1, 3          1.0   2.0  -inf   3.0      allowed_token_ids
    [1, 3] is bad         1.0   2.0  -inf  -inf      bad_words, after outputs that end with 1
    + 0.5 for 0           1.5   2.0  -inf  -inf      logit_bias

A bad word is a sequence of tokens. Its last token is forbidden after outputs that end with the
others. Drafts before a row count as outputs, the prompt does not. A text is forbidden both as given
and after a space; vLLM omits the latter if it has another number of tokens.

`token_rules_of` checks a user's rules and converts them to plain data, once for each request. The
data is sent to the runner as `features["token_rules"]`. The runner keeps it in its columns
(`TokenRules`) and applies it to the rows of a step (`constrained_rows.py`).

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from common.requests.tokenizer import Tokenizer
from request import SamplingParams, require

MAX_BIAS = 100.0  # OpenAI's, to which vLLM's server clips
CheckIds = Callable[[str, Any], list[int]]


def token_rules_of(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int, check_ids: CheckIds
) -> dict[str, Any]:
    """Return the rules as plain data. `check_ids(name, ids)` returns ids that can be sampled, below
    `vocab_size`, as `int`s. Raises `ValueError` that names field, value and allowed values."""
    allowed = params.allowed_token_ids
    bias = {} if params.logit_bias is None else params.logit_bias
    words = () if params.bad_words is None else params.bad_words
    require(isinstance(bias, Mapping), "logit_bias", bias, "None or {id: number}")
    some = "None or a sequence of at least one token id"
    require(allowed is None or _is_list(allowed), "allowed_token_ids", allowed, some)
    require(_is_list(words), "bad_words", words, "a sequence of str")
    allowed_ids = None
    if allowed is not None:
        allowed_ids = sorted(set(check_ids("allowed_token_ids", list(allowed))))
        require(bool(allowed_ids), "allowed_token_ids", allowed, some)
    for value in bias.values():
        is_right = isinstance(value, int | float | np.number) and abs(value) <= MAX_BIAS
        require(bool(is_right), "logit_bias", value, f"numbers in [-{MAX_BIAS}, {MAX_BIAS}]")
    bad = [_checked(ids, check_ids) for ids in without_texts(words, tokenizer, vocab_size)]
    ruled_out = {ids[0] for ids in bad if len(ids) == 1}
    is_left = allowed_ids is None or not ruled_out.issuperset(allowed_ids)
    require(is_left, "allowed_token_ids", allowed, "more than the tokens of bad_words")
    return {
        "allowed": allowed_ids,
        "biased": check_ids("logit_bias", list(bias)),
        "bias": list(map(float, bias.values())),
        "bad_words": [list(ids) for ids in dict.fromkeys(map(tuple, bad))],
    }


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def without_texts(words: Iterable[Any], tokenizer: Tokenizer | None, vocab_size: int) -> list[Any]:
    """Return `bad_words` with each text replaced by its token ids, as given and after a space. A
    text with a token that the model has no row for is dropped, because it can never be generated.
    A server calls this in a separate thread, because texts can be long. Raises `ValueError`."""
    found: list[Any] = []
    for word in words:
        both = _spelled(word, tokenizer) if isinstance(word, str) else None
        if both is None:
            found.append(word)
        else:
            found += [ids for ids in both if max(ids, default=vocab_size) < vocab_size]
    return found


def _spelled(word: str, tokenizer: Tokenizer | None) -> list[list[int]]:
    text = word.lstrip()
    is_text = bool(text) and not any("\ud800" <= c <= "\udfff" for c in text)
    require(is_text, "bad_words", word, "non-empty strings")
    if tokenizer is None:
        raise ValueError(f"bad_words must be token ids, got {word!r}: the engine has no tokenizer")
    return [tokenizer.encode(t, add_special_tokens=False) for t in (text, f" {text}")]


def _checked(word: Any, check_ids: CheckIds) -> list[int]:
    ids = list(word) if _is_list(word) else []
    require(bool(ids), "bad_words", word, "non-empty strings or sequences of token ids")
    return check_ids("bad_words", ids)


# -- the runner's side


class TokenRules:
    """The rules of one request, from the data of `token_rules_of`."""

    def __init__(self, rules: Mapping[str, Any]) -> None:
        allowed, words = rules["allowed"], rules["bad_words"]
        self.allowed = None if allowed is None else np.array(allowed, dtype=np.int64)
        self.biased = np.array(rules["biased"], dtype=np.int64)
        self.bias = np.array(rules["bias"])
        self.bad = np.array([ids[0] for ids in words if len(ids) == 1], dtype=np.int64)
        self.longer = [ids for ids in words if len(ids) > 1]
        self.words_after: dict[int, list[list[int]]] = {}  # `longer` by second-last token
        for ids in self.longer:
            self.words_after.setdefault(ids[-2], []).append(ids)

    def may_come(self, outputs: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
        """Return, for each rule of the request, which tokens it allows next."""
        found = {}
        ends = [word[-1] for word in self.words_ending_in(outputs)]
        if self.allowed is not None:
            found["allowed_token_ids"] = np.isin(np.arange(vocab_size), self.allowed)
        if len(self.bad) or ends:
            found["bad_words"] = ~np.isin(np.arange(vocab_size), [*self.bad, *ends])
        return found

    def words_ending_in(self, ids: np.ndarray) -> list[list[int]]:
        """Return the bad words that the next token could complete after these outputs. A last
        output below 0 is pending and can be any token."""
        if not len(ids) or not self.longer:
            return []
        last = int(ids[-1])
        some = self.words_after.get(last, []) if last >= 0 else self.longer
        return [w for w in some if w[:-2] == ids[len(ids) - len(w) + 1 : -1].tolist()]
