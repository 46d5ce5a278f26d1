"""The runner's side of grammars: which tokens may be sampled in each row of a step.

    admit             what was compiled becomes a matcher of this request alone
    before_sampling   while the device computes: the matcher takes the tokens that are new, and says
                      in bits which may come next; one row of bits for each row of logits
    after that        logits of tokens that may not come are -inf, before anything else is done

A matcher's state follows from the outputs alone. So it takes them from the runner's own copy when
it needs them: after a preemption, several accepted guesses or a chunk nothing else is to be done.

Guesses (chapter 5) are matched one by one, for the bits of the rows behind each, and then taken
back: only what the runner knows as tokens stays. Behind a guess that the grammar does not allow,
nothing is said of the rows: it can not come true.

A step that was planned before the last one's tokens were read (`overlap.py`) waits for them here,
where the device has work already, and not before: so nobody sits out a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from llguidance.numpy import fill_next_token_bitmask

from common.features.grammars.lark_text import NOTHING_FITS, TOO_MANY_WAYS, sentence_of
from common.features.grammars.vocabulary import Beginning, Vocabulary, beginning_of, tokenizer_of
from common.models.loader import LoadedModel
from common.requests.tokenizer import Tokenizer, load_tokenizer
from common.sampling.runner_plugin import BroughtByFew, HasTokens, StepRows, UploadBuffer
from common.sampling.sampling_constraints import forbid
from scheduler_interface import NewRequestData


class GrammarMasks(BroughtByFew):
    """Made when the first request comes that brings a grammar."""

    name = "grammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()  # of a row, a `Matched`
        self._vocabulary, self._tokenizer = vocabulary, tokenizer_of(vocabulary)

    def admit(self, row: int, new: NewRequestData) -> None:
        compiled = new.features.get(self.name)
        self.put(row, None if compiled is None else self.match(compiled))

    def release(self, row: int) -> None:
        self.put(row, None)

    def match(self, compiled: str) -> Matched:
        return Matched(beginning_of(self._tokenizer, compiled), self._vocabulary)

    def before_sampling(
        self, step: StepRows, upload: UploadBuffer
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        rows, num_rows = step.queries.rows, step.queries.num_logit_rows
        first = np.cumsum(num_rows) - num_rows
        concerned = np.flatnonzero(self.has_one[rows] & (num_rows > 0))
        if not len(concerned):
            return None
        at = np.concatenate([first[i] + np.arange(num_rows[i]) for i in concerned])
        num_words = -(-len(self._vocabulary.pieces) // 32)
        bits = np.full((len(at), num_words), -1, dtype=np.int32)
        row_of_bits = 0
        for i in concerned.tolist():
            matched: Matched = self.brought[rows[i]]
            drafts = step.drafts.get(step.req_ids[i], ())
            for _ in range(2):  # once more if it had to begin anew
                matched.follow(step.state, rows[i])
                if matched.fill(bits, row_of_bits, drafts):
                    break
            row_of_bits += int(num_rows[i])
        sent_at, sent_bits = upload.add(at), upload.add(bits)
        return lambda logits: forbid(logits, sent_at(), sent_bits())

    def may_come(self, row: int, outputs: Sequence[int], vocab_size: int) -> dict[str, np.ndarray]:
        if not self.has_one[row]:
            return {}
        bits = np.full((1, -(-len(self._vocabulary.pieces) // 32)), -1, dtype=np.int32)
        matched = Matched(self.brought[row].beginning, self._vocabulary)
        matched.take(outputs)
        matched.fill(bits, 0, ())
        is_allowed = np.unpackbits(bits.view(np.uint8), bitorder="little").astype(bool)
        is_allowed = np.pad(is_allowed, (0, max(0, vocab_size - len(is_allowed))))[:vocab_size]
        why = f" ({matched.gave_up})" if matched.gave_up else ""
        return {f"{self.name}{why}": is_allowed}

    def num_possible(self, state: HasTokens, row: int, drafts: Sequence[int]) -> int:
        matched: Matched | None = self.brought[row]
        if matched is None:
            return len(drafts)
        matched.follow(state, row)
        return matched.num_possible(drafts)


class Matched:
    """How far the outputs of one request have come in its grammar. EOS is looked after here: the
    library says whether a text is whole, and what else may follow.

    Copies of a matcher share what they have found out, and the count of it. If the library gives
    up, it may be over what others have asked, or over a guess. So all begins anew then; only if a
    fresh matcher gives up, too, the request ends."""

    def __init__(self, beginning: Beginning, vocabulary: Vocabulary) -> None:
        self._vocabulary, self.beginning = vocabulary, beginning
        # Of each EOS its word, and its bit there.
        eos = [divmod(i, 32) for i in vocabulary.eos_token_ids]
        self._ends = [(word, np.uint32(1 << place).view(np.int32)) for word, place in eos]
        self.gave_up = ""  # why the library did, if it did
        self._begin()

    def _begin(self) -> None:
        self._matcher = self.beginning.matcher.deep_copy()
        self._num_taken = 0  # outputs
        self._has_ended = False  # EOS was one of them

    def follow(self, state: HasTokens, row: int) -> None:
        """Take the outputs that are new. One that is pending is waited for."""
        num_prompt = state.num_prompt_tokens[row]
        new = state.token_ids[row, num_prompt + self._num_taken : state.num_tokens[row]]
        self.take(map(state.known, new.tolist()))

    def take(self, outputs: Iterable[int]) -> None:
        for token_id in outputs:
            if token_id < 0 or self._has_ended:  # its request is over
                return
            if not self._end(token_id):
                self._matcher.consume_token(token_id)  # one that is wrong makes an error of it
            self._num_taken += 1

    def _end(self, token_id: int) -> bool:
        """Is it an end that may come here?"""
        if token_id in self._vocabulary.eos_token_ids and not self._has_ended:
            self._has_ended = self._matcher.is_accepting()
            return self._has_ended
        return False

    def _accept(self, draft: int) -> bool:
        """Asked first: a matcher that has refused a token is of no use any more."""
        if self._has_ended or draft in self._vocabulary.eos_token_ids:
            return self._end(draft)
        return self._matcher.validate_tokens([draft]) == 1 and self._matcher.consume_token(draft)

    def _rollback(self, drafts: Sequence[int], num_taken: int) -> None:
        """Those that were accepted."""
        tokens = drafts[:num_taken]
        if self._has_ended and tokens:
            self._has_ended, tokens = False, tokens[:-1]
        self._matcher.rollback(len(tokens))
        if self._matcher.is_error():
            why = sentence_of(self._matcher.get_error())
            self.gave_up = "" if why == NOTHING_FITS else why
            if why != TOO_MANY_WAYS:  # those are a text's own
                self.beginning.rebuild()
            self._begin()

    def fill(self, bits: np.ndarray, row: int, drafts: Sequence[int]) -> bool:
        """Of `bits` [rows, words] int32, that row and one for each draft behind it. Where the text
        has ended already they stay as they are: what is sampled there is nobody's. False if the
        library gave up at the first one."""
        if self._has_ended:
            return True
        num_taken = 0
        for i, draft in enumerate([*drafts, -1]):
            self._fill_row(bits, row + i)
            if draft < 0 or not self._accept(draft):
                break
            num_taken += 1
            if self._has_ended:
                break
        if self._matcher.is_error():
            bits[row + num_taken + 1 : row + 1 + len(drafts)] = 0
        self._rollback(drafts, num_taken)
        return bool(bits[row].any())

    def _fill_row(self, bits: np.ndarray, row: int) -> None:
        fill_next_token_bitmask(self._matcher, bits, row)
        if self._matcher.is_error():  # the text is none, or it has counted too many steps
            bits[row] = 0
            return
        is_whole = self._matcher.is_accepting()
        for word, end in self._ends:
            bits[row, word] = bits[row, word] | end if is_whole else bits[row, word] & ~end

    def num_possible(self, drafts: Sequence[int]) -> int:
        num_taken = 0
        while num_taken < len(drafts) and self._accept(drafts[num_taken]):
            num_taken += 1
        self._rollback(drafts, num_taken)
        return num_taken


class RunnerSpec(Protocol):
    """What is known of a runner when it is made. Without a tokenizer it is the checkpoint's."""

    @property
    def loaded(self) -> LoadedModel: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def vocab_size(self) -> int: ...


def make(given: RunnerSpec) -> GrammarMasks:
    path = given.loaded.path
    tokenizer = given.tokenizer or (None if path is None else load_tokenizer(path))
    assert tokenizer is not None, "a grammar needs a tokenizer"
    eos_token_ids = given.loaded.generation_eos_token_ids
    return GrammarMasks(Vocabulary.of(tokenizer, given.vocab_size, eos_token_ids))
