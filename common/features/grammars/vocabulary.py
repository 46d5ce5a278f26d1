"""`Vocabulary`: a tokenizer as grammars need it, with the bytes of each token and the EOS tokens.

A grammar is over bytes, as tokens are: a token can be half a character, and can be allowed. Special
tokens have no bytes here, so no grammar ever allows one. EOS is handled in `grammar_masks.py`, not
by the library.

See 04_scheduler/beyond/GRAMMARS.md#which-tokens-may-come-next"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock, Thread, stack_size

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from common.requests.tokenizer import Tokenizer

_NOTHING = b"\xff"  # no text has this byte
# The library recurses into each rule or schema that a grammar contains, and overrunning a default
# stack ends the process. The worst grammar found that `grammars.py` accepts takes 128 MiB. The
# stack size of the next thread is a process-wide setting, so the lock is held until it has started.
_STACK = 256 << 20
_ONE_AT_A_TIME = Lock()
RULES = "// rules of single characters\n"
# Limits of the library's work for one text, in counts, so that all ranks give up at the same token.
# Rules can be parsed in many ways at the same time, at quadratic cost or more: `s ::= s s | "a"`.
# So rules get a lower limit on ways, and a higher one on nodes of the token tree, because each
# character is a separate terminal. Others have as many ways as properties or texts, at linear cost.
_LIMITS = {
    True: LLParserLimits(
        max_items_in_row=500, step_max_items=200_000, max_grammar_size=10_000, verbose_errors=False
    ),
    False: LLParserLimits(max_items_in_row=20_000, verbose_errors=False),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's tokens: `token_bytes[i]` are the bytes of token i, empty if it is special or
    does not exist."""

    token_bytes: tuple[bytes, ...]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
        special = {*tokenizer.special_ids, *eos_token_ids}
        token_bytes = (b"" if i in special else tokenizer.token_bytes(i) for i in range(vocab_size))
        return cls(tuple(token_bytes), tuple(i for i in eos_token_ids if i < vocab_size))


@lru_cache(maxsize=2)
def tokenizer_of(vocabulary: Vocabulary) -> LLTokenizer:
    """Return the vocabulary for llguidance. Takes seconds for a large one; it is never changed."""
    return LLTokenizer(TokenizerWrapper(_GuidanceTokenizer(vocabulary)))


class Beginning:
    """A grammar's matcher at the start of a text, to be copied for requests. `matcher` can be in an
    error state."""

    def __init__(self, tokenizer: LLTokenizer, text: str) -> None:
        self.tokenizer = tokenizer
        self.text = text
        self.rebuild()

    def rebuild(self) -> None:
        """Make the matcher, or a fresh one: copies share states, and their count can be high."""
        thread = Thread(target=self._make, daemon=True)
        with _ONE_AT_A_TIME:
            usual = stack_size(_STACK)
            try:
                thread.start()
            finally:
                stack_size(usual)
        thread.join()

    def _make(self) -> None:
        limits = _LIMITS[RULES in self.text]
        self.matcher = LLMatcher(self.tokenizer, self.text, log_level=0, limits=limits)


@lru_cache(maxsize=32)
def beginning_of(tokenizer: LLTokenizer, text: str) -> Beginning:
    """Return a grammar's start. Cached when the grammar is compiled, so that no step has to."""
    return Beginning(tokenizer, text)


class _GuidanceTokenizer:
    """The tokenizer's interface that the library requires."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        token_bytes = vocabulary.token_bytes
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.special_token_ids = [i for i, spelling in enumerate(token_bytes) if not spelling]
        self.tokens = [spelling or _NOTHING for spelling in token_bytes]

    def __call__(self, text: object) -> list[int]:
        return []  # only used to spell certain text, which `no_forcing` turns off
