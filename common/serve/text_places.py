"""Where tokens begin in a text, in characters: `text_offset` of a completion's log-probabilities.

    token           " it"   "f0 9f"   "98 80"   "<|end|>"   "!"
    its place       0       3         3         4           4        of " it😀!"

A token that goes on with a character begins where the character does. A special token that is
skipped adds nothing. A stop string counts, although it is cut away later, so a stream has the same
places as a whole answer."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from common.requests.tokenizer import IncrementalDetokenizer, Tokenizer


class TextPlaces:
    """Of one choice. `echoed` is the text of the prompt, if the choice begins with it."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], echoed: str | None, skips: bool
    ) -> None:
        self.tokenizer, self.echoed = tokenizer, echoed or ""
        self._num_left = 0 if echoed is None else len(prompt_ids)  # of the prompt
        self._num_characters = 0  # of the text so far
        self._prompt = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False)
        self._output = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special_tokens=skips)

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """The places of the next tokens: of the prompt first, if it is echoed."""
        places = []
        for token_id in token_ids:
            if not self._num_left:
                places.append(self._append(self._output, token_id))
                continue
            self._num_left -= 1
            here, shown = self._num_characters, self.tokenizer.token_bytes(token_id)
            is_bos = token_id in self.tokenizer.special_ids and not here
            if not is_bos or self.echoed.startswith(shown.decode()):  # else the text lacks it
                here = self._append(self._prompt, token_id)
            places.append(min(here, len(self.echoed)))
            if not self._num_left:  # a normalizer may have made it shorter
                self._num_characters = len(self.echoed)
        return places

    def _append(self, detokenizer: IncrementalDetokenizer, token_id: int) -> int:
        """Where the token begins: behind what an incomplete character before it became, if the
        token does not complete it."""
        place, data = self._num_characters, self.tokenizer.token_bytes(token_id)
        detokenizer.append(token_id)
        new = detokenizer.take_delta()
        self._num_characters += len(new)
        own = codecs.getincrementaldecoder("utf-8")(self.tokenizer.decode_errors).decode(data)
        return self._num_characters - len(own) if new.endswith(own) else place
