"""The tokenizer: text to token ids, and token ids to text, one token at a time.

A token stands for *bytes*, not for characters. A byte-level BPE splits characters anywhere, so one
emoji can be four tokens, and the first three have no text yet:

    token bytes     | 20 f0 9f | 98 | 80 | 21 |
    text after it     " "       " "  " 😀" " 😀!"     shown text is never taken back

`IncrementalDetokenizer` looks up each token's bytes (cached after the first time) and feeds them to
an incremental UTF-8 decoder. The decoder keeps at most three bytes for later, and returns U+FFFD
immediately for bytes that can never become a character. A token is decoded once, and no token of
the prompt is ever decoded, so none of the prompt can leak into the output.

This is exact as long as a token's bytes depend only on the token and whether it comes first
(sentencepiece drops a leading space there). That holds for byte-level, Metaspace and byte-fallback
tokenizers, those of all of today's language models. vLLM and Hugging Face TGI decode a small window
of tokens twice and compare. That requires less of the tokenizer, but stalls on text that never ends
at a character border, and needs extra code to hide the prompt.

Stop strings are searched in the text, so token borders do not matter. Text that could still become
a stop string is held back from the stream.

See common/README.md"""

from __future__ import annotations

import codecs
import copy
import re
from collections.abc import Sequence
from functools import cache, cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

REPLACEMENT = "\ufffd"
_FILE = "tokenizer.json"
_PARTS = ("model", "normalizer", "pre_tokenizer", "decoder")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # sentencepiece's byte fallback

# A byte-fallback tokenizer shows one U+FFFD for each invalid byte. A byte-level one, like Python,
# shows one for each incomplete character.
codecs.register_error("replace_each", lambda e: (REPLACEMENT * (e.end - e.start), e.end))  # pyright: ignore[reportAttributeAccessIssue]


