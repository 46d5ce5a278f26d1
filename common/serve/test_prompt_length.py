"""A bound on a text's tokens that holds for every text."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast
from unicodedata import normalize

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from common.engine_config import SHIPPED_CHECKPOINT
from common.requests.tokenizer import Tokenizer, load_tokenizer
from common.serve.async_llm import AsyncLLM, PromptTooLong
from common.serve.prompt_length import NFC_SHRINKS, longest_token

BYTES = {name: i for i, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
SPACES = normalizers.Replace(" ", "▁")


def tokenizer(
    normalizer: Any = None, splitter: Any = None, model: Any = None, **added: bool
) -> Tokenizer:
    backend = Backend(model or models.BPE(BYTES | {"abc": 256}, []))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = splitter or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<|x|>", **added)])
    return Tokenizer(backend)


def fallback(vocab: dict[str, int]) -> models.BPE:
    return models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>")


FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "▁the": 257}


METASPACE = pre_tokenizers.Metaspace()


@pytest.mark.parametrize(
    ("one", "longest"),
    [
        (tokenizer(), 5),
        (tokenizer(normalizers.NFC()), 5 * NFC_SHRINKS),
        (tokenizer(normalizers.Sequence([normalizers.Prepend("▁"), SPACES])), 5),
        (tokenizer(SPACES, METASPACE, fallback(FALLBACK)), 6),
        (tokenizer(model=models.BPE({"a": 0}, [])), math.inf),  # a byte without a token
        (tokenizer(SPACES, METASPACE, fallback({"<unk>": 0})), math.inf),
        (tokenizer(SPACES, METASPACE, models.BPE(FALLBACK, [])), math.inf),
        (tokenizer(normalizers.Replace(Regex(" +"), " ")), math.inf),
        (tokenizer(splitter=pre_tokenizers.Split(" ", "removed")), math.inf),
        (tokenizer(model=models.WordLevel(BYTES, "a")), math.inf),
        (tokenizer(lstrip=True), math.inf),
    ],
)
def test_a_bound_where_each_byte_goes_to_some_token(one: Tokenizer, longest: float) -> None:
    assert longest_token(one) == longest


def test_no_token_of_the_shipped_tokenizer_has_more_bytes() -> None:
    shipped = load_tokenizer(SHIPPED_CHECKPOINT)
    max_bytes = max(len(shipped.token_bytes(i)) for i in range(shipped.vocab_size))
    assert max_bytes <= longest_token(shipped) <= 2 * max_bytes


def test_nfc_shortens_no_text_more() -> None:
    """Canonical parts, each written as long as may be, beside the character of them all."""
    last = 0x30000  # no character above has others as its canonical parts
    characters = [chr(code) for code in range(last) if not 0xD800 <= code < 0xE000]
    apart = {c: normalize("NFD", c) for c in characters}
    longest = Counter[str]()
    for c, parts in apart.items():
        longest[parts] = max(longest[parts], len(c.encode()))
    together = {parts: len(normalize("NFC", parts).encode()) for parts in longest}
    most = {parts: max(longest[parts], sum(map(longest.get, parts))) for parts in longest}
    assert max(most[parts] / together[parts] for parts in most) == NFC_SHRINKS


def test_a_text_that_can_not_fit_is_refused_before_it_is_tokenized() -> None:
    llm = cast(AsyncLLM, SimpleNamespace(_max_token_bytes=5, max_model_len=8))
    AsyncLLM._check_bytes(llm, "x" * 39)
    with pytest.raises(PromptTooLong, match="at least 8 tokens, but this model takes at most 7"):
        AsyncLLM._check_bytes(llm, "x" * 40)
