"""A model of one line, and a runner for it: everything of an engine but the arithmetic.

A scheduler can be right about counters and still ruin an answer: by a block that two requests
write, a table that the runner was not told of, a history that was cut. So the fake model has a KV
memory, and its next token is a function of what it *reads* there, through the block table, as
attention does:

    kv[slot of position p] = mix(kv read at 0 .. p-1, token p)
    next token             = mix(kv read at 0 .. p)

One wrong slot changes every later token, and `continuation` says what is right. Integers instead of
tensors make a step microseconds long, so tests can afford thousands of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_interface import SchedulerOutput

_MODULUS = (1 << 61) - 1


def _mix(values: Sequence[int], token_id: int) -> int:
    return hash((*values, token_id)) % _MODULUS


def continuation(
    prompt_token_ids: Sequence[int], num_tokens: int, vocab_size: int = 50
) -> list[int]:
    """What the model says after a prompt: computed without blocks, tables or steps."""
    kv: list[int] = []
    for token_id in prompt_token_ids:
        kv.append(_mix(kv, token_id))
    outputs = []
    for _ in range(num_tokens):
        outputs.append(_mix(kv, -1) % vocab_size)
        kv.append(_mix(kv, outputs[-1]))
    return outputs


@dataclass(slots=True)
class _FakeRequest:
    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids


class FakeModelRunner:
    """Executes plans from their deltas alone, as a runner in another process would.

    Raises `AssertionError` if a plan names a request, a position or a slot that it cannot."""

    def __init__(self, block_size: int, vocab_size: int = 50) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.requests: dict[str, _FakeRequest] = {}
        self._kv: dict[int, int] = {}  # by slot; what was never written is not there

    def execute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """One step: the tokens sampled for each request whose last known token was in it."""
        starts = self._apply(output)
        written: set[int] = set()
        sampled = {}
        for request_id, start in starts.items():
            request = self.requests[request_id]
            drafts = output.scheduled_draft_token_ids.get(request_id, [])
            tokens = request.token_ids + drafts
            stop = start + output.num_scheduled_tokens[request_id]
            assert 0 <= start < stop <= len(tokens), (request_id, start, stop, len(tokens))
            predicted = self._compute(request, tokens, start, stop, written)
            if stop == len(tokens):
                sampled[request_id] = self._verify(drafts, predicted[-1 - len(drafts) :])
        return sampled

    def _apply(self, output: SchedulerOutput) -> dict[str, int]:
        for request_id in output.finished_req_ids:
            del self.requests[request_id]
        starts = {}
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.requests, f"{new.req_id!r} is new twice"
            prompt, block_ids = list(new.prompt_token_ids), list(new.block_ids)
            self.requests[new.req_id] = _FakeRequest(prompt, block_ids=block_ids)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            request = self.requests[request_id]
            tokens = cached.new_token_ids[i]
            if request_id in cached.resumed_req_ids:
                assert tokens[: len(request.prompt_token_ids)] == request.prompt_token_ids
                request.output_token_ids = tokens[len(request.prompt_token_ids) :]
                request.block_ids = list(cached.new_block_ids[i])
            else:
                request.output_token_ids += tokens
                request.block_ids += cached.new_block_ids[i]
            assert len(request.output_token_ids) == cached.num_output_tokens[i], request_id
            starts[request_id] = cached.num_computed_tokens[i]
        self._copy_blocks(output)
        assert starts.keys() == output.num_scheduled_tokens.keys()
        return starts

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        size = self.block_size
        copied = {
            copy.dst_block_id * size + i: self._kv.get(copy.src_block_id * size + i)
            for copy in output.block_copies
            for i in range(size)
        }
        self._kv.update({slot: kv for slot, kv in copied.items() if kv is not None})
        for copy in output.block_copies:
            self.requests[copy.request_id].block_ids[copy.block_index] = copy.dst_block_id

    def _compute(
        self, request: _FakeRequest, tokens: list[int], start: int, stop: int, written: set[int]
    ) -> list[int]:
        """The model's next token after each of the positions `[start, stop)`."""
        size = self.block_size
        slots = [request.block_ids[p // size] * size + p % size for p in range(stop)]
        kv = [self._kv[slot] for slot in slots[:start]]
        predicted = []
        for position in range(start, stop):
            slot = slots[position]
            assert slot >= size, "block 0 is nobody's"
            assert slot not in written, f"slot {slot} is written twice in one step"
            written.add(slot)
            kv.append(_mix(kv, tokens[position]))
            self._kv[slot] = kv[-1]
            predicted.append(_mix(kv, -1) % self.vocab_size)
        return predicted

    @staticmethod
    def _verify(drafts: list[int], predicted: list[int]) -> list[int]:
        """Drafts as far as the model says the same, and one token of its own."""
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == predicted[num_accepted]:
            num_accepted += 1
        return predicted[: num_accepted + 1]
