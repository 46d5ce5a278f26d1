"""Character offsets of tokens in a text, for `text_offset` of a completion's log-probabilities.

    token           " it"   "f0 9f"   "98 80"   "<|end|>"   "!"
    its place       0       3         3         4           4        of " it😀!"

A token that continues a character begins where the character does. A special token that is skipped
adds no text. A stop string counts although it is removed later, so a stream has the same offsets as
a complete answer.

See common/serve/README.md"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from common.requests.tokenizer import IncrementalDetokenizer, Tokenizer


class TextPlaces:
    """The token offsets of one choice. `echoed` is the prompt's text, if the choice begins with
    it. `skips`: whether special tokens are skipped."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], echoed: str | None, skips: bool
    ) -> None:
        self.tokenizer = tokenizer
        self.echoed = echoed or ""
        self._num_prompt_tokens_left = 0 if echoed is None else len(prompt_ids)  # prompt tokens
        self._num_characters = 0  # in the text so far
        self._prompt = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False)
        self._output = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special_tokens=skips)

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens: prompt tokens first, if the prompt is echoed."""
        places = []
        for token_id in token_ids:
            if not self._num_prompt_tokens_left:
                places.append(self._append(self._output, token_id))
                continue
            self._num_prompt_tokens_left -= 1
            here = self._num_characters
            shown = self.tokenizer.token_bytes(token_id)
            is_bos = token_id in self.tokenizer.special_ids and not here
            if not is_bos or self.echoed.startswith(shown.decode()):  # else the text omits it
                here = self._append(self._prompt, token_id)
            places.append(min(here, len(self.echoed)))
            if not self._num_prompt_tokens_left:  # a normalizer can shorten the text
                self._num_characters = len(self.echoed)
        return places

    def _append(self, detokenizer: IncrementalDetokenizer, token_id: int) -> int:
        """Append a token and return its offset. If the token does not complete an incomplete
        character before it, it begins after the text that this character became."""
        place = self._num_characters
        data = self.tokenizer.token_bytes(token_id)
        detokenizer.append(token_id)
        new = detokenizer.take_delta()
        self._num_characters += len(new)
        token_text = codecs.getincrementaldecoder("utf-8")(self.tokenizer.decode_errors).decode(
            data
        )
        return self._num_characters - len(token_text) if new.endswith(token_text) else place
