"""A one-line model, and a runner for it: a whole engine except for the arithmetic.

A scheduler can have correct counters and still ruin an answer: by a block that two requests write,
a table that was not sent to the runner, a history that was cut. So the fake model has a KV memory,
and its next token is a function of what it *reads* there, through the block table, as attention
does:

    kv[slot of position p] = mix(kv read at 0 .. p-1, token p)
    next token             = mix(kv read at 0 .. p)

One wrong slot changes every later token, and `continuation` computes the correct ones. Integers
instead of tensors make a step take microseconds, so tests can run thousands of them.

See 04_scheduler/beyond/OWN_POLICY.md"""

from __future__ import annotations

from collections.abc import Sequence

from kv_memory import SharingRunnerState
from scheduler_interface import FinishedStep, RunnerInput, StepOutput

_MODULUS = (1 << 61) - 1


def _mix(values: Sequence[int], token_id: int) -> int:
    return hash((*values, token_id)) % _MODULUS


def continuation(
    prompt_token_ids: Sequence[int], num_tokens: int, vocab_size: int = 50
) -> list[int]:
    """The model's output after a prompt, computed without blocks, tables or steps."""
    kv: list[int] = []
    for token_id in prompt_token_ids:
        kv.append(_mix(kv, token_id))
    outputs = []
    for _ in range(num_tokens):
        outputs.append(_mix(kv, -1) % vocab_size)
        kv.append(_mix(kv, outputs[-1]))
    return outputs


class FakeModelRunner:
    """Executes plans from their deltas alone, as a runner in another process would. A
    `ModelRunner`. `state` is chapter 3's copies of the requests, for callers that share them.
    Raises `AssertionError` if a plan has a request, a position or a slot that it cannot have."""

    def __init__(
        self, block_size: int, vocab_size: int = 50, state: SharingRunnerState | None = None
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.state = state or SharingRunnerState(max_num_seqs=4, max_blocks_per_request=1024)
        self._kv: dict[int, int] = {}  # by slot; slots that were never written are missing

    def execute(self, plan: RunnerInput) -> FinishedStep:
        """Run one step: sample tokens for each request whose last known token was in it."""
        self._apply(plan)
        starts = plan.starts()
        assert starts.keys() == plan.num_scheduled_tokens.keys()
        written: set[int] = set()
        sampled = {}
        for req_id, start in starts.items():
            request = self.state.requests[req_id]
            drafts = plan.scheduled_draft_token_ids.get(req_id, [])
            tokens = request.tokens(0, request.num_tokens) + drafts
            stop = start + plan.num_scheduled_tokens[req_id]
            assert 0 <= start < stop <= len(tokens), (req_id, start, stop, len(tokens))
            predicted = self._compute(req_id, tokens, start, stop, written)
            if stop == len(tokens):
                sampled[req_id] = self._verify(drafts, predicted[-1 - len(drafts) :])
        return FinishedStep(StepOutput(sampled))

    def _apply(self, plan: RunnerInput) -> None:
        requests = self.state.requests
        cached = plan.scheduled_cached_reqs
        assert plan.finished_req_ids <= requests.keys(), "an unknown request has finished"
        known = requests.keys() - plan.finished_req_ids
        sent = {new.req_id for new in plan.scheduled_new_reqs}
        assert known.isdisjoint(sent), f"sent as new twice: {known & sent}"
        self.state.apply(plan)
        for index, req_id in enumerate(cached.req_ids):
            request = requests[req_id]
            tokens = request.tokens(0, request.num_tokens)
            assert len(request.output_token_ids) == cached.num_output_tokens[index], req_id
            is_resumed = req_id in cached.resumed_req_ids
            assert not is_resumed or cached.new_token_ids[index] == tokens, "must be sent in full"

    def _compute(
        self, req_id: str, tokens: list[int], start: int, stop: int, written: set[int]
    ) -> list[int]:
        """The model's next token after each of the positions `[start, stop)`."""
        size = self.block_size
        block_ids = self.state.block_ids(req_id)
        slots = [block_ids[p // size] * size + p % size for p in range(stop)]
        kv = [self._kv[slot] for slot in slots[:start]]
        predicted = []
        for position in range(start, stop):
            slot = slots[position]
            assert slot >= size, "block 0 is the null block"
            assert slot not in written, f"slot {slot} is written twice in one step"
            written.add(slot)
            kv.append(_mix(kv, tokens[position]))
            self._kv[slot] = kv[-1]
            predicted.append(_mix(kv, -1) % self.vocab_size)
        return predicted

    @staticmethod
    def _verify(drafts: list[int], predicted: list[int]) -> list[int]:
        """The draft tokens up to the first that differs from the model's, and one token of the
        model."""
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == predicted[num_accepted]:
            num_accepted += 1
        return predicted[: num_accepted + 1]
