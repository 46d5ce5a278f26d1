"""The runner's side of grammars: masks of the tokens that can be sampled in each row of a step.

    admit             makes a matcher for this request from the compiled text
    before_sampling   while the device computes: the matcher consumes the new tokens and returns a
                      bit for each allowed token; one row of bits for each row of logits
    after that        sets logits of forbidden tokens to -inf, before any other change to logits

A matcher's state depends only on the outputs, and it reads them from the runner's copy when it
needs them. So preemptions, several accepted draft tokens and chunks need no extra handling.

Draft tokens (chapter 5) are matched one by one by a copy of the matcher, for the bits of the rows
after each: the matcher takes only tokens that the runner has accepted. The rows after a draft token
that the grammar forbids get no mask, because that draft token is rejected in any case.

EOS, and a stop token without text in the grammar, can come where the text is complete. Before
`min_tokens` outputs no end token can come, unless nothing else can.

A step that was planned before the previous step's tokens were read (`overlap.py`) waits for them
here, when the device already has work, and not earlier. So no request has to skip a step.

See 04_scheduler/beyond/GRAMMARS.md#who-does-what-and-when"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from itertools import takewhile

import numpy as np
import torch
from llguidance.numpy import fill_next_token_bitmask

from batch_layout import all_to_device
from common.features.grammars.lark_text import NOTHING_FITS, TOO_MANY_WAYS, sentence_of
from common.features.grammars.vocabulary import Beginning, Vocabulary, beginning_of, tokenizer_of
from common.sampling.runner_plugin import (
    BroughtByFew,
    HasTokens,
    StepRows,
)
from common.sampling.sampling_constraints import forbid
from scheduler_interface import NewRequestData


class GrammarMasks(BroughtByFew):
    """The plugin that masks logits. Made when the first request with a grammar is admitted."""

    name = "grammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()  # each row has a `Matched` or None
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer_of(vocabulary)
        self._num_words = num_words(vocabulary)

    def admit(self, row: int, new: NewRequestData) -> None:
        compiled = new.features.get(self.name)
        if compiled is not None:
            stop_token_ids = new.sampling_params.stop_token_ids
            self.put(row, self.match(compiled, stop_token_ids, new.features["min_tokens"]))

    def release(self, row: int) -> None:
        self.put(row, None)

    def match(
        self, compiled: str, stop_token_ids: Sequence[int] = (), min_tokens: int = 0
    ) -> Matched:
        beginning = beginning_of(self._tokenizer, compiled)
        return Matched(beginning, self._vocabulary, stop_token_ids, min_tokens)

    def before_sampling(self, step: StepRows, logits: torch.Tensor) -> torch.Tensor:
        rows = step.queries.rows
        num_rows = step.queries.num_logit_rows
        first = np.cumsum(num_rows) - num_rows
        concerned = np.flatnonzero(self.has_one[rows] & (num_rows > 0))
        if not len(concerned):
            return logits
        at = np.concatenate([first[i] + np.arange(num_rows[i]) for i in concerned])
        bits = np.full((len(at), self._num_words), -1, dtype=np.int32)
        row_of_bits = 0
        for i in concerned.tolist():
            matched: Matched = self.brought[rows[i]]
            drafts = step.drafts.get(step.req_ids[i], ())
            for _ in range(2):  # again if the matcher had to restart
                matched.follow(step.state, rows[i])
                if matched.fill(bits, row_of_bits, drafts):
                    break
            row_of_bits += int(num_rows[i])
        sent_at, sent_bits = all_to_device(logits.device, [at, bits])
        return forbid(logits, sent_at, sent_bits)

    def may_come(self, row: int, outputs: Sequence[int], vocab_size: int) -> dict[str, np.ndarray]:
        if not self.has_one[row]:
            return {}
        bits = np.full((1, self._num_words), -1, dtype=np.int32)
        matched: Matched = copy(self.brought[row])
        matched.begin()
        matched.take(outputs)
        matched.fill(bits, 0, ())
        lanes = np.unpackbits(bits.view(np.uint8)[0], count=vocab_size, bitorder="little")
        reason = " with min_tokens" if len(outputs) < matched.min_tokens else ""
        reason = f" ({matched.gave_up})" if matched.gave_up else reason
        return {f"{self.name}{reason}": lanes.astype(bool)}

    def num_possible(self, state: HasTokens, row: int, drafts: Sequence[int]) -> int:
        matched: Matched | None = self.brought[row]
        if matched is None:
            return len(drafts)
        matched.follow(state, row)
        return matched.num_possible(drafts)


def num_words(vocabulary: Vocabulary) -> int:
    """The number of words of 32 bits that have a bit for each token."""
    return -(-len(vocabulary.token_bytes) // 32)


class Matched:
    """The position of one request's outputs in its grammar. End tokens are handled here: the
    library only returns whether a text is complete, and which other tokens can follow.

    Copies of a matcher share its cached states and their count. If the library gives up, other
    requests' states or a draft token may be the cause. So the matcher is then made again from
    scratch, and only if a fresh matcher gives up too, the request ends."""

    def __init__(
        self,
        beginning: Beginning,
        vocabulary: Vocabulary,
        stop_token_ids: Sequence[int],
        min_tokens: int,
    ) -> None:
        self.beginning = beginning
        self.min_tokens = min_tokens
        self._eos = frozenset(vocabulary.eos_token_ids)
        self._ends = self._eos.union(i for i in stop_token_ids if i < len(vocabulary.token_bytes))
        is_end = np.zeros(num_words(vocabulary) * 32, dtype=bool)
        is_end[list(self._ends)] = True
        self._end_bits = np.packbits(is_end, bitorder="little").view(np.int32)
        self.gave_up = ""  # the reason, if the library gave up
        self.begin()

    def begin(self) -> None:
        self._matcher = self.beginning.matcher.deep_copy()
        self._num_taken = 0  # outputs
        self._has_ended = False  # an end token was one of them

    def follow(self, state: HasTokens, row: int) -> None:
        """Consume the new outputs. Waits for a pending one."""
        num_prompt = state.num_prompt_tokens[row]
        new = state.token_ids[row, num_prompt + self._num_taken : state.num_tokens[row]]
        self.take(map(state.known, new.tolist()))

    def take(self, outputs: Iterable[int]) -> None:
        for token_id in outputs:
            if token_id < 0 or self._has_ended:  # its request has ended
                return
            if not self._end(token_id):
                self._matcher.consume_token(token_id)  # a wrong token sets its error state
            self._num_taken += 1

    def _end(self, token_id: int) -> bool:
        """Whether the token ends the text here; if so, marks it as ended. A stop token that the
        grammar allows is text, with which the request ends too."""
        is_end = token_id in self._ends and (
            token_id in self._eos or not self._matcher.validate_tokens([token_id])
        )
        self._has_ended = is_end and self._matcher.is_accepting()
        return self._has_ended

    def _accept(self, draft: int) -> bool:
        """Consume a draft token if it is allowed, and return whether it was."""
        if self._has_ended:
            return False
        is_text = draft not in self._eos and self._matcher.validate_tokens([draft]) == 1
        return self._end(draft) or (is_text and self._matcher.consume_token(draft))

    def _ahead(self) -> Matched:
        """A copy that takes draft tokens."""
        ahead = copy(self)
        ahead._matcher = self._matcher.deep_copy()
        return ahead

    def fill(self, bits: np.ndarray, row: int, drafts: Sequence[int]) -> bool:
        """Fill `bits` [rows, words] int32 at `row` and at one more row for each draft token. After
        the end of the text, rows stay unchanged, because their samples are ignored. Returns False
        if the library gave up at the first row."""
        if self._has_ended:
            return True
        ahead = self._ahead() if drafts else self
        for i, draft in enumerate([*drafts, -1]):
            ahead._fill_row(bits[row + i], self._num_taken + i)
            if draft < 0 or not ahead._accept(draft) or ahead._has_ended:
                break
        if ahead._matcher.is_error():
            bits[row + i + 1 : row + 1 + len(drafts)] = 0
            error = sentence_of(ahead._matcher.get_error())
            self.gave_up = "" if error == NOTHING_FITS else error
            if error != TOO_MANY_WAYS:  # that is caused by the text itself
                self.beginning.rebuild()
            self.begin()
        return bool(bits[row].any())

    def _fill_row(self, bits: np.ndarray, num_outputs: int) -> None:
        """Fill the `bits` [words] of the token after `num_outputs` outputs."""
        fill_next_token_bitmask(self._matcher, bits[None], 0)
        if self._matcher.is_error():  # the text does not match, or the limit is reached
            bits[:] = 0
            return
        if self._matcher.is_accepting():
            bits |= self._end_bits
        if num_outputs < self.min_tokens:
            others = bits & ~self._end_bits
            if others.any():
                bits[:] = others

    def num_possible(self, drafts: Sequence[int]) -> int:
        ahead = self._ahead()
        accepted = takewhile(ahead._accept, drafts)
        return len(list(accepted))
