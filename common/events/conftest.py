from __future__ import annotations

import pytest
import tokenizers

from common.conftest import draft
from common.requests.tokenizer import Tokenizer, byte_alphabet
from common.tests.engine_oracle import Oracle
from common.tests.film_runs import Workshop, short_prompts

__all__ = ["draft", "letters", "workshop"]  # taken from here by the workshop's folders


@pytest.fixture(scope="session")
def letters() -> Tokenizer:
    """97 tokens of one byte each: letters, and pieces of characters of two and three bytes."""
    alphabet = {byte: char for char, byte in byte_alphabet().items()}
    data = [*b"abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;()[]0123456789"]
    data += [byte for byte in range(128, 256)][: 97 - len(data)]
    vocabulary = {alphabet[byte]: i for i, byte in enumerate(data)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def workshop(
    tmp_path_factory: pytest.TempPathFactory,
    family_oracle: Oracle,
    family_loaded,
    draft,
    letters: Tokenizer,
    one_thread,
) -> Workshop:
    folder = tmp_path_factory.mktemp("films")
    return Workshop(folder, family_loaded, draft, letters, short_prompts(family_oracle))
