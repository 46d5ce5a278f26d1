"""What a grammar has to know of a tokenizer: the bytes of each token, and which ones end a text.

A grammar is over bytes, as tokens are: half a character is a token, and may be allowed. Special
tokens have no bytes here, so no grammar ever allows one; EOS is no affair of the library's either
(`grammar_masks.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from queue import SimpleQueue
from threading import Lock, Thread, stack_size

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from common.requests.tokenizer import Tokenizer

_NOTHING = b"\xff"  # no text has this byte
# The library calls itself for each rule or schema that one is made of, and a usual stack that is
# overrun ends the process. Of what `grammars.py` lets in the worst that was found takes 128 MiB.
# How much the next thread gets is a setting of the process: the lock is held until it has begun.
_STACK, _ONE_AT_A_TIME = 256 << 20, Lock()
RULES = "// rules of single characters\n"
# What the library may do for one text, counted: so all ranks give up at the same token. Rules can
# be read in many ways at once, which costs the square of those or more: `s ::= s s | "a"`. So fewer
# are borne there; and more places in the tree of tokens, since each character is a word of its own.
# Others have as many ways as properties or texts, and each costs what the last one did.
_LIMITS = {
    True: LLParserLimits(
        max_items_in_row=500, step_max_items=200_000, max_grammar_size=10_000, verbose_errors=False
    ),
    False: LLParserLimits(max_items_in_row=20_000, verbose_errors=False),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`pieces[i]` are the bytes of token i: none of a special one, or where there is no token."""

    pieces: tuple[bytes, ...]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
        special = {*tokenizer.special_ids, *eos_token_ids}
        pieces = (b"" if i in special else tokenizer.token_bytes(i) for i in range(vocab_size))
        return cls(tuple(pieces), tuple(i for i in eos_token_ids if i < vocab_size))


@lru_cache(maxsize=2)
def tokenizer_of(vocabulary: Vocabulary) -> LLTokenizer:
    """As llguidance has it. Takes seconds for a large one; it is never changed."""
    return LLTokenizer(TokenizerWrapper(_Pieces(vocabulary)))


@cache
def tokenizer_of_bytes() -> LLTokenizer:
    """Of no model: token 1 + i is byte i."""
    pieces = (b"", *(bytes([i]) for i in range(256)))
    return LLTokenizer(TokenizerWrapper(_Pieces(Vocabulary(pieces, eos_token_ids=(0,)))))


class Beginning:
    """`matcher` stands at the beginning of a text, for copies to be made of. It may have an
    error."""

    def __init__(self, tokenizer: LLTokenizer, text: str) -> None:
        limits = _LIMITS[RULES in text]
        self._make = partial(LLMatcher, tokenizer, text, log_level=0, limits=limits)
        self.rebuild()

    def rebuild(self) -> None:
        """Copies share what they have found out, and the count of it, which may be too high."""
        made = SimpleQueue[LLMatcher | BaseException]()
        with _ONE_AT_A_TIME:
            usual = stack_size(_STACK)
            try:
                Thread(target=_make, args=(self._make, made.put), daemon=True).start()
            finally:
                stack_size(usual)
        found = made.get()
        if isinstance(found, BaseException):
            raise found
        self.matcher = found


def _make(make: Callable[[], LLMatcher], put: Callable[[LLMatcher | BaseException], None]) -> None:
    try:
        put(make())
    except BaseException as error:
        put(error)


@lru_cache(maxsize=32)
def beginning_of(tokenizer: LLTokenizer, text: str) -> Beginning:
    """Who compiles a grammar leaves it here, so that no step of this process has to."""
    return Beginning(tokenizer, text)


class _Pieces:
    """What the library asks a tokenizer for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        pieces = vocabulary.pieces
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.special_token_ids = [i for i, piece in enumerate(pieces) if not piece]
        self.tokens = [piece or _NOTHING for piece in pieces]

    def __call__(self, text: object) -> list[int]:
        return []  # it would be asked for the usual tokens of a text that is certain
