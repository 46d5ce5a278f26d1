"""The text that each token of a recorded run adds.

See common/events/README.md#the-format-version-2"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.requests.tokenizer import IncrementalDetokenizer, Tokenizer

if TYPE_CHECKING:
    from common.requests.output_processor import OutputProcessor
    from request import Request


class TextDeltas:
    """The text that each token of a request adds. The engine decodes text lazily, so this class has
    a decoder of its own. `output` finds stop strings; None: nothing does."""

    def __init__(
        self, request: Request, output: OutputProcessor | None, tokenizer: Tokenizer
    ) -> None:
        self._request = request
        self._output = output
        prompt = request.prompt_token_ids
        decoder = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False)
        self.prompt_pieces = _pieces(decoder, prompt)
        decoder.finish()
        self.prompt_pieces[-1] += decoder.take_delta()
        skips = request.sampling_params.skip_special_tokens
        self._decoder = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skips)
        self._num_tokens = 0
        self._pieces: list[str] = []

    def pieces(self) -> list[str]:
        """Return the text that each output token so far adds: "" for a token that stopped the
        request. A new list for each change."""
        new = self._request.output_token_ids[self._num_tokens :]
        if new:
            self._num_tokens += len(new)
            self._pieces = self._pieces + self._added(new)
        return self._pieces

    def _added(self, token_ids: list[int]) -> list[str]:
        request = self._request
        is_hidden = not request.sampling_params.include_stop_str_in_output
        if request.finish_reason == "stop" and is_hidden and self.cut() is None:
            return [*_pieces(self._decoder, token_ids[:-1]), ""]
        return _pieces(self._decoder, token_ids)

    def rest(self) -> str:
        """Return the text of the bytes that are left at the end: "" or U+FFFD."""
        self._decoder.finish()
        return self._decoder.take_delta()

    def cut(self) -> tuple[str, int] | None:
        """Return the stop string that the engine has found, with the length of the text before
        it."""
        output = self._output
        stop_string = None if output is None else output.completion.stop_reason
        if output is None or not isinstance(stop_string, str):
            return None
        return stop_string, len(output.completion.text)


def _pieces(decoder: IncrementalDetokenizer, token_ids: list[int]) -> list[str]:
    pieces = []
    for token_id in token_ids:
        decoder.append(token_id)
        pieces.append(decoder.take_delta())
    return pieces
