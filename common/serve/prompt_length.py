"""A text that is too long for the model is refused before it costs anything: 16 MB become token ids
in a minute of a core. No token stands for more of it than the longest one of the vocabulary.

That holds where each byte of a text goes to some token. Elsewhere a tokenizer may drop a part of a
text, or make one unknown token of any number of bytes, and only the token ids say how long it is.
vLLM multiplies the longest token's characters whatever the tokenizer does."""

from __future__ import annotations

import math
import re

from tokenizers import models
from tokenizers.pre_tokenizers import ByteLevel

from common.requests.tokenizer import Tokenizer

SPACES = 'Replace(pattern=String(" "), content="▁")'
NORMALIZERS = {"Sequence", "Prepend", "NFC"}
SPLITTERS = {"Sequence", "ByteLevel", "Split", "Regex", "String", "Digits", "Metaspace"}
NFC_SHRINKS = 3.5  # it writes 7 bytes as 2, and no other text shorter than that
BYTE_NAMES = {f"<0x{byte:02X}>" for byte in range(256)}


class PromptTooLong(ValueError):
    """Prompt and answer have no room in the model."""


def longest_token(tokenizer: Tokenizer) -> float:
    """The most bytes of a text that one token may stand for; inf: any number."""
    backend, model = tokenizer.backend, tokenizer.backend.model
    vocab = backend.get_vocab(with_added_tokens=True)
    normalizer, splitter = repr(backend.normalizer), repr(backend.pre_tokenizer)
    used = set(re.findall(r"(\w+)\(", normalizer.replace(SPACES, "")))
    is_whole = used <= NORMALIZERS and set(re.findall(r"(\w+)\(", splitter)) <= SPLITTERS
    is_whole &= "=Removed" not in splitter and isinstance(model, models.BPE)
    falls_back = getattr(model, "byte_fallback", False) and vocab.keys() >= BYTE_NAMES
    in_bytes = "ByteLevel(" in splitter and vocab.keys() >= set(ByteLevel.alphabet())
    added = backend.get_added_tokens_decoder().values()
    if not (is_whole and (falls_back or in_bytes)) or any(t.lstrip or t.rstrip for t in added):
        return math.inf
    longest = max(len(name.encode()) for name in vocab)  # a byte's name is a byte or more
    return longest * NFC_SHRINKS if "NFC" in used else longest
