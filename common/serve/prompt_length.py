"""A bound on a text's tokens, to refuse a text that is too long before it is tokenized: 16 MB take
a minute of a core. No token covers more bytes than the longest one of the vocabulary.

The bound holds if each byte of a text goes to some token. Other tokenizers can drop a part of a
text, or make one unknown token of any number of bytes; then only the token ids give the length.
vLLM multiplies by the longest token's characters whatever the tokenizer does.

See common/serve/README.md#what-one-client-can-take-from-others"""

from __future__ import annotations

import math
import re

from tokenizers import models
from tokenizers.pre_tokenizers import ByteLevel

from common.requests.tokenizer import Tokenizer

SPACES = 'Replace(pattern=String(" "), content="▁")'
NORMALIZERS = {"Sequence", "Prepend", "NFC"}
SPLITTERS = {"Sequence", "ByteLevel", "Split", "Regex", "String", "Digits", "Metaspace"}
NFC_SHRINKS = 3.5  # NFC's largest reduction: 7 bytes become 2
BYTE_NAMES = {f"<0x{byte:02X}>" for byte in range(256)}


def longest_token(tokenizer: Tokenizer) -> float:
    """Return the maximum number of bytes of a text that one token can cover; inf: no bound."""
    backend = tokenizer.backend
    model = tokenizer.backend.model
    vocab = backend.get_vocab(with_added_tokens=True)
    normalizer, splitter = repr(backend.normalizer), repr(backend.pre_tokenizer)
    used = set(re.findall(r"(\w+)\(", normalizer.replace(SPACES, "")))
    keeps_all_bytes = used <= NORMALIZERS and set(re.findall(r"(\w+)\(", splitter)) <= SPLITTERS
    keeps_all_bytes &= "=Removed" not in splitter and isinstance(model, models.BPE)
    falls_back = getattr(model, "byte_fallback", False) and vocab.keys() >= BYTE_NAMES
    in_bytes = "ByteLevel(" in splitter and vocab.keys() >= set(ByteLevel.alphabet())
    added = backend.get_added_tokens_decoder().values()
    if not (keeps_all_bytes and (falls_back or in_bytes)) or any(
        t.lstrip or t.rstrip for t in added
    ):
        return math.inf
    longest = max(len(name.encode()) for name in vocab)  # a byte's name is a byte or more
    return longest * NFC_SHRINKS if "NFC" in used else longest
