"""The text that each token of a recorded run adds.

See common/events/README.md#the-format-version-2"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from common.requests.tokenizer import IncrementalDetokenizer, Tokenizer

if TYPE_CHECKING:
    from common.requests.output_processor import OutputProcessor
    from request import Request


class TextDeltas:
    """The text that each token adds, for all requests. The engine decodes text lazily, so this
    class has separate decoders."""

    def __init__(self, members: Mapping[str, OutputProcessor], tokenizer: Tokenizer | None) -> None:
        self._members = members
        self._tokenizer = tokenizer
        self._decoders: dict[str, IncrementalDetokenizer] = {}
        self._outputs: dict[Request, OutputProcessor] = {}  # of unfinished requests

    def begin(self, request: Request) -> list[str]:
        """Return the text that each prompt token adds; [] without a tokenizer."""
        tokenizer = self._tokenizer
        prompt = request.prompt_token_ids
        if tokenizer is None:
            return []
        if (output := self._members.get(request.request_id)) is not None:
            self._outputs[request] = output
        skips = request.sampling_params.skip_special_tokens
        self._decoders[request.request_id] = IncrementalDetokenizer(
            tokenizer, prompt, skip_special_tokens=skips
        )
        decoder = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False)
        return _pieces(decoder, prompt, is_last=True)

    def add(self, request: Request, token_ids: list[int]) -> list[str]:
        """Return the text that each new output token adds: "" for a token that stopped the
        request; [] without a tokenizer."""
        decoder = self._decoders.get(request.request_id)
        if decoder is None:
            return []
        shown = token_ids
        is_hidden = not request.sampling_params.include_stop_str_in_output
        if request.finish_reason == "stop" and is_hidden and self._cut_of(request) is None:
            shown = token_ids[:-1]
        pieces = _pieces(decoder, shown, is_last=request.is_finished)
        if request.is_finished:
            del self._decoders[request.request_id]
        return pieces + [""] * (len(token_ids) - len(pieces))

    def end(self, request: Request) -> tuple[str, tuple[str, int] | None]:
        """Return the undecoded rest of a request that ended without a last token, "" or U+FFFD; and
        the stop string with the length of the text before it, if the engine has found one."""
        decoder = self._decoders.pop(request.request_id, None)
        rest = "" if decoder is None else "".join(_pieces(decoder, [], is_last=True))
        cut = self._cut_of(request)
        self._outputs.pop(request, None)
        return rest, cut

    def _cut_of(self, request: Request) -> tuple[str, int] | None:
        output = self._outputs.get(request)
        stop_string = None if output is None else output.completion.stop_reason
        if output is None or not isinstance(stop_string, str):
            return None
        return stop_string, len(output.completion.text)


def _pieces(decoder: IncrementalDetokenizer, token_ids: list[int], is_last: bool) -> list[str]:
    pieces = []
    for token_id in token_ids:
        decoder.append(token_id)
        pieces.append(decoder.take_delta())
    if is_last:
        decoder.finish()
        if rest := decoder.take_delta():
            pieces[-1:] = ["".join([*pieces[-1:], rest])]
    return pieces