class Tokenizer:
    """A fast tokenizer (`tokenizers.Tokenizer`): ids for text, text for ids, bytes for one id.

    `special_ids` are the ids that `skip_special_tokens` skips. `vocab_size` is the highest id plus
    one, added tokens included; a model's logits can be wider (padding). `source` is the tokenizer
    that transformers loaded from the checkpoint's files; it has the chat template."""

    def __init__(
        self, backend: tokenizers.Tokenizer, eos_token_id: int | None = None, source: Any = None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.source = source
        self.eos_token_id = eos_token_id
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        decoder = repr(backend.decoder)
        self._is_byte_level = "ByteLevel(" in decoder
        self._has_byte_tokens = "ByteFallback(" in decoder
        self.decode_errors = "replace_each" if self._has_byte_tokens else "replace"
        self._token_bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids. They start with a BOS token only if the tokenizer adds one."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return text. Incomplete characters become U+FFFD, and ids without a token are skipped."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def has_token(self, token_id: int) -> bool:
        return self.backend.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int, is_first: bool = False) -> bytes:
        """Return the UTF-8 bytes of one token, possibly part of a character. `is_first`: the token
        begins the text."""
        if is_first and not self._is_byte_level:
            text = self.decode([token_id], skip_special_tokens=False)
            return self.token_bytes(token_id) if REPLACEMENT in text else text.encode()
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = self._find_bytes(token_id)
        return found

    def _find_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            byte_of = byte_alphabet()
            known = all(char in byte_of for char in token)  # an added token may be plain text
            return bytes(byte_of[char] for char in token) if known else token.encode()
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        anchor_id, anchor = self._anchor
        text = self.decode([anchor_id, token_id], skip_special_tokens=False)
        if not text.startswith(anchor):
            raise ValueError(
                f"cannot stream with this tokenizer: token {token_id} ({token!r}) changes the "
                f"text of the token before it (decoder: {self.backend.decoder!r})"
            )
        return text[len(anchor) :].encode()

    @cached_property
    def _anchor(self) -> tuple[int, str]:
        """An ordinary token to decode before another one, so that the other is not the first."""
        for token_id in range(self.vocab_size):
            text = self.decode([token_id])
            if text.isalnum():
                return token_id, text
        raise ValueError("tokenizer must have a token that is a letter or a digit")


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory. Raises `FileNotFoundError` if there is no such
    directory and `ValueError` if it has no usable tokenizer."""
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"tokenizer must be in a directory, got {path}")
    from transformers import AutoTokenizer  # takes seconds, so it is imported only here

    try:
        loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # tokenizer classes raise many types
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot load tokenizer from {path}: {reason}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"tokenizer must be a fast one, got {type(loaded).__name__} in {path}; save it with a "
            "tokenizer.json"
        )
    if (path / _FILE).is_file():
        _restore_parts(backend, path / _FILE)
    return Tokenizer(backend, loaded.eos_token_id, loaded)


def _restore_parts(backend: tokenizers.Tokenizer, path: Path) -> None:
    """Set the model, normalizer, pre-tokenizer and decoder of `backend` to those of its file.
    transformers 5 ignores the file for some classes and builds its own, so a prompt would get other
    ids than in training. Added tokens and the tokens around a prompt (BOS) are kept from
    transformers, which reads them from more than one file."""
    stored = type(backend).from_file(str(path))
    for name in _PARTS:
        setattr(backend, name, getattr(stored, name))


class IncrementalDetokenizer:
    """The text of one continuation while it grows. A stop string or `finish()` ends it.

    `text` is all text so far, without incomplete characters. `prompt_token_ids` only determine
    whether the first output token begins the text. A stop string that ends within the text of the
    first `min_tokens` tokens is ordinary text. With `includes_stop`, the text ends with the stop
    string, and no text is held back for it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        includes_stop: bool = False,
    ) -> None:
        self.text = ""
        self.num_tokens = 0
        self.includes_stop = includes_stop
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._is_first = not any(
            t not in self._skipped and tokenizer.has_token(t) for t in reversed(prompt_token_ids)
        )
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=tokenizer.decode_errors)
        self.num_sent = 0  # characters
        self._is_finished = False

    def append(self, token_id: int) -> str | None:
        """Add one output token. Returns the stop string that it completes, or None; the text is cut
        before it. If the token completes several, the one that ends first wins, then the one that
        begins first."""
        if self._is_finished:
            raise RuntimeError("cannot add tokens after a stop string or finish()")
        self.num_tokens += 1
        if token_id in self._skipped:
            return None
        num_old = len(self.text)
        new = self._utf8.decode(self._tokenizer.token_bytes(token_id, self._is_first))
        self.text += new
        if self._is_first:
            self._is_first = not self._tokenizer.has_token(token_id)
        if not self._stop or self.num_tokens <= self._min_tokens:
            return None
        return self._cut_at_stop(num_old)

    def _cut_at_stop(self, num_old: int) -> str | None:
        """Cut the text at the first stop string that ends after its first `num_old` characters."""
        found = []
        for stop in self._stop:
            start = self.text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        end, start, stop = min(found)
        self._is_finished = True
        self.text = self.text[: end if self.includes_stop else start]
        return stop

    def num_until_stop(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, if they came next, would complete a stop string, or
        their number if none would. Changes no state."""
        probe = copy.copy(self)
        probe._utf8 = copy.copy(self._utf8)
        for i, token_id in enumerate(token_ids):
            if probe.append(token_id) is not None:
                return i + 1
        return len(token_ids)

    def take_delta(self) -> str:
        """Return the final text that follows the text of earlier calls. Joined, all deltas are a
        prefix of `text`, and all of it after `finish()` or a stop string."""
        unsent = self.text[self.num_sent :]
        num_held = 0 if self._is_finished else self._num_held(unsent)
        delta = unsent[: len(unsent) - num_held]
        self.num_sent += len(delta)
        return delta

    def finish(self) -> None:
        """End the text: an incomplete character becomes U+FFFD, and no text is held back."""
        if not self._is_finished:
            self._is_finished = True
            self.text += self._utf8.decode(b"", final=True)

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of `text` with which a stop string begins."""
        longest = 0 if self.includes_stop else max(map(len, self._stop), default=1) - 1
        lengths = range(min(len(text), longest), 0, -1)
        return next((n for n in lengths if any(s.startswith(text[-n:]) for s in self._stop)), 0)


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE (GPT-2), which writes a byte as one
    printable character."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {char: byte for byte, char in bytes_to_unicode().items()}
