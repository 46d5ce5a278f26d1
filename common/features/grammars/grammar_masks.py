"""The runner's side of grammars: masks of the tokens that can be sampled in each row of a step.

    admit             makes a matcher for this request from the compiled text
    before_sampling   while the device computes: the matcher consumes the new tokens and returns a
                      bit for each allowed token; one row of bits for each row of logits
    after that        sets logits of forbidden tokens to -inf, before any other change to logits

A matcher's state depends only on the outputs, and it reads them from the runner's copy when it
needs them. So preemptions, several accepted draft tokens and chunks need no extra handling.

Draft tokens (chapter 5) are matched one by one, for the bits of the rows after each, and then
rolled back: only tokens that the runner has accepted stay. The rows after a draft token that the
grammar forbids get no mask, because that draft token is rejected in any case.

EOS, and a stop token without text in the grammar, can come where the text is complete. Before
`min_tokens` outputs no end token can come, unless nothing else can.

A step that was planned before the previous step's tokens were read (`overlap.py`) waits for them
here, when the device already has work, and not earlier. So no request has to skip a step.

See 04_scheduler/beyond/GRAMMARS.md#who-does-what-and-when"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np
import torch
from llguidance.numpy import fill_next_token_bitmask

from batch_layout import all_to_device
from common.features.grammars.lark_text import NOTHING_FITS, TOO_MANY_WAYS, sentence_of
from common.features.grammars.vocabulary import Beginning, Vocabulary, beginning_of, tokenizer_of
from common.requests.tokenizer import load_tokenizer
from common.sampling.runner_plugin import (
    BroughtByFew,
    HasTokens,
    PluginContext,
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

    def admit(self, row: int, new: NewRequestData) -> None:
        compiled = new.features.get(self.name)
        matched = None
        if compiled is not None:
            stop_token_ids = new.sampling_params.stop_token_ids
            matched = self.match(compiled, stop_token_ids, new.features["min_tokens"])
        self.put(row, matched)

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
        num_words = -(-len(self._vocabulary.token_bytes) // 32)
        bits = np.full((len(at), num_words), -1, dtype=np.int32)
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
        bits = np.full((1, -(-len(self._vocabulary.token_bytes) // 32)), -1, dtype=np.int32)
        matched: Matched = copy(self.brought[row])
        matched.begin()
        matched.take(outputs)
        matched.fill(bits, 0, ())
        is_allowed = np.unpackbits(bits.view(np.uint8), bitorder="little").astype(bool)
        is_allowed = np.pad(is_allowed, (0, max(0, vocab_size - len(is_allowed))))[:vocab_size]
        reason = " with min_tokens" if len(outputs) < matched.min_tokens else ""
        reason = f" ({matched.gave_up})" if matched.gave_up else reason
        return {f"{self.name}{reason}": is_allowed}

    def num_possible(self, state: HasTokens, row: int, drafts: Sequence[int]) -> int:
        matched: Matched | None = self.brought[row]
        if matched is None:
            return len(drafts)
        matched.follow(state, row)
        return matched.num_possible(drafts)


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
        ids = np.array([*self._ends])
        self._words, at = np.unique(ids // 32, return_inverse=True)  # those with end tokens
        self._bits = np.zeros(len(self._words), dtype=np.uint32)
        np.bitwise_or.at(self._bits, at, np.uint32(1) << (ids % 32).astype(np.uint32))
        self._bits = self._bits.view(np.int32)
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
        """Consume a draft token if it is allowed, and return whether it was. Validates first,
        because a matcher that has refused a token cannot be used any longer."""
        if self._has_ended:
            return False
        if self._end(draft):
            return True
        is_text = draft not in self._eos and self._matcher.validate_tokens([draft]) == 1
        return is_text and self._matcher.consume_token(draft)

    def _rollback(self, drafts: Sequence[int], num_taken: int) -> None:
        """Roll back the first `num_taken` draft tokens, those that were accepted."""
        tokens = drafts[:num_taken]
        if self._has_ended and tokens:
            self._has_ended = False
            tokens = tokens[:-1]
        self._matcher.rollback(len(tokens))
        if self._matcher.is_error():
            error = sentence_of(self._matcher.get_error())
            self.gave_up = "" if error == NOTHING_FITS else error
            if error != TOO_MANY_WAYS:  # that is caused by the text itself
                self.beginning.rebuild()
            self.begin()

    def fill(self, bits: np.ndarray, row: int, drafts: Sequence[int]) -> bool:
        """Fill `bits` [rows, words] int32 at `row` and at one more row for each draft token. After
        the end of the text, rows stay unchanged, because their samples are ignored. Returns False
        if the library gave up at the first row."""
        if self._has_ended:
            return True
        num_taken = 0
        for i, draft in enumerate([*drafts, -1]):
            self._fill_row(bits[row + i], self._num_taken + i)
            if draft < 0 or not self._accept(draft):
                break
            num_taken += 1
            if self._has_ended:
                break
        if self._matcher.is_error():
            bits[row + num_taken + 1 : row + 1 + len(drafts)] = 0
        self._rollback(drafts, num_taken)
        return bool(bits[row].any())

    def _fill_row(self, bits: np.ndarray, num_outputs: int) -> None:
        """Fill the `bits` [words] of the token after `num_outputs` outputs."""
        fill_next_token_bitmask(self._matcher, bits[None], 0)
        if self._matcher.is_error():  # the text does not match, or the limit is reached
            bits[:] = 0
            return
        if self._matcher.is_accepting():
            bits[self._words] |= self._bits
        if num_outputs < self.min_tokens:
            others = bits.copy()
            others[self._words] &= ~self._bits
            bits[:] = others if others.any() else bits

    def num_possible(self, drafts: Sequence[int]) -> int:
        num_taken = 0
        while num_taken < len(drafts) and self._accept(drafts[num_taken]):
            num_taken += 1
        self._rollback(drafts, num_taken)
        return num_taken


def make(context: PluginContext) -> GrammarMasks:
    tokenizer = context.tokenizer
    path = context.path
    tokenizer = tokenizer or (None if path is None else load_tokenizer(path))
    assert tokenizer is not None, "a grammar needs a tokenizer"
    return GrammarMasks(Vocabulary.of(tokenizer, context.vocab_size, context.eos_token_ids))
